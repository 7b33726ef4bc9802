"""From the engine's thread to the event loop: one hand-over per step, however many requests emitted.

Every request of the server is submitted with the same sink. The engine calls it once per step with everything that the
step emitted; it schedules one callback, which shares the emissions out to the waiting replies. A reply keeps what its
client has not taken yet as one merged emission per choice, so a slow reader costs the text of its answer and no queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from ..engine.request import Emission, Sink
from .context import Answered, RequestInfo
from .errors import ApiError, ClientGone, stopping
from .record import log_late
from .wishes import too_late

log = logging.getLogger(__name__)


class _Pending:
    """Emissions of one choice that wait for their reader."""

    def __init__(self) -> None:
        self._parts: list[Emission] = []

    def add(self, emission: Emission) -> None:
        self._parts.append(emission)
        if len(self._parts) >= 64:
            self._parts = [merge(self._parts)]

    def take(self) -> Emission:
        return merge(self._parts)


def merge(parts: Sequence[Emission]) -> Emission:
    """Several emissions of one request, in order, as the one that a single longer step would have made."""
    if len(parts) == 1:
        return parts[0]
    return dataclasses.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        thought="".join(part.thought for part in parts),
        token_ids=tuple(i for part in parts for i in part.token_ids),
        logprobs=tuple(i for part in parts for i in part.logprobs),
        digests=tuple(i for part in parts for i in part.digests),
    )


def failure(emission: Emission) -> ApiError | None:
    """The error that an emission ends its request with, if it does: an engine failure or the server's shutdown."""
    if emission.finish_reason == "error":
        log.error("an answer failed: %s", emission.error or "no reason given")  # may tell what clients must not know
        return ApiError(500, "The engine failed while answering", kind="server_error", code="engine_error")
    if emission.finish_reason == "cancelled":
        return stopping()
    return None


class Reply:
    """All choices of one HTTP request, read by one task of the event loop.

    `close` may be called at any moment, also while the request is still being tokenized in a worker: whatever has been
    submitted, and whatever will be, is cancelled. `info` is told how every choice ends; `timed`: its time limit holds.
    """

    def __init__(self, cancel: Callable[[str], None], info: RequestInfo | None = None, *, timed: bool = True) -> None:
        self.closed = False
        self._cancel = cancel
        self._info = info
        self._timed = timed
        self._ids: list[str] = []
        self._unfinished: set[int] = set()
        self._pending: dict[int, _Pending] = {}
        self._wake = asyncio.Event()

    def submitted(self, request_id: str) -> int:
        """Called in a worker just before the engine gets the request; the index of the new choice."""
        self._ids.append(request_id)
        index = len(self._ids) - 1
        self._unfinished.add(index)
        return index

    def refused(self, index: int) -> None:
        """The engine did not take the choice; those before it are cancelled by `close`."""
        self._unfinished.discard(index)

    def put(self, index: int, emission: Emission) -> None:
        """Called on the event loop."""
        if emission.finish_reason is not None:
            self._unfinished.discard(index)
            self._account(emission)
        if not self.closed:
            self._pending.setdefault(index, _Pending()).add(emission)
            self._wake.set()

    async def take(self, timeout: float | None = None) -> list[tuple[int, Emission]]:
        """What has been emitted since the last call, one merged emission per choice; waits if there is nothing.

        An empty list after `timeout` seconds. Raises `ClientGone` once the reply is closed, and an `ApiError` (504)
        once the request has taken the time that it may take.
        """
        if not self._pending and not self.closed:
            left = self.time_left
            self._wake.clear()
            try:
                async with asyncio.timeout(left if timeout is None or left is not None and left < timeout else timeout):
                    await self._wake.wait()
            except TimeoutError:
                self._check_time()
                return []
        if self.closed:
            raise ClientGone
        self._check_time()
        pending, self._pending = self._pending, {}
        return [(index, pending[index].take()) for index in sorted(pending)]

    @property
    def time_left(self) -> float | None:
        """Seconds until the answer is too late; None: as many as it takes."""
        return self._info.time_left if self._info is not None and self._timed else None

    def _check_time(self) -> None:
        left = self.time_left
        if left is not None and left <= 0:
            assert self._info is not None
            raise too_late(self._info)

    def _account(self, last: Emission) -> None:
        """Note how a choice ended, and whose tokens it took."""
        info = self._info
        if info is None or last.finish_reason is None:
            return
        answered = Answered(last.finish_reason, last.usage, last.timings)
        if info.principal is not None and last.usage is not None:
            info.principal.used(last.usage.completion_tokens)
        if info.logged:
            log_late(info, answered)
        else:
            info.answered.append(answered)

    def cancel(self) -> None:
        """Cancel what is not finished; its last emissions still come. Called on the event loop."""
        for index in list(self._unfinished):
            self._cancel(self._ids[index])

    def close(self) -> None:
        """Cancel what is not finished and take no more. Idempotent; called on the event loop."""
        self.closed = True
        self._pending.clear()
        self._wake.set()
        self.cancel()


class Bridge:
    """The one sink of the server, and the table of who waits for which request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._routes: dict[str, tuple[Reply, int]] = {}
        self.sink: Sink = self._from_engine  # one object: the engine groups the emissions of a step by sink

    def expect(self, request_id: str, reply: Reply) -> int:
        """Route emissions of `request_id` to `reply`; its index there. Called before the engine gets the request."""
        index = reply.submitted(request_id)
        self._routes[request_id] = (reply, index)
        return index

    def forget(self, request_id: str) -> None:
        """The engine refused the request: nothing will come."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            route[0].refused(route[1])

    def running(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._routes)

    def _from_engine(self, batch: Sequence[tuple[str, Emission]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._share_out, batch)
        except RuntimeError:
            return  # the loop is closed: the server has stopped and so have its clients

    def _share_out(self, batch: Sequence[tuple[str, Emission]]) -> None:
        for request_id, emission in batch:
            route = self._routes.get(request_id)
            if route is None:
                continue
            if emission.finish_reason is not None:
                del self._routes[request_id]
            route[0].put(route[1], emission)
