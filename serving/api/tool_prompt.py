"""Tools for models whose chat template has none: they are told in the system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .tool_calls import ToolFormat

_HOW = """You can call functions to answer. The functions, one JSON description a line:

{functions}

To call a function, answer with its name and its arguments, and nothing else, in this form:
{open}
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
{close}
The result comes back between <tool_response> and </tool_response>. If no function helps, answer in plain text."""


def told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, form: ToolFormat
) -> list[dict[str, Any]]:
    """`messages` that any chat template can render: with the `tools` explained in the system message, which comes
    first, and with calls and results as text. Results in a row are one message of the user."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += f"\n{result}"
            else:
                out.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            calls = "\n".join(_call(call["function"], form) for call in message["tool_calls"])
            text = message["content"]
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            out.append({**plain, "content": f"{text}\n{calls}" if text else calls})
        else:
            out.append(dict(message))
    for message in out:
        message.pop("results", None)
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        how = _HOW.format(functions=functions, open=form.open, close=form.close)
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{how}"}
        else:
            out.insert(0, {"role": "system", "content": how})
    return out


def _call(function: Mapping[str, Any], form: ToolFormat) -> str:
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{form.open}\n{body}\n{form.close}"
