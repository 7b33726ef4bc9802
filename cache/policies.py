"""What a full tier gives up first. Three small policies behind one interface, for every tier and for the simulator.

A policy knows keys, not blocks. It names who is next, and the tier says who goes in its place: chains are evicted from
their leaves, never from the head, so for a block that others continue a leaf behind it goes; and what is in use or
pinned does not go at all.

Measured on a conversation trace of 288,500 block references (`replay.hit_ratio`), as the share of blocks found: small
tiers want LRU-2, since most blocks are used once and only recency of *re*-use tells the others apart; middle ones
S3-FIFO with a large small queue and a long ghost list; large ones plain LRU of leaves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """An order of eviction over the keys of a tier. Not thread-safe: the tier's lock covers it."""

    def insert(self, key: K) -> None:
        """The tier holds `key` from now on; not to be called for a key it holds already."""

    def use(self, key: K) -> None:
        """A held key was found. Chains are used from their last block to the first, so that heads outlive leaves."""

    def remove(self, key: K) -> None:
        """The tier no longer holds `key`, for another reason than eviction (deleted, damaged)."""

    def release(self, key: K) -> None:
        """A held key that could not go may go now: nobody uses it, and nothing continues it."""

    def victim(self, choose: Callable[[K], K | None]) -> K | None:
        """Evict one key and return it; None if none may go.

        `choose` is asked about key after key until it returns the key that goes: the same one, or a held one in its
        place, which then keeps its turn.
        """

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...


class LRU(Policy[K]):
    """Least recently used first: a heap of (rank, key). A key that may not go is parked until it may, or is used."""

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[int, ...]] = {}
        self._heap: list[tuple[tuple[int, ...], K]] = []  # entries whose rank has changed are skipped
        self._parked: set[K] = set()
        self._clock = 0

    def insert(self, key: K) -> None:
        self._put(key, self._first_rank(key))

    def use(self, key: K) -> None:
        self._put(key, self._next_rank(self._ranks[key]))

    def remove(self, key: K) -> None:
        del self._ranks[key]
        self._parked.discard(key)

    def release(self, key: K) -> None:
        if key in self._parked:
            self._parked.discard(key)
            heapq.heappush(self._heap, (self._ranks[key], key))

    def victim(self, choose: Callable[[K], K | None]) -> K | None:
        while self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) != rank or key in self._parked:
                continue
            chosen = choose(key)
            if chosen is None:
                self._parked.add(key)
                continue
            if chosen != key:
                heapq.heappush(self._heap, (rank, key))
            self._parked.discard(chosen)
            self._evicted(chosen, self._ranks.pop(chosen))
            return chosen
        return None

    def _put(self, key: K, rank: tuple[int, ...]) -> None:
        self._parked.discard(key)
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 2 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items() if key not in self._parked]
            heapq.heapify(self._heap)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _first_rank(self, key: K) -> tuple[int, ...]:
        return (self._tick(),)

    def _next_rank(self, rank: tuple[int, ...]) -> tuple[int, ...]:
        return (self._tick(),)

    def _evicted(self, key: K, rank: tuple[int, ...]) -> None:
        """For policies that remember what is gone."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks


class LRU2(LRU[K]):
    """The key whose last use but one is the oldest first; keys used once go before all others, the oldest first.

    O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD 1993. The
    last use of evicted keys is kept, `ghost` times as many as there are keys, so that a block that comes back counts as
    used twice. Ranks are (last use but one or 0, last use).
    """

    def __init__(self, ghost: float = 4.0) -> None:
        super().__init__()
        if ghost < 0:
            raise ValueError(f"LRU-2 cannot remember {ghost} times its keys")
        self._ghost_factor = ghost
        self._gone: OrderedDict[K, int] = OrderedDict()

    def _first_rank(self, key: K) -> tuple[int, ...]:
        return (self._gone.pop(key, 0), self._tick())

    def _next_rank(self, rank: tuple[int, ...]) -> tuple[int, ...]:
        return (rank[1], self._tick())

    def _evicted(self, key: K, rank: tuple[int, ...]) -> None:
        self._gone[key] = rank[1]
        while len(self._gone) > self._ghost_factor * (len(self._ranks) + 1):
            self._gone.popitem(last=False)


class S3FIFO(Policy[K]):
    """Three queues: new keys wait in a small one, keys used again move to the main one, evicted ones leave a ghost.

    Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023. A key whose ghost
    is still remembered enters the main queue at once. A key that may not go moves to the end of its queue. `small` is
    the small queue's share of all keys, `ghost` the number of ghosts over theirs; the defaults are measured.
    """

    MOST_USES = 3

    def __init__(self, *, small: float = 0.5, ghost: float = 4.0) -> None:
        if not 0 < small < 1 or ghost < 0:
            raise ValueError(f"S3-FIFO with a small share of {small} and a ghost factor of {ghost} is not possible")
        self._small_share, self._ghost_factor = small, ghost
        self._small: OrderedDict[K, int] = OrderedDict()  # key -> uses since it came
        self._main: OrderedDict[K, int] = OrderedDict()  # key -> uses since it came or was passed over
        self._ghost: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        known = key in self._ghost
        self._ghost.pop(key, None)
        (self._main if known else self._small)[key] = 0

    def use(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self.MOST_USES)

    def remove(self, key: K) -> None:
        del (self._small if key in self._small else self._main)[key]

    def release(self, key: K) -> None:
        """Nothing to do: keys that may not go stay in their queue."""

    def victim(self, choose: Callable[[K], K | None]) -> K | None:
        small_first = len(self._small) >= self._small_share * len(self) or not self._main
        order = (self._from_small, self._from_main) if small_first else (self._from_main, self._from_small)
        for take in (*order, self._from_main):  # once more: used keys may have moved there
            key = take(choose)
            if key is not None:
                return key
        return None

    def _from_small(self, choose: Callable[[K], K | None]) -> K | None:
        for _ in range(len(self._small)):
            key, uses = next(iter(self._small.items()))
            if uses:
                del self._small[key]
                self._main[key] = 0
                continue
            chosen = choose(key)
            if chosen is not None:
                self.remove(chosen)
                self._remember(chosen)
                return chosen
            self._small.move_to_end(key)
        return None

    def _from_main(self, choose: Callable[[K], K | None]) -> K | None:
        for _ in range((self.MOST_USES + 1) * len(self._main)):
            key, uses = next(iter(self._main.items()))
            chosen = None if uses else choose(key)
            if chosen is not None:
                self.remove(chosen)
                return chosen
            self._main.move_to_end(key)
            self._main[key] = max(uses - 1, 0)
        return None

    def _remember(self, key: K) -> None:
        self._ghost[key] = None
        while len(self._ghost) > self._ghost_factor * (len(self) + 1):
            self._ghost.popitem(last=False)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main
