"""Tool calls in the text of an answer.

A model that was trained on tools writes its calls as text, in the form that its chat template asks for. `tool_format`
finds that form in the template, or gives a generic one that `tool_prompt.py` explains to the model; `CallParser` takes
the calls out of the text as it arrives. Knows no protocol.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_USES_TOOLS = re.compile(r"\{%-?[^%]*\btools\b")


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects `{"name": ..., "arguments": {...}}` between two markers."""

    open: str
    close: str
    native: bool = True
    """Whether the chat template has tools in this form."""


HERMES = ToolFormat("<tool_call>", "</tool_call>")
"""The form of Hermes, Qwen 2.5 and 3, and the models that follow them."""
GENERIC = dataclasses.replace(HERMES, native=False)
"""For models whose template has no tools, or has them in an unknown form."""


def tool_format(template: Any) -> ToolFormat:
    """How a model with this chat template writes calls."""
    source = getattr(template, "source", "")
    found = HERMES.open in source and HERMES.close in source and "arguments" in source
    return HERMES if _USES_TOOLS.search(source) and found and "<function=" not in source else GENERIC


Mode = Literal["auto", "validated", "required"]


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions that a model is told of, as templates show them: OpenAI's descriptions.

    `mode`: the model may call, may call with valid arguments alone, or must call. `allowed` are the functions that it
    may call, None: all. `parallel`: one that must call may do so several times. The arguments of `strict` functions are
    valid in any mode.
    """

    form: ToolFormat
    descriptions: list[dict[str, Any]]
    mode: Mode = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = False
    strict: frozenset[str] = frozenset()

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        functions = [one["function"] for one in self.descriptions]
        return [one for one in functions if self.allowed is None or one["name"] in self.allowed]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one["name"] for one in self.callable)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadCall:
    """What stood between the markers and is not a call."""

    text: str
    reason: str
    ended: bool = True  # by the closing marker


Piece = str | ToolCall | BadCall


def written(piece: ToolCall | BadCall, form: ToolFormat) -> str:
    """A call as the model wrote it, more or less."""
    if isinstance(piece, BadCall):
        return form.open + piece.text + (form.close if piece.ended else "")
    body = json.dumps({"name": piece.name, "arguments": piece.arguments}, ensure_ascii=False)
    return form.open + body + form.close


class CallParser:
    """Splits text into answer text and calls.

    How the text is cut into calls of `push` changes nothing: markers may be split anywhere, and several calls may come
    at once. White space around calls is dropped. A call that is not complete at the end is a `BadCall`.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._held = ""  # inside a call: its text so far; outside: what may become a marker, or space before one
        self._inside = False
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """What has become certain."""
        out: list[Piece] = []
        self._held += text
        while (at := self._marker()) >= 0:
            marker = self._form.close if self._inside else self._form.open
            before, self._held = self._held[:at], self._held[at + len(marker) :]
            if self._inside:
                out.append(_call(before))
                self._after_call = True
            else:
                self._text(out, before.rstrip())
            self._inside = not self._inside
        if not self._inside:
            sure = self._certain(self._held, self._form.open)
            self._text(out, self._held[:sure])
            self._held = self._held[sure:]
        return out

    def finish(self) -> list[Piece]:
        """What was held back."""
        held, self._held = self._held, ""
        out: list[Piece] = []
        if self._inside and self._form.close in held:  # all of them in what looks like a string that never ends
            before, _, rest = held.partition(self._form.close)
            self._inside, self._after_call = False, True
            return [_call(before), *self.push(rest), *self.finish()]
        if self._inside:
            return [_call(held, ended=False)]
        self._text(out, held)
        return out

    def _marker(self) -> int:
        """Where the next marker is, -1 for nowhere. One within a string of a call is none."""
        if not self._inside:
            return self._held.find(self._form.open)
        at = self._held.find(self._form.close)
        while at >= 0 and _ESCAPED.sub("", self._held[:at]).count('"') % 2:
            at = self._held.find(self._form.close, at + 1)
        return at

    def _text(self, out: list[Piece], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            out.append(text)

    @staticmethod
    def _certain(text: str, marker: str) -> int:
        """How many characters of `text` are answer text whatever comes: all but the beginning of a marker at its end
        and the white space before that."""
        begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
        return len(text[: len(text) - begun].rstrip())


def _call(text: str, *, ended: bool = True) -> ToolCall | BadCall:
    if not ended:
        return BadCall(text, "the call was not complete", ended=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(text, f"the call is not JSON: {error}")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return BadCall(text, "the call has no name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return BadCall(text, "the arguments of the call are not an object")
    return ToolCall(name, arguments)
