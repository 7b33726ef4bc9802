"""The input of an interaction as messages of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from .body import json_type
from .errors import ApiError, bad_request, unsupported
from .gemini_schemas import invalid

STEPS = ("user_input", "model_output", "thought", "function_call", "function_result")
CONTENTS = ("text", "image", "audio", "video", "document")


def steps_of(given: Any) -> list[dict[str, Any]]:
    """The input as steps."""
    if isinstance(given, str):
        given = [{"type": "text", "text": given}]
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not given:
        raise bad_request("'input' is required: a text, contents or steps", "input", "missing_field")
    for i, item in enumerate(given):
        if not isinstance(item, dict) or not isinstance(item.get("type"), str):
            raise invalid(f"input[{i}]", f"expected an object with a type, got {json_type(item)}")
    if all(item["type"] in CONTENTS for item in given):
        return [{"type": "user_input", "content": given}]
    return given


def messages_of(
    steps: Sequence[dict[str, Any]], *, names: dict[str, str], field: str = "input"
) -> list[dict[str, Any]]:
    """Steps as messages. `names` has the functions of earlier calls by their ids and gets those of new ones."""
    out: list[dict[str, Any]] = []
    for i, step in enumerate(steps):
        where, kind = f"{field}[{i}]", step["type"]
        if kind in ("user_input", "model_output"):
            role = "user" if kind == "user_input" else "assistant"
            text = text_of(step.get("content"), f"{where}.content")
            if out and out[-1]["role"] == role:
                out[-1]["content"] += text
            else:
                out.append({"role": role, "content": text})
        elif kind in ("function_call", "function_result"):
            (_add_call if kind == "function_call" else _add_result)(out, step, where, names)
        elif kind != "thought":
            message = f"'{where}': steps of type {kind[:40]!r} are not supported; supported: {', '.join(STEPS)}"
            raise unsupported(f"{where}.type", message)
    if not out:
        raise bad_request(f"'{field}' holds nothing that can be answered", field, "missing_field")
    return out


def text_of(content: Any, where: str) -> str:
    """The text of a list of contents."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list) or not content:
        raise _missing(where, content, "a list of contents")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            if not isinstance(kind, str):
                raise invalid(place, "expected an object with a type")
            raise unsupported(place, f"'{place}': content of type {kind[:40]!r} is not supported; supported: text")
        texts.append(_string(part, "text", place))
    return "".join(texts)


def _add_call(out: list[dict[str, Any]], step: dict[str, Any], where: str, names: dict[str, str]) -> None:
    call_id, name, arguments = _string(step, "id", where), _string(step, "name", where), step.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.arguments", f"expected an object, got {json_type(arguments)}")
    names[call_id] = name
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
    out[-1] = {**out[-1], "tool_calls": [*out[-1].get("tool_calls", ()), call]}


def _add_result(out: list[dict[str, Any]], step: dict[str, Any], where: str, names: dict[str, str]) -> None:
    call_id, result = _string(step, "call_id", where), step.get("result")
    name = step.get("name") or names.get(call_id)
    if not isinstance(name, str):
        raise invalid(
            f"{where}.call_id", f"no function call has the id {call_id[:60]!r}; supported: ids of calls, or a name"
        )
    if result is None:
        raise _missing(f"{where}.result", None, "a result")
    if isinstance(result, list) and all(isinstance(part, dict) and "type" in part for part in result):
        result = text_of(result, f"{where}.result") if result else ""
    if step.get("is_error"):
        result = {"error": result}
    content = result if isinstance(result, str) else to_json(result).decode()
    out.append({"role": "tool", "name": name, "content": content, "tool_call_id": call_id})


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _missing(f"{where}.{key}", value, "a string")
    return value


def _missing(field: str, got: Any, expected: str) -> ApiError:
    if got is None or got == []:
        return bad_request(f"Missing required field: '{field}'", field, "missing_field")
    return invalid(field, f"expected {expected}, got {json_type(got)}")
