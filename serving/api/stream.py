"""Answers as server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

from fastapi import Request
from pydantic_core import from_json, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, ClientGone, internal
from .middleware import log_failure, request_info

KEEP_ALIVE = b": keep-alive\n\n"
_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(data: Any) -> bytes:
    """One `data:` event. The Unicode line breaks that JSON leaves alone are escaped: some clients split lines there."""
    body = to_json(data)
    for raw, escaped in _BREAKS:
        if raw in body:
            body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


def event_data(encoded: bytes) -> Any:
    """The data of an event that was encoded."""
    return from_json(encoded.partition(b"data: ")[2])


class Closable(Protocol):
    """What somebody reads: a reply, or a reader of a run."""

    def close(self) -> None: ...


class Watch:
    """Waits for the client to close the connection and then closes the reply, whatever its handler is doing.

    Used after the body has been read: from then on it alone receives.
    """

    def __init__(self, request: Request, reply: Closable) -> None:
        self._task = asyncio.create_task(self._wait(request.receive, reply))

    async def _wait(self, receive: Receive, reply: Closable) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        reply.close()

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class EventStream(Response):
    """A 200 whose body is made of `chunks`; owns `reply` and `watch` and closes both, however it ends.

    An `ApiError` out of `chunks` becomes one last event made by `error_event`; so does, as an internal error, anything
    unexpected. A stream never ends as if complete when it is not.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        reply: Closable,
        watch: Watch,
        error_event: Callable[[ApiError], bytes],
        send_timeout: float,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._reply = reply
        self._watch = watch
        self._error_event = error_event
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: bytes, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self._send_timeout):
                    await send({"type": "http.response.body", "body": body, "more_body": more})
            except TimeoutError:
                raise ClientGone from None

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await put(chunk)
            except ApiError as error:
                await put(self._error_event(error))
            except (ClientGone, asyncio.CancelledError):
                raise
            except Exception:
                info = request_info(scope)
                log_failure(info)
                await put(self._error_event(internal(info.id)))
            await put(b"", more=False)
        finally:
            self._reply.close()
            await self._watch.stop()
