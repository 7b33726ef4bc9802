"""Writing blocks down, beside the step: one thread, a queue with a bounded number of bytes.

Blocks are written in the order they were offered, so the first block of a chain before the second. What a block's bytes
are may be a function, which is called on this thread: for example one that waits for a copy from the device. When the
queue is full, a block is refused; it can be offered again, or is computed again when it is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .disk import DiskTier
from .keys import BlockInfo
from .layout import BlockLayout
from .record import payload_crc
from .tier import Put, Tier

log = logging.getLogger(__name__)

Contents: TypeAlias = "Sequence[np.ndarray] | Callable[[], Sequence[np.ndarray]] | memoryview"
"""A block's arrays, a function that returns them, or a payload that was packed before."""

_NICE = 10
_UPKEEP = 1.0  # seconds


def yield_to_steps() -> None:
    """Let the calling thread run after those that compute. Where priorities belong to processes, nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclass
class _Item:
    info: BlockInfo
    contents: Contents
    nbytes: int
    tiers: tuple[Tier[Any], ...]
    done: Callable[[], None] | None
    offered: float


class Writer:
    """The queue and its thread."""

    def __init__(
        self,
        layout: BlockLayout,
        *,
        queue_bytes: int,
        disk: DiskTier | None,
        sync_interval: float,
        sync_bytes: int,
        upkeep: Callable[[], None],
    ) -> None:
        """`upkeep` is called about once a second, on the writer's thread."""
        self._layout, self._queue_bytes, self._disk = layout, queue_bytes, disk
        self._sync_interval, self._sync_bytes, self._upkeep = sync_interval, sync_bytes, upkeep
        self._wake = threading.Condition()
        self._items: deque[_Item] = deque()
        self._pending: Counter[bytes] = Counter()
        self._pending_bytes = 0
        self._busy = threading.Lock()  # held while a block is being written
        self._stopping = False
        self._appended = 0  # since the last sync
        self._last_sync = self._last_upkeep = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.lags: deque[float] = deque(maxlen=1024)  # seconds from offer to written
        self.seconds = 0.0  # spent writing
        self._thread = threading.Thread(target=self._run, name="umbra-cache-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes of blocks that wait or are being written."""
        return self._pending_bytes

    def pending(self, key: bytes) -> bool:
        """Whether a block waits or is being written."""
        return self._pending[key] > 0 if key in self._pending else False

    def offer(
        self,
        info: BlockInfo,
        contents: Contents,
        tiers: tuple[Tier[Any], ...],
        done: Callable[[], None] | None = None,
    ) -> bool:
        """Queue a block for some tiers; False if the queue is full. Takes microseconds.

        `done` is called on the writer's thread once the contents are no longer read, also if they were not kept; not
        when the offer is refused.
        """
        nbytes = self._layout.nbytes(info.n_tokens)
        with self._wake:
            if self._stopping or self._pending_bytes + nbytes > self._queue_bytes:
                self.outcomes["queue_full"] += 1
                return False
            self._items.append(_Item(info, contents, nbytes, tiers, done, time.monotonic()))
            self._pending[info.key] += 1
            self._pending_bytes += nbytes
            self._wake.notify()
        return True

    def cancel(self, keys: Iterable[bytes]) -> int:
        """Forget blocks that wait; those being written are finished when this returns. How many did not get written."""
        gone = set(keys)
        with self._wake:
            dropped = [item for item in self._items if item.info.key in gone]
            self._items = deque(item for item in self._items if item.info.key not in gone)
        for item in dropped:
            self._finish(item)
        with self._busy:
            return len(dropped)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was offered is written and durable; False if that took longer than `timeout`."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._wake:
            while self._pending_bytes or self._pending:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._wake.wait(0.05 if left is None else min(left, 0.05))
        with self._busy:
            self._sync()
        return True

    def close(self) -> None:
        """Write what waits, make it durable, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    # ---- the writer's thread

    def _run(self) -> None:
        yield_to_steps()
        while (item := self._next()) is not None or not self._stopping:
            if item is not None:
                with self._busy:
                    self._write(item)
                self._finish(item)
            try:
                self._between(idle=item is None)
            except Exception:
                log.exception("upkeep of the context cache failed")
        self._sync()

    def _next(self) -> _Item | None:
        with self._wake:
            if not self._items and not self._stopping:
                self._wake.wait(self._sync_interval if self._appended else _UPKEEP)
            return self._items.popleft() if self._items else None

    def _write(self, item: _Item) -> None:
        started = time.monotonic()
        try:
            payload = self._payload(item)
            crc = payload_crc(payload)
            for tier in item.tiers:
                put = tier.put(item.info, payload, crc)
                self.outcomes[f"{tier.name}_{put.value}"] += 1
                if tier is self._disk and put is Put.WRITTEN:
                    self._appended += len(payload)
        except Exception:
            log.exception("a block was not written")
            self.outcomes["failed"] += 1
        now = time.monotonic()
        self.seconds += now - started
        self.lags.append(now - item.offered)

    def _payload(self, item: _Item) -> bytes | memoryview:
        if isinstance(item.contents, memoryview):
            return item.contents
        arrays = item.contents() if callable(item.contents) else item.contents
        return self._layout.pack([np.asarray(array) for array in arrays], item.info.n_tokens)

    def _finish(self, item: _Item) -> None:
        if item.done is not None:
            try:
                item.done()
            except Exception:
                log.exception("a block's owner failed when it was written")
        with self._wake:
            self._pending[item.info.key] -= 1
            if not self._pending[item.info.key]:
                del self._pending[item.info.key]
            self._pending_bytes -= item.nbytes
            self._wake.notify_all()

    def _between(self, *, idle: bool) -> None:
        now = time.monotonic()
        if self._appended and (self._appended >= self._sync_bytes or now - self._last_sync >= self._sync_interval):
            self._sync()
        if now - self._last_upkeep >= _UPKEEP:
            self._last_upkeep = now
            self._upkeep()
        if idle and self._disk is not None:
            self._disk.tidy()

    def _sync(self) -> None:
        self._appended = 0
        self._last_sync = time.monotonic()
        if self._disk is not None:
            self._disk.sync()
