"""What a request has found, held for it for a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .index import Entry
from .tier import Tier


class Lease:
    """Holds on entries of tiers. Ends with `release`, at the end of a `with` block, or at its deadline."""

    def __init__(self, book: Leases, deadline: float) -> None:
        self.deadline = deadline
        self._book = book
        self._held: list[tuple[Tier[Any], Entry[Any]]] | None = []

    def add(self, tier: Tier[Any], entry: Entry[Any]) -> None:
        """Take over one acquisition."""
        with self._book.lock:
            if self._held is not None:
                self._held.append((tier, entry))
                return
        tier.release(entry)

    @property
    def live(self) -> bool:
        """Whether it still holds."""
        return self._held is not None

    def release(self) -> None:
        """Let go; further calls do nothing."""
        with self._book.lock:
            held, self._held = self._held, None
            self._book.open.discard(self)
        for tier, entry in held or ():
            tier.release(entry)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """All open leases. Whoever forgets one loses it at its deadline, and is counted."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.Lock()
        self.open: set[Lease] = set()
        self.expired = 0
        self._seconds, self._clock = seconds, clock

    def take(self) -> Lease:
        """A lease that holds nothing yet."""
        lease = Lease(self, self._clock() + self._seconds)
        with self.lock:
            self.open.add(lease)
        return lease

    def expire(self) -> int:
        """End the leases whose deadline is over; how many."""
        now = self._clock()
        with self.lock:
            late = [lease for lease in self.open if lease.deadline <= now]
        for lease in late:
            lease.release()
        self.expired += len(late)
        return len(late)
