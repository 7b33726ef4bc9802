"""WebSocket sessions: JSON frames both ways, how refusals end a session, and what a stop of the server does to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic_core import from_json, to_json
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from .body import INLINE
from .errors import ApiError, ClientGone, internal
from .middleware import log_failure, request_info
from .service import Service

log = logging.getLogger(__name__)

NORMAL, GOING_AWAY, BAD, REFUSED, BROKEN, BUSY = 1000, 1001, 1007, 1008, 1011, 1013
"""Codes with which sessions are closed."""

_LAST_WORDS = 0.5
"""Seconds before the end of the grace at which sessions are closed that are still open."""


class Socket:
    """One session's connection. Frames may be sent from several tasks."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self.service = service
        self._websocket = websocket
        self._sending = asyncio.Lock()

    @property
    def tenant(self) -> str:
        return request_info(self._websocket.scope).tenant

    async def send(self, frame: bytes) -> None:
        """Send JSON. Raises `ClientGone` if the client has gone or takes nothing."""
        try:
            async with self._sending, asyncio.timeout(self.service.config.send_timeout):
                await self._websocket.send_text(frame.decode())
        except (WebSocketDisconnect, RuntimeError, TimeoutError, OSError):
            raise ClientGone from None

    async def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next frame. Raises `ClientGone`, and an `ApiError` for what is no JSON object."""
        try:
            async with asyncio.timeout(timeout):
                message = await self._websocket.receive()
        except TimeoutError:
            raise ApiError(408, f"no frame came within {timeout:g} s", code="request_timeout") from None
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        data = message.get("text") or message.get("bytes") or b""
        if len(data) <= INLINE:
            return _object(data)
        return await self.service.offload(lambda: _object(data))

    async def close(self, code: int, reason: str = "") -> None:
        """End the session, unless it has ended."""
        if self._websocket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(RuntimeError, OSError, WebSocketDisconnect):
                async with self._sending:
                    await self._websocket.close(code, _short(reason))


Leave = Callable[[str], bytes | None]


class Sessions:
    """The open sessions of a server. When it stops, each is told, and closed before the time is over."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[Socket, Leave] = {}
        service.on_stop.append(self._stop)

    @contextlib.asynccontextmanager
    async def session(self, websocket: WebSocket, leave: Leave) -> AsyncIterator[Socket]:
        """A session for as long as the block takes. An error in it closes it with the error's code. `leave` gives the
        frame that says how long there is until the server stops."""
        await websocket.accept()
        socket = Socket(websocket, self._service)
        self._open[socket] = leave
        try:
            yield socket
            await socket.close(NORMAL)
        except ClientGone:
            pass
        except ApiError as error:
            await socket.close(close_code(error), error.message)
        except asyncio.CancelledError:
            raise
        except Exception:
            info = request_info(websocket.scope)
            log_failure(info)
            await socket.close(BROKEN, internal(info.id).message)
        finally:
            del self._open[socket]

    async def _stop(self) -> None:
        left = max(0.0, self._service.config.shutdown_grace - _LAST_WORDS)
        for socket, leave in list(self._open.items()):
            frame = leave(f"{left:g}s")
            if frame is not None:
                with contextlib.suppress(ClientGone):
                    await socket.send(frame)
        end = asyncio.get_running_loop().time() + left
        while self._open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        for socket in list(self._open):
            await socket.close(GOING_AWAY, "the server stops")


def close_code(error: ApiError) -> int:
    if error.status in (429, 503):
        return BUSY
    if error.status >= 500:
        return BROKEN
    return BAD if error.status in (400, 408, 413) else REFUSED


def _object(data: str | bytes) -> dict[str, Any]:
    try:
        value = from_json(data)
    except ValueError as error:
        raise ApiError(400, f"a frame is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "a frame must hold a JSON object", code="invalid_json")
    return value


def _short(reason: str) -> str:
    """A close frame has room for 123 bytes of reason."""
    return reason.encode()[:120].decode(errors="ignore")


def frame(data: Any) -> bytes:
    return to_json(data)
