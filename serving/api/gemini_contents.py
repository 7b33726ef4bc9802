"""Contents of the Gemini protocol as messages of a chat template.

Consecutive contents of one role are one turn: a client that got an answer in pieces sends it back in as many contents.
Thoughts that come back are left out of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from .errors import ApiError, bad_request, context_exceeded, unsupported
from .gemini_schemas import Content, FunctionCall, FunctionResponse, Part, invalid
from .service import Loaded

ROLES = ("user", "model")

_TEMPLATE_ROLES = {"user": "user", "model": "assistant", "function": "user"}
"""`function` is an older name for the turn with the results of calls."""

_CONTENTS_PER_TOKEN = 4
"""Contents that a request may have for every token of the context, as some may be empty."""

_NOT_TEXT = {
    "inline_data": "inlineData",
    "file_data": "fileData",
    "executable_code": "executableCode",
    "code_execution_result": "codeExecutionResult",
    "tool_call": "toolCall",
    "tool_response": "toolResponse",
}


def check_count(contents: Any, loaded: Loaded) -> None:
    """Refuse more contents than can mean anything, before time is spent on each."""
    most = _CONTENTS_PER_TOKEN * loaded.engine.context_length
    if isinstance(contents, list) and len(contents) > most:
        raise context_exceeded("contents", f"at least {len(contents) // _CONTENTS_PER_TOKEN}", most)


def messages_of(contents: Sequence[Content] | None, system: Content | None, *, where: str) -> list[dict[str, Any]]:
    """The messages of a request whose contents stand in the field `where` (`contents`, with a prefix perhaps)."""
    if not contents:
        raise bad_request(f"* {where}: contents is not specified", where, "missing_field")
    turns = _Turns()
    if system is not None and (text := system_text(system, where.replace("contents", "systemInstruction"))):
        turns.out.append({"role": "system", "content": text})
    for i, content in enumerate(contents):
        turns.add(content, f"{where}[{i}]")
    return turns.done(where)


def system_text(system: Content, where: str) -> str:
    """The text of a system instruction."""
    texts = []
    for i, part in enumerate(system.parts or ()):
        place = f"{where}.parts[{i}]"
        _check_kind(part, place)
        if part.text is None:
            raise unsupported(place, f"'{place}': only text is supported in a system instruction")
        texts.append(part.text)
    return "".join(texts)


class _Turns:
    """Messages under construction: parts of one role in a row share a message."""

    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self._role = ""
        self._texts: list[str] = []
        self._turn_calls: list[dict[str, Any]] = []

    def add(self, content: Content, where: str) -> None:
        role = content.role or "user"
        if role not in _TEMPLATE_ROLES:
            raise invalid(f"{where}.role", f"got {role[:40]!r}. Please use a valid role: {', '.join(ROLES)}.")
        role = _TEMPLATE_ROLES[role]
        if not content.parts and role == "user":
            raise bad_request(f"* {where}.parts: contents.parts must not be empty", f"{where}.parts", "missing_field")
        if role != self._role:
            self._flush()
            self._role = role
        for i, part in enumerate(content.parts or ()):
            self._add_part(part, f"{where}.parts[{i}]")

    def _add_part(self, part: Part, where: str) -> None:
        _check_kind(part, where)
        if part.thought or (part.text is None and part.thought_signature is not None and not _is_call(part)):
            return
        if part.text is not None:
            self._texts.append(part.text)
        elif part.function_call is not None:
            if self._role != "assistant":
                raise invalid(where, "a functionCall belongs to a content of the role 'model'")
            self._turn_calls.append(_call(part.function_call, f"{where}.functionCall"))
        elif part.function_response is not None:
            if self._role != "user":
                raise invalid(where, "a functionResponse belongs to a content of the role 'user'")
            self._flush()
            self._role = "user"
            self.out.append(_result(part.function_response, f"{where}.functionResponse"))

    def _flush(self) -> None:
        """The turn so far becomes a message: an empty answer too, so that roles keep alternating; a user's turn of
        results alone has become messages already."""
        if self._texts or self._role == "assistant":
            message: dict[str, Any] = {"role": self._role, "content": "".join(self._texts)}
            if self._turn_calls:
                message["tool_calls"] = self._turn_calls
            self.out.append(message)
        self._role, self._texts, self._turn_calls = "", [], []

    def done(self, where: str) -> list[dict[str, Any]]:
        self._flush()
        if all(message["role"] == "system" for message in self.out):
            raise bad_request(f"* {where}: contents hold nothing that can be answered", where, "missing_field")
        return self.out


def _is_call(part: Part) -> bool:
    return part.function_call is not None or part.function_response is not None


def _check_kind(part: Part, where: str) -> None:
    """Exactly one kind of data, and one that is supported."""
    for name, shown in _NOT_TEXT.items():
        if getattr(part, name) is not None:
            raise unsupported(f"{where}.{shown}", f"'{where}.{shown}' is not supported; supported: text")
    kinds = [name for name in ("text", "function_call", "function_response") if getattr(part, name) is not None]
    if len(kinds) > 1:
        raise invalid(where, "oneof field 'data' is set more than once: a part is text, a call or a result")
    if not kinds and part.thought is None and part.thought_signature is None:
        raise _no_data(where)


def _no_data(where: str) -> ApiError:
    message = f"* {where}.data: required oneof field 'data' must have one initialized field"
    return bad_request(message, where, "missing_field")


def _call(call: FunctionCall, where: str) -> dict[str, Any]:
    if not call.name:
        raise bad_request(f"Missing required field: '{where}.name'", f"{where}.name", "missing_field")
    function = {"name": call.name, "arguments": call.args or {}}
    return {"type": "function", **({} if call.id is None else {"id": call.id}), "function": function}


def _result(result: FunctionResponse, where: str) -> dict[str, Any]:
    if not result.name:
        raise bad_request(f"Missing required field: '{where}.name'", f"{where}.name", "missing_field")
    if result.parts:
        raise unsupported(f"{where}.parts", f"'{where}.parts' is not supported; supported: response")
    content = to_json(result.response or {}).decode()
    named = {} if result.id is None else {"tool_call_id": result.id}
    return {"role": "tool", "name": result.name, "content": content, **named}
