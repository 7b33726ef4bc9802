"""Streams of the Gemini protocol: server-sent events, or one JSON array that grows."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic_core import to_json

from ..engine.request import Emission
from .bridge import Reply
from .errors import ApiError
from .gemini_answers import Candidate, usage_metadata
from .google_errors import google_body
from .reporting import metadata, outcome
from .service import Loaded, failure
from .stream import event

Batch = list[tuple[int, Emission]]


class Sse:
    """A stream as server-sent events. The clients of this protocol accept nothing but `data:` lines and blank ones."""

    media_type = "text/event-stream; charset=utf-8"
    keep_alive = b"\n"
    end = b""

    def one(self, data: dict[str, Any]) -> bytes:
        return event(data)

    def failed(self, error: ApiError) -> bytes:
        return event(google_body(error))


class JsonArray:
    """A stream as one JSON array that grows."""

    media_type = "application/json"
    keep_alive = b"\n"
    end = b"]\n"

    def __init__(self) -> None:
        self._before = b"["

    def one(self, data: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\r\n"
        return before + to_json(data)

    def failed(self, error: ApiError) -> bytes:
        return self.one(google_body(error)) + self.end


Form = Sse | JsonArray


@dataclasses.dataclass(frozen=True)
class Stream:
    """An answer that is told while it is made. `told` is what its last event says of the effort, `notes` what the log
    will."""

    loaded: Loaded
    candidates: Sequence[Candidate]
    form: Form
    heartbeat: float
    told: dict[str, str]
    notes: dict[str, Any]
    cached: int = 0

    async def events(self, reply: Reply, batch: Batch) -> AsyncIterator[bytes]:
        """The events, one for each step that has something to tell. `batch` is what has come already."""
        form, same = self.form, identity(self.loaded)
        ended: dict[int, Emission] = {}
        while True:
            pieces, error = self._pieces(batch, ended)
            if len(ended) == len(self.candidates):
                yield form.one(self._last(pieces, same, ended)) + form.end
                return
            if pieces:
                yield form.one({"candidates": pieces, **same})
            elif not batch:
                yield form.keep_alive
            if error is not None:
                raise error
            batch = await reply.take(self.heartbeat)

    def _last(self, pieces: list[dict[str, Any]], same: dict[str, str], ended: dict[int, Emission]) -> dict[str, Any]:
        emissions = [ended[index] for index in range(len(self.candidates))]
        self.notes.update(outcome(emissions))
        told = {**self.told, **metadata(emissions, self.loaded.engine.system_fingerprint)}
        return {
            "candidates": pieces,
            "usageMetadata": usage_metadata(emissions, self.cached),
            **same,
            "umbraMetadata": told,
        }

    def _pieces(self, batch: Batch, ended: dict[int, Emission]) -> tuple[list[dict[str, Any]], ApiError | None]:
        """The candidates of the next event, and the error that follows it. Those that finish go into `ended`."""
        pieces: dict[int, dict[str, Any]] = {}
        error = None
        for index, emission in batch:
            if (error := failure(emission)) is not None:
                emission = dataclasses.replace(emission, finish_reason=None)  # its text is still sent
            elif emission.finish_reason is not None:
                ended[index] = emission
            if (piece := self.candidates[index].piece(emission)) is not None:
                pieces[index] = piece
            if error is not None:
                break
        if pieces and 0 not in pieces:  # clients look at nothing else to see whether a piece is valid
            pieces[0] = self.candidates[0].empty()
        return [pieces[index] for index in sorted(pieces)], error


def identity(loaded: Loaded) -> dict[str, str]:
    """What is the same in all pieces of an answer, and in no other answer."""
    return {"modelVersion": loaded.name, "responseId": uuid.uuid4().hex[:22]}
