"""Reading a request's JSON body: limited while it arrives, parsed in a worker when it is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import from_json
from starlette.types import Message, Receive

from .errors import ApiError, ClientGone, bad_request
from .service import Service

T = TypeVar("T")

INLINE = 16_384
"""A body up to this size is parsed on the event loop: that takes less time than the way to a worker and back."""

_DRAIN_FACTOR = 8
_DRAIN_SECONDS = 30.0


async def read_json(request: Request, service: Service, parse: Callable[[dict[str, Any]], T]) -> T:
    """The body as `parse` understands it. `parse` gets a JSON object and raises `ApiError`."""
    data = await _read(request, service.config.max_body, service.config.body_timeout)
    if len(data) <= INLINE:
        return parse(_json_object(data))
    return await service.offload(lambda: parse(_json_object(data)))


async def _read(request: Request, limit: int, timeout: float) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"content-encoding '{encoding[:40]}' is not supported; send the body as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await _next(request.receive)
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"The request body did not arrive within {timeout:g} s", code="request_timeout") from None


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def _too_large(limit: int) -> ApiError:
    message = f"The request body is larger than the {limit} bytes that this server accepts"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


async def drain(receive: Receive, limit: int) -> None:
    """Read on after a refusal, for a while, and keep nothing: a client that is still sending when the connection is
    closed would see a reset instead of the reply."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while size < _DRAIN_FACTOR * limit:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = from_json(data)
    except ValueError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"The JSON body must be an object, got {json_type(value)}", code="invalid_json")
    return value


def json_type(value: Any) -> str:
    """The JSON name of a Python value's type, with its article."""
    for types, name in (
        (type(None), "null"),
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a decimal"),
        (str, "a string"),
        (list, "an array"),
    ):
        if isinstance(value, types):
            return name
    return "an object"
