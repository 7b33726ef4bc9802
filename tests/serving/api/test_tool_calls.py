from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.serving.api.tool_calls import GENERIC, HERMES, BadCall, CallParser, ToolCall, tool_format


def parsed(pieces_of_text):
    """Texts and calls, neighbouring texts joined."""
    parser, out = CallParser(HERMES), []
    for piece in [found for text in pieces_of_text for found in parser.push(text)] + parser.finish():
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("", []),
     ("just text \n", ["just text \n"]),
     ("a < b <tool", ["a < b <tool"]),
     (call("f", a=1), [ToolCall("f", {"a": 1})]),
     (call("f") + "\n" + call("g"), [ToolCall("f", {}), ToolCall("g", {})]),
     ("Wait.\n\n" + call("f") + "\n\nDone. ", ["Wait.", ToolCall("f", {}), "Done. "]),
     ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", {})]),
     ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", {"a": 1})]),
     (call("f", a="<tool_call>"), [ToolCall("f", {"a": "<tool_call>"})]),
     (call("f", a='x"</tool_call>\\', b=1), [ToolCall("f", {"a": 'x"</tool_call>\\', "b": 1})]),
     ("</tool_call> a", ["</tool_call> a"])],
)  # fmt: skip
def test_calls_and_text(text, pieces):
    assert parsed([text]) == pieces


@pytest.mark.parametrize(
    "inside", ["", "{", "[]", "null", '{"name": 5}', '{"name": ""}', '{"name": "f", "arguments": []}',
               '{"name": "f", "arguments": "x"}', '{"arguments": {}}', "[" * 100_000]
)  # fmt: skip
def test_what_is_no_call(inside):
    (bad,) = parsed([f"<tool_call>{inside}</tool_call>"])
    assert isinstance(bad, BadCall) and bad.text == inside and bad.reason


def test_a_call_that_is_cut_off():
    (bad,) = parsed(['<tool_call>{"name": "f"}'])
    assert isinstance(bad, BadCall) and "complete" in bad.reason


@given(
    st.lists(st.sampled_from(["<", "<tool_call>", "</tool_call>", " ", "\n", "x", '{"name": "f"}', "é"]), max_size=12),
    st.data(),
)
def test_cuts_change_nothing(words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == parsed([text]) == parsed(list(text))


@pytest.mark.parametrize(
    ("source", "form"),
    [("{% for t in tools %}{{ t }}{% endfor %}<tool_call>{\"arguments\"}</tool_call>", HERMES),
     ("{%- if tools %}<tool_call>{\"name\": , \"arguments\": }</tool_call>{%- endif %}", HERMES),
     ("{% for m in messages %}{{ m.content }}{% endfor %}", GENERIC),
     ("<tool_call>{\"arguments\"}</tool_call>", GENERIC),
     ("{% if tools %}[TOOL_CALLS]{% endif %}", GENERIC),
     ("{% if tools %}<tool_call><function=f>arguments</tool_call>{% endif %}", GENERIC)],
)  # fmt: skip
def test_the_form_is_found_in_the_template(source, form):
    assert tool_format(SimpleNamespace(source=source)) == form
