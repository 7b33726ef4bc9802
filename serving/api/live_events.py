"""What a Live session says: the frames of one turn of the model."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic_core import from_json, to_json

from ..engine.request import Emission, Usage
from .answer_pieces import Pieces
from .errors import ApiError
from .eventlog import Event
from .gemini_answers import text_tokens
from .interaction_events import told
from .runs import Ending
from .tool_calls import ToolCall, Tools

_TEXT = b'{"serverContent":{"modelTurn":{"role":"model","parts":[{"text":'


class LiveWriter:
    """Turns emissions into frames. Calls come at the end of a turn, which then goes on when their results are there;
    else the turn is complete. `handle`: the session can be resumed with it."""

    def __init__(self, id: str, *, show_thoughts: bool, tools: Tools | None, handle: str | None) -> None:
        self.resource: dict[str, Any] = {"id": id}
        self.calls: list[dict[str, Any]] = []
        """Calls whose results the turn waits for."""
        self._show_thoughts = show_thoughts
        self._handle = handle
        self._pieces = Pieces(tools)
        self._text = ""

    def begin(self) -> list[Event]:
        return []

    def push(self, emission: Emission) -> list[Event]:
        parts: list[dict[str, Any]] = []
        if self._show_thoughts and emission.thought:
            parts.append({"text": emission.thought, "thought": True})
        for piece in self._pieces.take(emission):
            if isinstance(piece, ToolCall):
                self.calls.append({"id": f"call_{uuid.uuid4().hex}", "name": piece.name, "args": piece.arguments})
            else:
                self._text += piece
                parts.append({"text": piece})
        return [{"serverContent": {"modelTurn": {"role": "model", "parts": parts}}}] if parts else []

    def end(self, emission: Emission, ending: Ending) -> list[Event]:
        usage = {"usageMetadata": live_usage(emission.usage or Usage(0, 0))}
        self.resource["usage"] = usage["usageMetadata"]
        update = {"sessionResumptionUpdate": {"newHandle": self._handle, "resumable": True}}
        said: list[Event] = []
        if ending == "finished" and self.calls:
            said = [{"toolCall": {"functionCalls": self.calls}, **usage}]
        else:
            self.calls = []
            done = "generationComplete" if ending == "finished" else "interrupted"
            said = [{"serverContent": {done: True}}, {"serverContent": {"turnComplete": True}, **usage}]
        return [*said[:-1], update, said[-1]] if self._handle is not None else said

    def fail(self, error: ApiError) -> list[Event]:
        return []

    def not_stored(self, events: list[Event], error: ApiError) -> None:
        for event in events:
            if "sessionResumptionUpdate" in event:
                event["sessionResumptionUpdate"] = {"resumable": False}

    def encode(self, event: Event, number: int) -> bytes:
        return to_json(event)

    @staticmethod
    def merge(first: bytes, second: bytes) -> bytes | None:
        if not (first.startswith(_TEXT) and second.startswith(_TEXT)):
            return None
        a, b = (from_json(one)["serverContent"]["modelTurn"]["parts"] for one in (first, second))
        if [*a[0], *b[0]] != ["text", "text"] or len(a) != 1 or len(b) != 1:
            return None
        parts = [{"text": a[0]["text"] + b[0]["text"]}]
        return to_json({"serverContent": {"modelTurn": {"role": "model", "parts": parts}}})

    def told(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        steps: list[dict[str, Any]] = [{"type": "model_output", "content": [{"text": self._text}]}]
        for call in self.calls:
            steps.append({"type": "function_call", "id": call["id"], "name": call["name"], "arguments": call["args"]})
        return told(steps)


def live_usage(used: Usage) -> dict[str, Any]:
    response = used.completion_tokens - used.thought_tokens
    return {
        "promptTokenCount": used.prompt_tokens,
        "cachedContentTokenCount": used.cached_tokens,
        "responseTokenCount": response,
        "thoughtsTokenCount": used.thought_tokens,
        "totalTokenCount": used.prompt_tokens + used.completion_tokens,
        "promptTokensDetails": text_tokens(used.prompt_tokens),
        "responseTokensDetails": text_tokens(response),
    }
