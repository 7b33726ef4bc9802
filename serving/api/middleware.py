"""What every request passes through: an id, the key check, limits, what it wishes, counting, one line in the log, and
a reply in JSON for whatever nobody caught."""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .context import RequestInfo, handling, log_failure, request_info
from .errors import CLIENT_CLOSED, ApiError, ClientGone, internal, stopping
from .principals import Principal, Principals
from .protocols import error_body
from .record import log_request
from .service import Service
from .wishes import from_headers

__all__ = ["Gate", "RequestInfo", "log_failure", "request_info", "send_error"]

_OPEN_PATHS = {"/healthz", "/readyz"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_QUIET_ROUTES = {"/healthz", "/readyz", "/metrics"}
_SLASHES = re.compile("//+")
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

_SHARE = {-1: 0.5, 0: 0.9, 1: 1.0}
"""Of `max_inflight`, by priority: when the server fills up, what matters least is refused first."""


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Send `error` as a complete reply, to a WebSocket client instead of accepting it."""
    body = to_json(error_body(scope, error))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": error.status, "headers": raw})
    await send({"type": f"{kind}.body", "body": body})


class Gate:
    """The outermost ASGI layer, for HTTP requests and WebSocket sessions."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._principals = Principals(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        info = RequestInfo(_request_id(scope["headers"]), time.perf_counter())
        scope["path"] = _SLASHES.sub("/", scope["path"])  # some clients put one too many after the host
        service = self._service
        http = scope["type"] == "http"
        if http:
            service.inflight += 1
        service.http_metrics.started()
        with handling(scope, info):
            try:
                await self._answer(scope, receive, _Sending(send, info), info)
            finally:
                if http:
                    service.inflight -= 1
                self._record(scope, info)

    async def _answer(self, scope: Scope, receive: Receive, send: _Sending, info: RequestInfo) -> None:
        try:
            if scope["path"] in _OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            principal = info.principal = self._admit(scope, info)
            send.headers = principal.headers
            with principal.busy():
                await self._app(scope, receive, send)
        except ApiError as error:
            await send_error(scope, send, error)
        except ClientGone:
            info.status = CLIENT_CLOSED
        except asyncio.CancelledError:  # the server stops and its time for running answers is over
            info.status = CLIENT_CLOSED
        except Exception:
            log_failure(info)
            if not info.status:
                await send_error(scope, send, internal(info.id))

    def _admit(self, scope: Scope, info: RequestInfo) -> Principal:
        """Whose request it is, if it may be handled; raises `ApiError`."""
        service = self._service
        principal = self._principals.find(scope)
        if principal is None:
            message = "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'x-goog-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        info.tenant, info.key = principal.tenant, principal.key
        from_headers(Headers(raw=scope["headers"]), info, service.config.request_timeout, principal.priority)
        if scope["type"] == "websocket":
            info.timeout = None  # a session lasts as long as it lasts
        elif scope["method"] != "POST":
            return principal
        if service.stopping:
            raise stopping()
        if service.inflight > math.ceil(service.config.max_inflight * _SHARE[info.priority]):
            service.engine_metrics.refused("inflight")
            message = f"The server is busy: {service.inflight - 1} requests are in progress"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=1.0)
        if (refusal := principal.admit()) is not None:
            service.engine_metrics.refused("rate_limit")
            raise refusal
        return principal

    def _record(self, scope: Scope, info: RequestInfo) -> None:
        seconds = time.perf_counter() - info.started
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope.get("method", "WEBSOCKET")
        if method not in _METHODS and method != "WEBSOCKET":
            method = "other"
        info.status = info.status or CLIENT_CLOSED
        self._service.http_metrics.ended(route, method, info.status, seconds)
        path = scope["path"].encode("unicode_escape").decode()
        log_request(info, method, route, path, quiet=route in _QUIET_ROUTES)


class _Sending:
    """The way to the client: adds the headers that every answer has, and notes how long the client made us wait."""

    def __init__(self, send: Send, info: RequestInfo) -> None:
        self._send = send
        self._info = info
        self.headers: Callable[[], list[tuple[bytes, bytes]]] = list
        """Of the principal, once it is known."""

    async def __call__(self, message: Message) -> None:
        info, kind = self._info, message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            info.status = message["status"]
            elapsed = round((time.perf_counter() - info.started) * 1000)
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", info.id.encode()),
                (b"openai-processing-ms", str(elapsed).encode()),
                *self.headers(),
            ]
        elif kind == "websocket.accept":
            info.status = 101
        elif kind == "websocket.close":
            info.status = info.status or 403
        began = time.perf_counter()
        await self._send(message)
        info.stages["stream"] = info.stages.get("stream", 0.0) + time.perf_counter() - began


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own `x-request-id` if it is a plain word, else a new one."""
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _ACCEPTED_ID.fullmatch(text):
                return text
    return f"req_{uuid.uuid4().hex}"
