"""Thoughts and answer must not depend on how tokens arrive, and their border must be where the device sees it."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.serving.engine.text import TextStream
from umbra.serving.engine.thoughts import MAX_CLOSE, Channels, Thinking, ThoughtEnd

OPEN_END = ((1, 2), (3, 1, 2), (2, 2, 1, 4))
"""Sequences that overlap each other and themselves."""
PIECES = [b"a", b"</", b">", b" ", b"\n", b"S", b"T", b"\xc3", b"\xa9", b"\xf0\x9f\x99\x82", b"b "]
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
closes = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=MAX_CLOSE, unique=True
).map(tuple)


def thinking(close=OPEN_END, budget=5):
    """With a conclusion that is one of `close`, after a token that is in none of them if that is what it takes."""
    for sequence in sorted(close, key=len):
        ends = ThoughtEnd(close)
        if [ends.push(token) for token in sequence].index(True) == len(sequence) - 1:
            return Thinking(budget, close, sequence)
    raise AssertionError("the shortest sequence always ends itself")


def border(ids, close):
    """Tokens up to the end of the thoughts, and how many of them close: said in another way than the code does."""
    for n in range(1, len(ids) + 1):
        found = [len(c) for c in close if tuple(ids[:n][-len(c) :]) == c]
        if found:
            return n, max(found)
    return None


def cut(data, items):
    places = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=len(items) + 2)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


def run(steps, stop=(), how=None):
    """Everything that comes out of `Channels`: thought, answer, place of the stop in all tokens, thought tokens."""
    channels = Channels(PIECES.__getitem__, stop, how)
    thought, answer, stop_at, pushed = "", "", None, 0
    for step in steps:
        more_thought, more, index = channels.push(step)
        if index is not None:
            assert stop_at is None
            stop_at = pushed + index
        thought, answer, pushed = thought + more_thought, answer + more, pushed + len(step)
    last_thought, last = channels.finish()
    return thought + last_thought, answer + last, stop_at, channels.thought_tokens


@settings(max_examples=300, deadline=None)
@given(st.data(), tokens, closes, st.lists(st.sampled_from(["S", "ST", "a", "é", ">"]), max_size=2))
def test_grouping_changes_nothing_and_the_parts_are_right(data, ids, close, stop):
    how = thinking(close)
    thought, answer, stop_at, count = run(cut(data, ids), stop, how)
    end = border(ids, close)
    inside = ids if end is None else ids[: end[0] - end[1]]
    assert thought == b"".join(PIECES[i] for i in inside).decode(errors="replace").strip()
    assert count == (len(ids) if end is None else end[0])
    after = [] if end is None else ids[end[0] :]
    text = b"".join(PIECES[i] for i in after).decode(errors="replace").lstrip()
    plain = TextStream(lambda _: text.encode(), stop)
    expected = plain.push([0])[0] + plain.finish()
    assert answer == expected
    if stop_at is not None:
        assert end is not None and stop_at >= end[0]
    assert (stop_at is not None) or not any(s in text for s in stop)


@settings(max_examples=200, deadline=None)
@given(st.data(), tokens, st.lists(st.sampled_from(["S", "ST", "a"]), max_size=2))
def test_without_thinking_it_is_a_text_stream(data, ids, stop):
    steps = cut(data, ids)
    thought, answer, stop_at, count = run(steps, stop)
    stream, text, place, pushed = TextStream(PIECES.__getitem__, stop), "", None, 0
    for step in steps:
        more, index = stream.push(step)
        place = pushed + index if index is not None else place
        text, pushed = text + more, pushed + len(step)
    assert (thought, answer, stop_at, count) == ("", text + stream.finish(), place, 0)


@settings(max_examples=200, deadline=None)
@given(tokens, closes)
def test_text_is_held_back_only_as_long_as_it_must_be(ids, close):
    channels, shown = Channels(PIECES.__getitem__, (), thinking(close)), ""
    for n, token in enumerate(ids, 1):
        shown += channels.push([token])[0]
        if border(ids[:n], close):
            return
        seen = tuple(ids[:n])
        held = max((k for c in close for k in range(1, len(c)) if seen[-k:] == c[:k]), default=0)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert shown == decoder.decode(b"".join(PIECES[i] for i in ids[: n - held])).strip()


def test_a_closing_marker_spread_over_steps():
    how = Thinking(9, ((1, 0, 2),), (5, 1, 0, 2))
    for steps in ([[5, 0, 1, 0, 2, 6]], [[5, 0, 1], [0], [2], [6]], [[5], [0, 1, 0], [2, 6]]):
        assert run(steps, (), how) == ("Sa", "T", None, 5)


def test_the_beginning_of_a_marker_that_does_not_go_on_is_thought():
    how = Thinking(9, ((1, 0, 2),), (1, 0, 2))
    channels = Channels(PIECES.__getitem__, (), how)
    assert channels.push([0, 1]) == ("a", "", None)
    assert channels.push([0]) == ("", "", None)
    assert channels.push([1]) == ("</a", "", None)  # the marker may begin here
    assert channels.push([0, 2]) == ("", "", None) and not channels.thinking
    assert channels.push([5]) == ("", "S", None)
    assert channels.thought_tokens == 6


def test_stop_strings_inside_thoughts_and_across_the_border_do_not_stop():
    how = Thinking(9, ((1, 2),), (1, 2))
    assert run([[5, 6, 1, 2, 6, 5, 6, 0]], ("ST",), how) == ("ST", "T", 6, 4)
    assert run([[5], [1, 2], [6, 0]], ("ST",), how) == ("S", "Ta", None, 3)


def test_white_space_around_the_thoughts_is_dropped():
    how = Thinking(9, ((1, 2),), (1, 2))
    assert run([[4, 4, 0, 4], [3, 5, 4], [1, 2, 4], [4, 3, 0, 3]], (), how) == ("a\n S", "a ", None, 9)
    assert run([[4, 3, 1, 2, 4]], ("\n",), how) == ("", "", None, 4)  # nor is a stop string found in it


def test_a_cut_character_ends_with_its_channel():
    how = Thinking(9, ((1, 2),), (1, 2))
    assert run([[0, 7, 1, 2, 8, 0]], (), how) == ("a\ufffd", "\ufffda", None, 4)
    assert run([[0, 7], [8]], (), how) == ("aé", "", None, 3)


def test_thoughts_that_never_end():
    how = Thinking(9, ((1, 2),), (1, 2))
    assert run([[0, 1]], ("a",), how) == ("a</", "", None, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, ((1,),), (1,)), "budget must be at least 1"),
        ((1, (), (1,)), "1 to 4 token sequences"),
        ((1, ((1,), (2,), (3,), (4,), (5,)), (1,)), "1 to 4 token sequences"),
        ((1, ((),), (1,)), "has 1 to 8 tokens, got 0"),
        ((1, ((1,) * 9,), (1,)), "has 1 to 8 tokens, got 9"),
        ((1, ((1,),), ()), "has 1 to 48 tokens, got 0"),
        ((1, ((1,),), (2,) * 48 + (1,)), "has 1 to 48 tokens, got 49"),
        ((1, ((1,),), (1, 2)), "must end with a sequence that ends them"),
        ((1, ((1,),), (1, 2, 1)), "and hold no other"),
        ((1, ((1, 2),), (2,)), "must end with a sequence that ends them"),
    ],
)
def test_what_cannot_be_thinking_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Thinking(*arguments)
