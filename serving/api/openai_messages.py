"""Messages of chat completions as messages of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from .body import json_type
from .errors import ApiError, bad_request, unsupported
from .schemas import ChatMessage, Part

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text content; `developer` is the newer name of `system`; the results of
    calls with the names of their functions."""
    names: dict[str, str] = {}
    return [_message(message, f"messages[{i}]", names) for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    """`names` has the functions that were called, by the ids of their calls."""
    extra = message.model_extra or {}
    if message.role not in ROLES:
        supported = ", ".join(f"'{role}'" for role in ROLES)
        text = f"Invalid value: {message.role[:40]!r}. Supported values are: {supported}."
        raise bad_request(text, f"{where}.role", "invalid_value")
    if extra.get("audio"):
        raise unsupported(f"{where}.audio", f"'{where}.audio': audio is not supported; supported: text")
    if message.role == "tool":
        return _result(message, where, names)
    if message.role == "function":
        return _old_result(message, where)
    role = "system" if message.role == "developer" else message.role
    calls = _calls(message, where, names)
    fields = {"name": message.name, "reasoning_content": _reasoning(message, where), "tool_calls": calls}
    content = "" if calls and message.content is None else _text(message, where)
    return {"role": role, "content": content, **{key: value for key, value in fields.items() if value}}


def _calls(message: ChatMessage, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The calls of an assistant's message, their arguments as objects."""
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) and message.role != "assistant":
            text = f"Invalid '{where}.{name}': only messages of the assistant have calls."
            raise bad_request(text, f"{where}.{name}", "invalid_value")
    calls = [_call(call, f"{where}.tool_calls[{i}]", names) for i, call in enumerate(message.tool_calls or ())]
    if message.function_call:
        function = _called(message.function_call, f"{where}.function_call")
        calls.append({"type": "function", "id": _old_id(function["name"]), "function": function})
    return calls


def _call(call: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise unsupported(f"{where}.type", f"'{where}': calls of this type are not supported; supported: 'function'")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _wrong_type(f"{where}.function", "an object", function)
    call_id, called = _string(call, "id", where), _called(function, f"{where}.function")
    names[call_id] = called["name"]
    return {"type": "function", "id": call_id, "function": called}


def _called(function: dict[str, Any], where: str) -> dict[str, Any]:
    """A function that was called, and its arguments as an object."""
    name, arguments = _string(function, "name", where), function.get("arguments", "")
    if not isinstance(arguments, str):
        raise _wrong_type(f"{where}.arguments", "a string", arguments)
    try:
        parsed = from_json(arguments) if arguments.strip() else {}
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        param = f"{where}.arguments"
        raise bad_request(f"Invalid '{param}': expected a JSON object in a string.", param, "invalid_value")
    return {"name": name, "arguments": parsed}


def _old_id(name: str) -> str:
    """Calls of the older kind have no ids: their results name the function."""
    return f"call_{name}"


def _old_result(message: ChatMessage, where: str) -> dict[str, Any]:
    if not message.name:
        name = f"{where}.name"
        raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    content = "" if message.content is None else _text(message, where)
    return {"role": "tool", "name": message.name, "content": content, "tool_call_id": _old_id(message.name)}


def _result(message: ChatMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    call_id = message.tool_call_id
    if call_id is None:
        name = f"{where}.tool_call_id"
        raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if call_id not in names:
        text = f"Invalid '{where}': messages with role 'tool' must answer a call in 'tool_calls' of an earlier message."
        raise bad_request(text, f"{where}.tool_call_id", "invalid_value")
    return {"role": "tool", "name": names[call_id], "content": _text(message, where), "tool_call_id": call_id}


def _reasoning(message: ChatMessage, where: str) -> str | None:
    """Thoughts that come back with an answer of the model; its template says which of them it sees again."""
    thoughts = (message.model_extra or {}).get("reasoning_content")
    if thoughts is None or message.role != "assistant":
        return None
    if not isinstance(thoughts, str):
        raise _wrong_type(f"{where}.reasoning_content", "a string", thoughts)
    return thoughts


def _text(message: ChatMessage, where: str) -> str:
    if message.content is None:
        text = f"Invalid value for '{where}.content': expected a string or an array of text parts, but got null."
        raise bad_request(text, f"{where}.content", "invalid_value")
    return content_text(message.content, where)


def content_text(content: str | Sequence[Part], where: str) -> str:
    """The text in the `content` of the field `where`."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        param = f"{where}.content[{i}]"
        if part.type not in ("text", "refusal"):
            raise unsupported(
                f"{param}.type", f"'{param}': parts of type {part.type[:40]!r} are not supported; supported: 'text'"
            )
        piece = part.text if part.type == "text" else (part.model_extra or {}).get("refusal")
        if not isinstance(piece, str):
            name = f"{param}.{part.type}"
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        texts.append(piece)
    return "".join(texts)


def _string(given: dict[str, Any], key: str, where: str) -> str:
    value = given.get(key)
    if value is None:
        name = f"{where}.{key}"
        raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if not isinstance(value, str):
        raise _wrong_type(f"{where}.{key}", "a string", value)
    return value


def _wrong_type(param: str, expected: str, got: Any) -> ApiError:
    message = f"Invalid type for '{param}': expected {expected}, but got {json_type(got)} instead."
    return bad_request(message, param, "invalid_type")
