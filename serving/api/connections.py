"""Connections: HTTP/1.1 by h11 as uvicorn does it, with what it has no limits for. A request's head must arrive in
time, there may be so many connections, and what is not HTTP is told so in JSON."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...configs.server import ServerConfig
from .errors import ApiError, openai_body, unavailable

log = logging.getLogger(__name__)

MAX_HEAD = 64 * 1024
"""Bytes of a request line and headers; more is refused with 400."""


def connections(config: ServerConfig) -> type[H11Protocol]:
    """The protocol class for uvicorn, with the limits of `config`."""
    return type("Connection", (_Connection,), {"limits": config})


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Connection(H11Protocol):
    limits: ServerConfig
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(unavailable("The server has too many connections", "too_many_connections", 5.0))
            return
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        waits_for_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not waits_for_head:
            self._stop_timers()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout, self._too_slow)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_timers()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "The request is not valid HTTP/1.1, or its head is too long", code="invalid_http"))

    def _too_slow(self) -> None:
        seconds = self.limits.header_timeout
        message = f"The head of the request did not arrive within {seconds:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close."""
        self._stop_timers()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: nothing can be said
            return
        body = to_json(openai_body(error))
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {_REASONS[error.status]}"]
        lines += [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
        self.transport.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = None


_REASONS = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}
