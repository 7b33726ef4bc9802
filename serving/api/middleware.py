"""What every request passes through: an id, the key check, the limit on requests in progress, counting, and a reply
in JSON for whatever nobody caught."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import CLIENT_CLOSED, ApiError, ClientGone, internal
from .protocols import error_body
from .service import Service

log = logging.getLogger(__name__)

_OPEN_PATHS = {"/healthz", "/readyz"}
_SLASHES = re.compile("//+")
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclasses.dataclass
class RequestInfo:
    """One HTTP request, for its log line. `notes` are added by handlers: token counts and times. `tenant` is who owns
    what the request stores: a digest of its key, the same for all where no keys are asked for."""

    id: str
    started: float
    tenant: str = ""
    status: int = 0
    failure_logged: bool = False
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def request_info(scope: Scope) -> RequestInfo:
    """The request's record; it exists for every request that came through `Gate`."""
    return scope["umbra.request"]


def log_failure(info: RequestInfo) -> None:
    """Log the exception being handled, once per request."""
    if not info.failure_logged:
        info.failure_logged = True
        log.exception("%s failed", info.id)


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Send `error` as a complete reply."""
    body = to_json(error_body(scope, error))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Gate:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [_digest(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        info = RequestInfo(_request_id(scope["headers"]), time.perf_counter())
        scope["path"] = _SLASHES.sub("/", scope["path"])  # some clients put one too many after the host
        scope["umbra.request"] = info
        service = self._service
        service.inflight += 1
        service.http_metrics.started()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                elapsed = round((time.perf_counter() - info.started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", info.id.encode()),
                    (b"openai-processing-ms", str(elapsed).encode()),
                ]
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id, info)
        finally:
            service.inflight -= 1
            self._record(scope, info)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, info: RequestInfo) -> None:
        try:
            if self._keys:
                info.tenant = _digest(_key_of(scope)).hex()
            if (refusal := self._refusal(scope)) is not None:
                await send_error(scope, send, refusal)
            else:
                await self._app(scope, receive, send)
        except ClientGone:
            info.status = CLIENT_CLOSED
        except asyncio.CancelledError:  # the server stops and its time for running answers is over
            info.status = CLIENT_CLOSED
        except Exception:
            log_failure(info)
            if not info.status:
                await send_error(scope, send, internal(info.id))

    def _refusal(self, scope: Scope) -> ApiError | None:
        service = self._service
        if scope["path"] in _OPEN_PATHS:
            return None
        if self._keys and not self._known_key(scope):
            message = "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'x-goog-api-key: KEY'"
            return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if scope["method"] == "POST" and service.inflight > service.config.max_inflight:
            service.engine_metrics.refused("inflight")
            message = f"The server is busy: {service.config.max_inflight} requests are in progress"
            return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=1.0)
        return None

    def _known_key(self, scope: Scope) -> bool:
        """Whether the request carries a key. Digests are compared, all of them, in constant time."""
        given = _digest(_key_of(scope))
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)

    def _record(self, scope: Scope, info: RequestInfo) -> None:
        seconds = time.perf_counter() - info.started
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._service.http_metrics.ended(route, method, info.status or CLIENT_CLOSED, seconds)
        level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
        if log.isEnabledFor(level):
            notes = "".join(f" {name}={value}" for name, value in info.notes.items())
            path = scope["path"].encode("unicode_escape").decode()[:200]
            log.log(level, "%s %s %s %d %.0f ms%s", info.id, method, path, info.status, seconds * 1000, notes)


_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_QUIET_ROUTES = {"/healthz", "/readyz", "/metrics"}


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own `x-request-id` if it is a plain word, else a new one."""
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _ACCEPTED_ID.fullmatch(text):
                return text
    return f"req_{uuid.uuid4().hex}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_of(scope: Scope) -> bytes:
    """The key of a request: `Authorization: Bearer`, `x-goog-api-key` or `?key=`; empty if there is none."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    if b"x-goog-api-key" in headers:
        return headers[b"x-goog-api-key"]
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return query.get("key", [""])[0].encode("latin-1", "replace")
