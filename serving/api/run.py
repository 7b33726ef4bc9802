"""One answer on its own account: what it is made of, what has happened, and who reads it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol, TypeAlias

from ..effort import Prepared
from ..engine.request import Emission
from .bridge import Reply
from .errors import ApiError, ClientGone
from .eventlog import Event, EventLog

REPLAY_BYTES = 4 << 20
"""Events of one run that are kept one by one; beyond that, neighbouring pieces of text become one."""

CHECKPOINT_EVERY = 1.0
"""Seconds. Each is an event more, and only a connection that breaks right behind one is gone on with by itself."""

Ending: TypeAlias = Literal["finished", "cancelled", "incomplete", "stopped"]
"""How an answer ended that did not fail: by itself, by its client, because nobody read it, or because the server
stopped."""


class Writer(Protocol):
    """What a protocol makes of an answer."""

    resource: dict[str, Any]
    """The answer as the protocol shows it; at any moment as far as it is."""

    def begin(self) -> list[Event]: ...
    def push(self, emission: Emission) -> list[Event]:
        """The events of an emission; its finish reason is left to `end`."""
        ...

    def end(self, emission: Emission, ending: Ending) -> list[Event]: ...
    def fail(self, error: ApiError) -> list[Event]: ...
    def not_stored(self, events: list[Event], error: ApiError) -> None:
        """Say in the resource, and in the last of `events`, that it could not be stored."""
        ...

    def encode(self, event: Event, number: int) -> bytes: ...
    def merge(self, first: bytes, second: bytes) -> bytes | None: ...
    def told(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The answer as messages of the conversation, and the functions that were called, by the ids of the calls."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request that has been checked. `prepare` runs in a worker and gives what the engine gets, `writer` what makes
    the protocol's answer of it; `request` is stored beside the prompt, for `ttl` seconds
    or for good."""

    api: str
    id: str
    model: str
    prepare: Callable[[], Prepared]
    writer: Callable[[Prepared], Writer]
    request: Callable[[Prepared], dict[str, Any]]
    parent: str | None = None
    stored: bool = True
    background: bool = False
    linger: float = 0.0
    ttl: float | None = None
    param: str = "input"


class Run:
    """An answer that is being made, or has just been."""

    def __init__(self, plan: Plan, tenant: str, prepared: Prepared, writer: Writer, reply: Reply) -> None:
        self.plan, self.tenant, self.prepared, self.writer = plan, tenant, prepared, writer
        self.log = EventLog(writer.encode, writer.merge, REPLAY_BYTES)
        self.tokens: list[int] = []
        """Ids of the answer so far."""
        self.last: Emission | None = None
        """The last emission, once the answer has ended without an error."""
        self.error: ApiError | None = None
        self.finishing = False
        self.ended = False
        self.ending: Ending = "finished"
        self.reply = reply
        self._readers: set[Reader] = set()
        self.unsaved: list[int] = []
        self.saving: asyncio.Future[None] | None = None
        self._abandoned: asyncio.TimerHandle | None = None
        self._done = asyncio.Event()

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def resource(self) -> dict[str, Any]:
        return self.writer.resource

    # ---- readers

    def reader(self, after: int = -1) -> Reader:
        """Somebody who reads the events behind `after`."""
        reader = Reader(self, after)
        self._readers.add(reader)
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None
        return reader

    def left(self, reader: Reader) -> None:
        """A reader has gone."""
        self._readers.discard(reader)
        if self._readers or self.ended or self.plan.background:
            return
        if self.plan.linger and self._abandoned is None:
            loop = asyncio.get_running_loop()
            self._abandoned = loop.call_later(self.plan.linger, self.stop, "incomplete")
        elif not self.plan.linger:
            self.stop("incomplete")

    # ---- life

    def stop(self, ending: Ending) -> None:
        """End the engine's work; the run ends soon after."""
        if not self.finishing:
            self.ending = ending
            self.reply.cancel()

    async def done(self) -> None:
        """Wait until it has ended, and is stored if it is to be."""
        await self._done.wait()

    async def snapshot(self) -> dict[str, Any]:
        """The answer as far as it is. An end that is being stored is waited for."""
        if self.finishing:
            await self.done()
        return self.resource

    def publish(self, events: list[Event]) -> None:
        self.log.add(events)
        for reader in self._readers:
            reader.wake()
        self.log.shrink({reader.number for reader in self._readers})

    def end(self) -> None:
        """Nothing more happens in it."""
        self.ended = True
        if self._abandoned is not None:
            self._abandoned.cancel()
        self._done.set()
        for reader in self._readers:
            reader.wake()


class Reader:
    """One reader of a run. To be closed; a run may end when it has no reader left."""

    def __init__(self, run: Run, after: int) -> None:
        self.run, self.number = run, after
        self._closed = False
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """The client is gone, or has what it wanted. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self.run.left(self)

    async def take(self, timeout: float | None) -> list[bytes] | None:
        """The events since the last call; waits for some. Empty after `timeout` seconds, None at the end. Raises
        `ClientGone` once it is closed."""
        while True:
            if self._closed:
                raise ClientGone
            if events := self.run.log.after(self.number):
                self.number = self.run.log.next - 1
                return events
            if self.run.ended:
                return None
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return []

    async def pieces(
        self, heartbeat: float, keep_alive: bytes, *, checkpoint: Callable[[int], bytes] | None = None, end: bytes = b""
    ) -> AsyncIterator[bytes]:
        """The body of a stream: what one moment brought goes out as one piece; `end` after the last. A second after
        something new, and not more often, a `checkpoint` says from where the stream can be gone on with."""
        due = math.inf
        while (events := await self.take(min(heartbeat, max(0.0, due - time.monotonic())))) is not None:
            piece = b"".join(events)
            if checkpoint is not None and not self.run.ended:
                now = time.monotonic()
                if events:
                    due = min(due, now + CHECKPOINT_EVERY)
                if now >= due:
                    piece, due = piece + checkpoint(self.number), math.inf
            yield piece or keep_alive
        if end:
            yield end

    async def end(self) -> None:
        """Wait for the end of the run. Raises `ClientGone` once the reader is closed, and the run's error."""
        while not self.run.ended:
            if self._closed:
                raise ClientGone
            self._wake.clear()
            await self._wake.wait()
        if self.run.error is not None:
            raise self.run.error
