"""The events of one run in order, for whoever reads along now or asks for them again.

Events are numbered from 0 and kept as they are sent. When they take more room than they may, neighbours that only add
to the same text become one, which has the later one's number: nothing is lost, but nobody can begin between the two.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

Event = dict[str, Any]
Encode = Callable[[Event, int], bytes]
Merge = Callable[[bytes, bytes], bytes | None]
"""Two events as one, in the later one's place; None if they cannot be."""


class EventLog:
    def __init__(self, encode: Encode, merge: Merge, limit: int) -> None:
        """`limit`: bytes beyond which events are merged."""
        self._encode, self._merge, self._limit = encode, merge, limit
        self._numbers: list[int] = []
        self._events: list[bytes] = []
        self.size = 0
        """Bytes of all events."""
        self.next = 0
        """Number of the next event."""

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            encoded = self._encode(event, self.next)
            self._numbers.append(self.next)
            self._events.append(encoded)
            self.size += len(encoded)
            self.next += 1

    def restore(self, numbers: Sequence[int], events: Sequence[bytes]) -> None:
        """Take over the events of another log."""
        self._numbers, self._events = list(numbers), list(events)
        self.size = sum(map(len, self._events))
        self.next = self._numbers[-1] + 1 if self._numbers else 0

    def after(self, number: int) -> list[bytes]:
        """The events behind `number`; -1: all."""
        return self._events[bisect.bisect_right(self._numbers, number) :]

    def has(self, number: int) -> bool:
        """Whether one can begin behind `number`."""
        at = bisect.bisect_left(self._numbers, number)
        return number == -1 or (at < len(self._numbers) and self._numbers[at] == number)

    @property
    def entries(self) -> tuple[list[int], list[bytes]]:
        return list(self._numbers), list(self._events)

    def shrink(self, readers: Collection[int]) -> None:
        """Merge events if they take too much room. `readers` are the numbers behind which somebody stands."""
        if self.size <= self._limit:
            return
        numbers: list[int] = []
        events: list[bytes] = []
        for number, event in zip(self._numbers, self._events, strict=True):
            # Pairs only: merging everything into one text again and again would take quadratic time.
            fits = events and numbers[-1] not in readers and len(events[-1]) <= 2 * len(event) + 1024
            merged = self._merge(events[-1], event) if fits else None
            if merged is not None:
                numbers[-1], events[-1] = number, merged
            else:
                numbers.append(number)
                events.append(event)
        self._numbers, self._events = numbers, events
        self.size = sum(map(len, events))
        self._limit = max(self._limit, 2 * self.size)
