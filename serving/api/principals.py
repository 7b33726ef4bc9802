"""Who sends a request, and how much they may use: keys, their limits, and what is left of them.

All of it lives on the event loop. Nothing is stored: after a restart everybody starts with full allowances.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import parse_qs

from starlette.types import Scope

from ...configs.keys import PRIORITIES, ApiKey, Limits, digest_of
from ...configs.server import ServerConfig
from .errors import ApiError

Clock = Callable[[], float]


class Allowance:
    """So many units a minute: a bucket that refills evenly and holds a minute's worth. What is used may overdraw it."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def left(self) -> float:
        """Units that may be used now; below zero while overdrawn."""
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def use(self, units: int) -> None:
        self._level = self.left - units

    def wait(self, units: int) -> float:
        """Seconds until `units` may be used; 0: now."""
        return max(0.0, (units - self.left) * 60 / self.per_minute)


class Principal:
    """The owner of a key while the server runs."""

    def __init__(self, tenant: str, key: str, priority: str, limits: Limits, clock: Clock = time.monotonic) -> None:
        self.tenant, self.key, self.priority = tenant, key, PRIORITIES[priority]
        self.limits = limits
        self.running = 0
        self._requests = Allowance(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self._tokens = Allowance(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None

    def admit(self) -> ApiError | None:
        """Count one more request; or why it cannot be had."""
        if self.limits.max_concurrent and self.running >= self.limits.max_concurrent:
            return _limited(f"{self.limits.max_concurrent} requests in progress", 1.0)
        if self._tokens is not None and (wait := self._tokens.wait(1)):
            return _limited(f"{self._tokens.per_minute} tokens per minute", wait)
        if self._requests is not None:
            if wait := self._requests.wait(1):
                return _limited(f"{self._requests.per_minute} requests per minute", wait)
            self._requests.use(1)
        return None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, a request of this principal is in progress."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def used(self, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.use(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, as OpenAI's headers tell it; nothing of what is not limited."""
        out = []
        for name, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None:
                full = allowance.wait(allowance.per_minute)
                for field, value in (
                    ("limit", str(allowance.per_minute)),
                    ("remaining", str(max(0, int(allowance.left)))),
                    ("reset", f"{full:.3g}s"),
                ):
                    out.append((f"x-ratelimit-{field}-{name}".encode(), value.encode()))
        return out


def _limited(limit: str, wait: float) -> ApiError:
    message = f"Rate limit reached: this API key may have {limit}. Please try again in {wait:.3g}s."
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=wait)


class Principals:
    """Everybody who may use the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._by_digest = {key.sha256: _principal(key, config.limits) for key in config.api_keys}
        self._nobody = None if config.api_keys else Principal("", "", "high", config.limits)

    def find(self, scope: Scope) -> Principal | None:
        """Whose key the request carries; without configured keys everybody is the same. Digests are looked up, so the
        time that this takes says nothing about a key."""
        if self._nobody is not None:
            return self._nobody
        for given in keys_of(scope):
            if (found := self._by_digest.get(digest_of(given))) is not None:
                return found
        return None


def _principal(key: ApiKey, limits: Limits) -> Principal:
    return Principal(key.tenant, key.name, key.priority, dataclasses.replace(limits, **key.limits))


def keys_of(scope: Scope) -> Sequence[bytes]:
    """The keys that a request carries, in all the ways that clients send one: `Authorization: Bearer`,
    `x-goog-api-key`, `api-key` or `?key=`."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(token.strip())
        elif name in (b"x-goog-api-key", b"api-key"):
            keys.append(value)
    if b"key=" in scope.get("query_string", b""):
        query = parse_qs(scope["query_string"].decode("latin-1"))
        keys += [value.encode() for value in query.get("key", ())]
    return keys[:8]
