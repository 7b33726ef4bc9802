"""The time that a client waits for a whole answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from ..engine.request import Emission
from .bridge import Reply
from .errors import ApiError

T = TypeVar("T")

_LONGEST = 86_400.0


class Deadline:
    """`X-Server-Timeout`, in seconds from now on; without it there is no deadline."""

    def __init__(self, request: Request) -> None:
        value = request.headers.get("x-server-timeout", "")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        self._seconds = min(seconds, _LONGEST) if seconds > 0 else None
        self._end = None if self._seconds is None else time.monotonic() + self._seconds

    async def limit(self, work: Awaitable[T]) -> T:
        """What `work` gives, or an `ApiError` (504)."""
        left = None if self._end is None else self._end - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await work
        except TimeoutError:
            raise self._passed() from None

    async def take(self, reply: Reply, most: float) -> list[tuple[int, Emission]]:
        """`Reply.take` within `most` seconds and the deadline."""
        if self._end is None:
            return await reply.take(most)
        left = self._end - time.monotonic()
        batch = await reply.take(max(0.0, min(most, left)))
        if not batch and left <= most:
            raise self._passed()
        return batch

    def _passed(self) -> ApiError:
        message = f"The answer was not complete within the {self._seconds:g} s of X-Server-Timeout"
        return ApiError(504, message, kind="server_error", code="deadline_exceeded")
