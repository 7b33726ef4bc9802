"""The text of a request must not depend on how its tokens arrive."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.serving.engine.text import TextStream

Items = TypeVar("Items", bytes, list[int])
texts = st.text(st.sampled_from("aab<|é日🙂\ufffd "), max_size=30)
stops = st.lists(st.text(st.sampled_from("aab<|é日🙂"), min_size=1, max_size=5), max_size=4)


def cut(data: st.DataObject, items: Items) -> list[Items]:
    """`items` in pieces of random sizes, empty ones included."""
    places: list[int] = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=len(items) + 2)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


def first_stop(text: str, stop: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, the longest of those that end there."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return (min(found)[1], min(found)[0]) if found else None


@settings(max_examples=500, deadline=None)
@given(st.data(), texts, stops)
def test_text_is_the_unstopped_text_cut_at_the_first_stop(data: st.DataObject, text: str, stop: list[str]) -> None:
    tokens = cut(data, text.encode())
    stream = TextStream(tokens.__getitem__, stop)
    emitted, stopped_at, pushed = "", None, 0
    for step in cut(data, list(range(len(tokens)))):
        new, index = stream.push(step)
        emitted += new
        assert text.startswith(emitted)
        if index is not None:
            assert stopped_at is None
            stopped_at = step[index]
        pushed += len(step)
        if stopped_at is None:
            so_far = b"".join(tokens[:pushed]).decode(errors="ignore")
            held = so_far[len(emitted) :]
            assert not held or any(s.startswith(held) for s in stop)  # held back only as long as it must be
    emitted += stream.finish()
    place = first_stop(text, stop)
    assert stream.stopped == (place is not None)
    if place is None:
        assert emitted == text and stopped_at is None
    else:
        assert emitted == text[: place[0]]
        needed = len(text[: place[1]].encode())
        ends = [sum(map(len, tokens[: i + 1])) for i in range(len(tokens))]
        assert stopped_at == next(i for i, end in enumerate(ends) if end >= needed)
    assert stream.push([0] if tokens else []) == ("", None) or place is None
    assert stream.finish() == "" or place is None


@settings(max_examples=300, deadline=None)
@given(st.data(), st.binary(max_size=30), st.lists(st.sampled_from(["a", "\ufffd", "\ufffda", "é"]), max_size=2))
def test_any_bytes_in_any_pieces(data: st.DataObject, raw: bytes, stop: list[str]) -> None:
    text = raw.decode("utf-8", errors="replace")
    tokens = cut(data, raw)
    stream = TextStream(tokens.__getitem__, stop)
    emitted = "".join(stream.push(step)[0] for step in cut(data, list(range(len(tokens)))))
    emitted += stream.finish()
    place = first_stop(text, stop)
    assert emitted == (text if place is None else text[: place[0]])


def run(pieces: list[bytes], stop: list[str]) -> list[str]:
    stream = TextStream(pieces.__getitem__, stop)
    return [*(stream.push([i])[0] for i in range(len(pieces))), stream.finish()]


def test_a_character_waits_for_its_last_byte() -> None:
    assert run([b"\xf0\x9f", b"\x99", b"\x82!", b"\xe6\x97"], []) == ["", "", "🙂!", "", "\ufffd"]


def test_a_stop_string_is_held_back_until_it_is_certain() -> None:
    assert run([b"x <", b"|e", b"n>", b"y"], ["<|end|>"]) == ["x ", "", "<|en>", "y", ""]
    assert run([b"x <", b"|end", b"|>", b"y"], ["<|end|>"]) == ["x ", "", "", "", ""]
    assert run([b"x <|end"], ["<|end|>"]) == ["x ", "<|end"]


def test_a_stop_string_that_begins_again_inside_itself() -> None:
    assert "".join(run([b"aa", b"aa", b"b", b"c"], ["aab"])) == "aa"
    assert "".join(run([b"abab", b"abac"], ["abac"])) == "abab"


def test_the_stop_string_complete_first_wins() -> None:
    assert "".join(run([b"abcd"], ["abcd", "bc"])) == "a"
    assert "".join(run([b"abcd"], ["bc", "abc"])) == ""


def test_a_stop_string_inside_a_token_split_over_bytes() -> None:
    raw = "é日".encode()
    stream = TextStream([b"x" + raw[:1], raw[1:3], raw[3:] + b"tail"].__getitem__, ["é日"])
    assert stream.push([0, 1, 2, 0]) == ("x", 2)
    assert stream.push([0]) == ("", None) and stream.finish() == ""


def test_the_flush_can_complete_a_stop_string() -> None:
    assert run([b"a\xe6"], ["\ufffd"]) == ["a", ""]


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Counts the characters that are looked at: twice as many tokens, twice the work."""

    class Counted(str):
        looked = 0

        def __getitem__(self, key):
            Counted.looked += 1
            return str(self)[key]

    def work(tokens: int) -> int:
        stream = TextStream(lambda token: b"ab", ["ababac", "b" * 50])
        for stop in stream._stops:
            stop.text = Counted(stop.text)
        Counted.looked = 0
        for _ in range(tokens):
            stream.push([0])
        return Counted.looked

    assert work(2000) <= 2.01 * work(1000)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(lambda token: b"", [""])
