"""Bodies of `/v1/responses`: their types, and their input as messages of a chat template."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from .body import json_type
from .errors import ApiError, bad_request, unsupported
from .schemas import Array, ReasoningOptions, SamplingBody

ROLES = ("user", "assistant", "system", "developer")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of content that are text, and where they have it."""


class ResponsesBody(SamplingBody):
    """`input`: a text, or items: messages, calls of functions and their results."""

    input: str | Array[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    reasoning: ReasoningOptions | None = None
    tools: Array[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: Array[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    parallel_tool_calls: bool | None = None


def input_items(given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as items with ids, the form in which they can be asked for again."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def _item(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind not in ITEMS:
        supported = ", ".join(ITEMS)
        shown = kind[:40] if isinstance(kind, str) else json_type(kind)
        raise unsupported(
            f"{where}.type", f"'{where}': items of type {shown!r} are not supported; supported: {supported}"
        )
    if kind != "message":
        return {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "completed", **item}
    role = item.get("role")
    if role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else json_type(role)
        supported = ", ".join(f"'{name}'" for name in ROLES)
        raise bad_request(
            f"Invalid value: {shown}. Supported values are: {supported}.", f"{where}.role", "invalid_value"
        )
    content, text = item.get("content"), "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": text, "text": content}]
    if not isinstance(content, list):
        raise _wrong_type(f"{where}.content", "a string or an array", content)
    for i, part in enumerate(content):
        text_of(part, f"{where}.content[{i}]")
    known = {"type": "message", "role": role, "content": content}
    return {"id": f"msg_{uuid.uuid4().hex}", "status": "completed", **item, **known}


_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def text_of(part: Any, where: str) -> str:
    """The text of a piece of content."""
    if not isinstance(part, dict):
        raise _wrong_type(where, "an object", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        shown = kind[:40] if isinstance(kind, str) else json_type(kind)
        message = f"'{where}': content of type {shown!r} is not supported; supported: input_text, output_text"
        raise unsupported(f"{where}.type", message)
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise _wrong_type(f"{where}.{_TEXTS[kind]}", "a string", text)
    return text


def messages_of(items: Sequence[dict[str, Any]], *, names: dict[str, str]) -> list[dict[str, Any]]:
    """Items as messages. `names` has the functions of earlier calls by their ids and gets those of new ones."""
    out: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item["type"] == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            text = "".join(text_of(part, where) for part in item["content"])
            out.append({"role": role, "content": text})
        elif item["type"] != "reasoning":
            (_add_call if item["type"] == "function_call" else _add_result)(out, item, where, names)
    return out


def _add_call(out: list[dict[str, Any]], item: dict[str, Any], where: str, names: dict[str, str]) -> None:
    call_id, name, arguments = (_string(item, key, where) for key in ("call_id", "name", "arguments"))
    try:
        parsed = from_json(arguments)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        param = f"{where}.arguments"
        raise bad_request(f"Invalid '{param}': expected a JSON object in a string.", param, "invalid_value")
    names[call_id] = name
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": parsed}}
    out[-1] = {**out[-1], "tool_calls": [*out[-1].get("tool_calls", ()), call]}


def _add_result(out: list[dict[str, Any]], item: dict[str, Any], where: str, names: dict[str, str]) -> None:
    call_id, output = _string(item, "call_id", where), item.get("output")
    if call_id not in names:
        message = f"No tool call found for function call output with call_id {call_id[:60]}."
        raise bad_request(message, f"{where}.call_id", "invalid_value")
    if isinstance(output, list):
        output = "".join(text_of(part, f"{where}.output[{i}]") for i, part in enumerate(output))
    elif isinstance(output, dict):
        output = to_json(output).decode()
    if not isinstance(output, str):
        raise _wrong_type(f"{where}.output", "a string", output)
    out.append({"role": "tool", "name": names[call_id], "content": output, "tool_call_id": call_id})


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _wrong_type(f"{where}.{key}", "a string", value)
    return value


def _wrong_type(param: str, expected: str, got: Any) -> ApiError:
    if got is None:
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    message = f"Invalid type for '{param}': expected {expected}, but got {json_type(got)} instead."
    return bad_request(message, param, "invalid_type")
