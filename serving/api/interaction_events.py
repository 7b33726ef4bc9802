"""An interaction under construction: its steps, and the events that tell a stream's client of them."""

from __future__ import annotations

import datetime
import re
import time
import uuid
from typing import Any

from pydantic_core import to_json

from ..engine.request import Emission, Usage
from .answer_pieces import Pieces
from .errors import ApiError, stopping
from .eventlog import Event
from .interaction_errors import interaction_error
from .run import Ending
from .stream import event as data_event
from .stream import event_data
from .tool_calls import ToolCall, Tools

DONE = b"event: done\ndata: [DONE]\n\n"
"""Follows the last event of a stream."""

_ID = re.compile(r"e([1-9][0-9]{0,8})(c?)")
_CUT = ("max_tokens", "context_length")


class InteractionWriter:
    """Turns emissions into steps and events. How tokens are grouped into emissions changes no step.

    `resource` is the interaction as clients see it. `thinks`: the answer begins with thoughts, which become a step,
    with the text as its summary if `summary`.
    """

    def __init__(self, resource: dict[str, Any], *, thinks: bool, summary: bool, tools: Tools | None) -> None:
        self.resource = resource
        self._steps: list[dict[str, Any]] = resource["steps"]
        self._thinks, self._summary = thinks, summary
        self._pieces = Pieces(tools)
        self._open: str | None = None  # type of the last step while it may grow

    # ---- events

    def begin(self) -> list[Event]:
        return [
            {"event_type": "interaction.created", "interaction": self._told()},
            self._status(self.resource["status"]),
        ]

    def push(self, emission: Emission) -> list[Event]:
        events: list[Event] = []
        if self._thinks and not self._steps and (emission.thought or emission.token_ids):
            events += self._add({"type": "thought"})
        if emission.thought and self._summary and self._open == "thought":
            events.append(self._think(emission.thought))
        for piece in self._pieces.take(emission):
            events += self._call(piece) if isinstance(piece, ToolCall) else self._say(piece)
        return events

    def end(self, emission: Emission, ending: Ending) -> list[Event]:
        called = any(step["type"] == "function_call" for step in self._steps)
        if ending == "finished":
            cut = emission.finish_reason in _CUT
            status = "incomplete" if cut else "requires_action" if called else "completed"
        else:
            status = "cancelled" if ending == "cancelled" else "incomplete"
        if ending == "stopped":
            self.resource["errors"] = [interaction_error(stopping())]
        events: list[Event] = []
        if status == "completed" and self._open != "model_output":
            events += self._add({"type": "model_output", "content": []})  # an answer that is empty is still one
        events += self._close()
        self.resource |= {"status": status, "updated": timestamp(time.time())}
        self.resource["usage"] = usage(emission.usage or Usage(0, 0))
        return [*events, {"event_type": "interaction.completed", "interaction": self._told()}]

    def fail(self, error: ApiError) -> list[Event]:
        told = interaction_error(error)
        self._close()
        self.resource |= {"status": "failed", "updated": timestamp(time.time()), "errors": [told]}
        return [{"event_type": "error", "error": told}]

    def not_stored(self, events: list[Event], error: ApiError) -> None:
        self.resource["errors"] = [interaction_error(error)]
        events[-1]["interaction"]["errors"] = self.resource["errors"]

    def _status(self, status: str) -> Event:
        return {
            "event_type": "interaction.status_update",
            "interaction_id": self.resource["id"],
            "status": status,
        }

    def _told(self) -> dict[str, Any]:
        """The interaction without its steps: clients add those up themselves."""
        return {key: value for key, value in self.resource.items() if key != "steps"}

    def _add(self, step: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._steps.append(step)
        self._open = step["type"]
        start = {key: value for key, value in step.items() if key != "content"}
        return [*events, {"event_type": "step.start", "index": len(self._steps) - 1, "step": start}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"event_type": "step.delta", "index": len(self._steps) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"event_type": "step.stop", "index": len(self._steps) - 1}]

    def _think(self, text: str) -> Event:
        parts = self._steps[-1].setdefault("summary", [{"type": "text", "text": ""}])
        parts[0]["text"] += text
        return self._delta({"type": "thought_summary", "content": {"type": "text", "text": text}})

    def _say(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != "model_output":
            events = self._add({"type": "model_output", "content": [{"type": "text", "text": ""}]})
        self._steps[-1]["content"][0]["text"] += text
        return [*events, self._delta({"type": "text", "text": text})]

    def _call(self, call: ToolCall) -> list[Event]:
        step = {"type": "function_call", "id": f"call_{uuid.uuid4().hex}", "name": call.name, "arguments": {}}
        events = self._add({**step})
        self._steps[-1]["arguments"] = call.arguments
        delta = self._delta({"type": "arguments_delta", "arguments": to_json(call.arguments).decode()})
        return [*events, delta, *self._close()]

    # ---- for runs

    def encode(self, event: Event, number: int) -> bytes:
        return named({"event_type": event["event_type"], "event_id": f"e{number + 1}", **event})

    @staticmethod
    def merge(first: bytes, second: bytes) -> bytes | None:
        if not (first.startswith(b"event: step.delta") and second.startswith(b"event: step.delta")):
            return None
        one, two = event_data(first), event_data(second)
        a, b = one["delta"], two["delta"]
        if one["index"] != two["index"] or a["type"] != b["type"] or a["type"] not in ("text", "thought_summary"):
            return None
        if a["type"] == "text":
            delta = {**b, "text": a["text"] + b["text"]}
        else:
            delta = {**b, "content": {**b["content"], "text": a["content"]["text"] + b["content"]["text"]}}
        return named({**two, "delta": delta})

    def told(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        return told(self._steps)


def told(steps: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Steps of an answer as the message with which a conversation goes on, and the functions called, by id."""
    calls = [step for step in steps if step["type"] == "function_call"]
    texts = [part["text"] for step in steps if step["type"] == "model_output" for part in step["content"]]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return [message], {call["id"]: call["name"] for call in calls}


def checkpoint(id: str, token: str, number: int) -> bytes:
    """An event that is in no log: what came before it need not be sent again to who comes back with `token`."""
    event = {
        "event_type": "interaction.status_update",
        "event_id": f"e{number + 1}c",
        "interaction_id": id,
        "status": "in_progress",
        "continuation_token": token,
    }
    return named(event)


def event_number(event_id: str) -> int | None:
    """The number of an event in its log; None if no event can have such an id."""
    match = _ID.fullmatch(event_id)
    return int(match[1]) - 1 if match is not None else None


def named(event: Event) -> bytes:
    return b"event: " + event["event_type"].encode() + b"\n" + data_event(event)


def timestamp(seconds: float) -> str:
    """RFC 3339, UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def usage(used: Usage) -> dict[str, Any]:
    """Thoughts are counted beside the output, and the total is the sum."""
    output = used.completion_tokens - used.thought_tokens
    return {
        "total_input_tokens": used.prompt_tokens,
        "input_tokens_by_modality": [{"modality": "text", "tokens": used.prompt_tokens}],
        "total_cached_tokens": used.cached_tokens,
        "cached_tokens_by_modality": [{"modality": "text", "tokens": used.cached_tokens}] if used.cached_tokens else [],
        "total_output_tokens": output,
        "output_tokens_by_modality": [{"modality": "text", "tokens": output}],
        "total_thought_tokens": used.thought_tokens,
        "total_tool_use_tokens": 0,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
