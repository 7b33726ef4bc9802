"""A response under construction: its output items, and the events that tell a stream's client of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json, to_json

from ..engine.request import Emission, Usage
from .answer_pieces import Pieces
from .errors import ApiError, stopping
from .eventlog import Event
from .run import Ending
from .stream import event as data_event
from .stream import event_data
from .tool_calls import ToolCall, Tools

Listed = Callable[[Emission], list[dict[str, Any]]]
"""Gives the log-probabilities of the tokens whose text has come with an emission."""

_CUT = ("max_tokens", "context_length")
_PIECES = (b"event: response.output_text.delta", b"event: response.reasoning_summary_text.delta")


class ResponseWriter:
    """Turns emissions into items and events. How tokens are grouped into emissions changes no item.

    `resource` is the object as clients see it; it is complete after `end`. `thinks`: the answer begins with thoughts,
    which become a reasoning item, whose summary they are if `summary`.
    """

    def __init__(
        self, response: dict[str, Any], *, thinks: bool, summary: bool, tools: Tools | None, listed: Listed | None
    ) -> None:
        self.resource = response
        self._output: list[dict[str, Any]] = response["output"]
        self._summary = summary
        self._listed = listed
        self._pieces = Pieces(tools)
        self._thinks = thinks
        self._open: str | None = None  # type of the last item while it may grow
        self._thought = ""
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []  # log-probabilities for the next text

    def begin(self) -> list[Event]:
        events = [self._event("response.created", response=self._snapshot())]
        events.append(self._event("response.in_progress", response=self._snapshot()))
        return events + (self._add(_reasoning()) if self._thinks else [])

    def push(self, emission: Emission) -> list[Event]:
        """The events of an emission; its finish reason is left to `end`."""
        events = self._think(emission.thought) if emission.thought and self._open == "reasoning" else []
        self._waiting += self._listed(emission) if self._listed is not None else []
        for piece in self._pieces.take(emission):
            events += self._piece(piece)
        return events

    def end(self, emission: Emission, ending: Ending) -> list[Event]:
        """The last events, for an answer that has finished or was stopped."""
        cut = ending != "finished" or emission.finish_reason in _CUT
        events = []
        if self._open is None and not self._output or (self._open == "reasoning" and not cut):
            events += self._message()
        events += self._close("incomplete" if cut else "completed")
        self.resource["status"] = "cancelled" if ending == "cancelled" else "incomplete" if cut else "completed"
        if self.resource["status"] == "incomplete":
            reason = "max_output_tokens" if ending == "finished" else "interrupted"
            self.resource["incomplete_details"] = {"reason": reason}
        if ending == "stopped":
            self.resource["error"] = _told_error(stopping())
        self.resource["usage"] = usage(emission.usage or Usage(0, 0))
        kind = "response.incomplete" if cut else "response.completed"
        return [*events, self._event(kind, response=self._snapshot())]

    def fail(self, error: ApiError) -> list[Event]:
        """The last events, for an answer that has failed."""
        self.resource |= {"status": "failed", "error": _told_error(error)}
        return [
            failed(error),
            self._event("response.failed", response=self._snapshot()),
        ]

    def not_stored(self, events: list[Event], error: ApiError) -> None:
        self.resource["store"] = False
        events[-1]["response"]["store"] = False

    def encode(self, event: Event, number: int) -> bytes:
        return encode({"type": event["type"], "sequence_number": number, **event})

    @staticmethod
    def merge(first: bytes, second: bytes) -> bytes | None:
        """Neighbouring pieces of one text."""
        if first.partition(b"\n")[0] not in _PIECES or first.partition(b"\n")[0] != second.partition(b"\n")[0]:
            return None
        one, two = event_data(first), event_data(second)
        if any(one.get(key) != two.get(key) for key in ("item_id", "content_index", "summary_index")):
            return None
        merged = {**two, "delta": one["delta"] + two["delta"]}
        if "logprobs" in two:
            merged["logprobs"] = one["logprobs"] + two["logprobs"]
        return encode(merged)

    def told(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        return answer_messages(self._output)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.resource, "output": [*self._output]}

    def _add(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._output.append(item)
        self._open = item["type"]
        return [*events, self._event("response.output_item.added", output_index=len(self._output) - 1, item={**item})]

    def _place(self, **index: int) -> dict[str, Any]:
        """Where in the response the open item, or its part, is."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **index}

    def _think(self, text: str) -> list[Event]:
        if not self._summary:
            return []
        events = []
        if not self._thought:
            part = {"type": "summary_text", "text": ""}
            place = self._place(summary_index=0)
            events.append(self._event("response.reasoning_summary_part.added", **place, part=part))
        self._thought += text
        place = self._place(summary_index=0)
        return [*events, self._event("response.reasoning_summary_text.delta", **place, delta=text)]

    def _message(self) -> list[Event]:
        events = self._add(_message())
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [*events, self._event("response.content_part.added", **self._place(content_index=0), part=part)]

    def _piece(self, piece: str | ToolCall) -> list[Event]:
        if isinstance(piece, ToolCall):
            self._waiting = []
            return self._call(piece)
        events = [] if self._open == "message" else self._message()
        listed, self._waiting = self._waiting, []
        self._text += piece
        self._logprobs += listed
        place = self._place(content_index=0)
        return [*events, self._event("response.output_text.delta", **place, delta=piece, logprobs=listed)]

    def _call(self, call: ToolCall) -> list[Event]:
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        events = self._add(item)
        arguments = to_json(call.arguments).decode()
        place = self._place()
        events.append(self._event("response.function_call_arguments.delta", **place, delta=arguments))
        events.append(
            self._event("response.function_call_arguments.done", **place, arguments=arguments, name=call.name)
        )
        item["arguments"] = arguments
        return events + self._close("completed")

    def _close(self, status: str) -> list[Event]:
        """Finish the open item."""
        if self._open is None:
            return []
        item, kind, self._open = self._output[-1], self._open, None
        events: list[Event] = []
        part: dict[str, Any]
        if kind == "reasoning" and self._thought:
            part = {"type": "summary_text", "text": self._thought}
            place = self._place(summary_index=0)
            events.append(self._event("response.reasoning_summary_text.done", **place, text=self._thought))
            events.append(self._event("response.reasoning_summary_part.done", **place, part=part))
            item["summary"] = [part]
        elif kind == "message":
            text, logprobs = self._text, self._logprobs + self._waiting
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            place = self._place(content_index=0)
            events.append(self._event("response.output_text.done", **place, text=text, logprobs=logprobs))
            events.append(self._event("response.content_part.done", **place, part=part))
            item |= {"content": [part], "status": status}
            self._text, self._logprobs, self._waiting = "", [], []
        elif kind == "function_call":
            item["status"] = status
        done = self._event("response.output_item.done", output_index=len(self._output) - 1, item={**item})
        return [*events, done]


def _reasoning() -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}


def _message() -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.thought_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }


def _told_error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": error.message}


def failed(error: ApiError) -> Event:
    return {"type": "error", "code": error.code or "server_error", "message": error.message, "param": error.param}


def encode(event: Event) -> bytes:
    """A named server-sent event."""
    return b"event: " + event["type"].encode() + b"\n" + data_event(event)


def answer_messages(output: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Output items as the messages with which a conversation goes on, and the functions that were called by id."""
    texts, calls, names = [], [], {}
    for item in output:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
            calls.append(item)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = [_told(call) for call in calls]
    return [message], names


def _told(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": from_json(item["arguments"])}
    return {"type": "function", "id": item["call_id"], "function": function}
