"""Bringing a chain's blocks up: several reads in flight, the most recent tokens first, handed over as they arrive.

The blocks of a request's hot window, the end of what was found, are read before the others; both are read and handed
over in chain order. Nothing counts as loaded before all that it continues is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .buffers import Buffers
from .index import Entry
from .keys import BlockInfo
from .layout import BlockLayout
from .lease import Lease
from .record import Damaged
from .tier import Tier


@dataclass(frozen=True)
class Found:
    """A block that a tier has: `tokens` of it, from its first, are what was asked for."""

    info: BlockInfo
    tier: Tier[Any]
    entry: Entry[Any]
    tokens: int

    @property
    def whole(self) -> bool:
        """Whether it is the block asked for, or only begins like it."""
        return self.tokens == self.info.n_tokens


@dataclass(frozen=True)
class Loaded:
    """A verified block in host memory of its own."""

    info: BlockInfo
    tier: str
    tokens: int
    """Of its first tokens; behind them lies what was not asked for, or zeros."""
    arrays: tuple[np.ndarray, ...]
    payload: memoryview
    crc: int
    buffer: np.ndarray
    """Where the payload lies."""


class _Span:
    """Blocks `start` to `end` of a chain: how far they were asked for, and handed over."""

    def __init__(self, start: int, end: int) -> None:
        self.submitted = self.delivered = start
        self.end = end


class Load:
    """The reads of one request. The engine polls it once a step; reading happens on other threads.

    Ends by itself when everything was handed over, when a block could not be read (what was handed over before stays
    good, the rest is to be recomputed), or when it is closed.
    """

    def __init__(
        self,
        found: list[Found],
        lease: Lease,
        layout: BlockLayout,
        readers: Executor,
        buffers: Buffers,
        *,
        ahead_bytes: int,
        hot_tokens: int = 0,
        expect: Callable[[list[Found]], None],
        current: Callable[[], bool],
        on_ready: Callable[[], None] | None,
        on_end: Callable[[Load], None],
    ) -> None:
        """`expect`: called with what will be read, in the order of reading. `current`: whether what is read may still
        be used (the cache was not invalidated). `on_ready`: called on a reading thread when `poll` has something new.
        """
        self.found, self.failure = found, ""
        self.started = time.monotonic()
        self.seconds: float | None = None  # until the last block was there
        self.read_bytes: Counter[str] = Counter()  # by tier
        self._spans: dict[str, tuple[float, float]] = {}  # by tier: when its first read began, its last one ended
        self.lease, self._layout, self._readers, self._buffers = lease, layout, readers, buffers
        self._ahead_bytes, self._current = ahead_bytes, current
        self._on_ready, self._on_end = on_ready, on_end
        self._lock = threading.Lock()
        self._results: dict[int, Loaded] = {}
        window = self._window(hot_tokens)
        self._parts = (_Span(window, len(found)), _Span(0, window))  # in the order of reading
        self.hot_bytes = sum(each.entry.payload_bytes for each in found[window:])
        self.hot_seconds: float | None = None  # until the hot window was handed over
        self._limit = len(found)  # blocks before the first that could not be read
        self._in_flight_bytes = self._reading = 0
        self._ended = False
        expect(found[window:] + found[:window])
        with self._lock:
            self._submit()

    def _window(self, tokens: int) -> int:
        """Where the hot window begins: it takes at most half of what may be read ahead, so that the rest gets on."""
        first, nbytes = len(self.found), 0
        while first and tokens > 0:
            nbytes += self.found[first - 1].entry.payload_bytes
            if 2 * nbytes > self._ahead_bytes:
                break
            first -= 1
            tokens -= self.found[first].tokens
        return first

    @property
    def done(self) -> bool:
        """Nothing more will come from `poll`."""
        return self._ended

    @property
    def delivered(self) -> list[Found]:
        """What was handed over without a gap from the first block on."""
        window, rest = self._parts
        return self.found[: window.delivered if rest.delivered == rest.end else rest.delivered]

    @property
    def tokens(self) -> int:
        """Tokens of `delivered`."""
        return sum(found.tokens for found in self.delivered)

    @property
    def by_tier(self) -> dict[str, int]:
        """The same, by the tier that they came from."""
        tokens: Counter[str] = Counter()
        for found in self.delivered:
            tokens[found.tier.name] += found.tokens
        return dict(tokens)

    def read_seconds(self, tier: str) -> float:
        """From the beginning of a tier's first read to the end of its last."""
        first, last = self._spans[tier]
        return last - first

    def poll(self, most: int | None = None, least: int = 1) -> list[Loaded]:
        """The blocks that have arrived since, at most `most`; none while there are fewer than `least` and more are
        being read. Takes microseconds."""
        ready: list[Loaded] = []
        with self._lock:
            if self._ended:
                return ready
            if not self._current():
                self._fail("stale_epoch", len(self.delivered))
            if self._reading and not self.failure and self._arrived() < least:
                return ready
            for span in self._parts:
                while span.delivered < min(self._limit, span.end) and span.delivered in self._results:
                    if most is not None and len(ready) >= most:
                        break
                    loaded = self._results.pop(span.delivered)
                    span.delivered += 1
                    self._in_flight_bytes -= len(loaded.payload)
                    ready.append(loaded)
            window, _ = self._parts
            if self.hot_seconds is None and window.delivered == window.end:
                self.hot_seconds = time.monotonic() - self.started
            self._submit()
            over = all(span.delivered >= min(self._limit, span.end) for span in self._parts)
        if over:
            self.close()
        return ready

    def _arrived(self) -> int:
        """Blocks that can be handed over now."""
        arrived = 0
        for span in self._parts:
            at = span.delivered
            while at < span.end and at in self._results:
                at += 1
            arrived += at - span.delivered
        return arrived

    def _fail(self, reason: str, at: int) -> None:
        if at < self._limit:
            self.failure, self._limit = reason, at

    def close(self) -> None:
        """Stop reading and let go of the blocks; further calls do nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._results.clear()
            self.seconds = time.monotonic() - self.started
        self.lease.release()
        self._on_end(self)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self) -> None:
        for span in self._parts:
            while not self._ended and span.submitted < min(self._limit, span.end):
                nbytes = self.found[span.submitted].entry.payload_bytes
                if self._in_flight_bytes and self._in_flight_bytes + nbytes > self._ahead_bytes:
                    return
                self._in_flight_bytes += nbytes
                self._reading += 1
                self._readers.submit(self._read, span.submitted)
                span.submitted += 1

    def _read(self, at: int) -> None:
        """On a reading thread."""
        found = self.found[at]
        result: Loaded | None = None
        failure = ""
        started = time.monotonic()
        if not self._ended and at < self._limit:
            buffer = self._buffers.take()
            try:
                payload = found.tier.read(found.entry, buffer)
                arrays = self._layout.unpack(payload, found.info.n_tokens)
                result = Loaded(found.info, found.tier.name, found.tokens, arrays, payload, found.entry.crc, buffer)
            except Damaged as error:
                failure = error.reason
            except Exception as error:
                failure = f"failed: {error}"
                found.tier.lose(found.entry, "unreadable")
        with self._lock:
            self._reading -= 1
            if result is not None:
                self._results[at] = result
                name, now = found.tier.name, time.monotonic()
                first, last = self._spans.get(name, (started, now))
                self._spans[name] = (min(first, started), max(last, now))
                self.read_bytes[name] += len(result.payload)
            elif failure:
                self._fail(failure, at)
        if self._on_ready is not None:
            self._on_ready()
