"""How many blocks a tier of some size finds under some policy, by replaying requests against its bookkeeping.

A block counts as found only if all blocks before it were found too. This is the same code that evicts in the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .chains import Chains
from .policies import LRU, LRU2, S3FIFO, Policy
from .traces import TracedRequest

POLICIES: dict[str, Callable[[], Policy[bytes]]] = {"lru": LRU, "lru2": LRU2, "s3fifo": S3FIFO}


class TierModel:
    """The bookkeeping of a tier that holds at most `capacity` blocks."""

    def __init__(self, policy: Policy[bytes], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a tier holds at least one block, got {capacity}")
        self.capacity = capacity
        self._policy, self._chains = policy, Chains()

    def __len__(self) -> int:
        return len(self._chains)

    def find(self, blocks: Sequence[int]) -> int:
        """How many of a chain's blocks, from its head on, are here. They count as used."""
        found = next((n for n, block in enumerate(blocks) if _key(block) not in self._chains), len(blocks))
        for block in reversed(blocks[:found]):
            self._policy.use(_key(block))
        return found

    def add(self, blocks: Sequence[int]) -> int:
        """Put a whole chain in, as far as there is room beside itself; how many blocks of it are here then."""
        last: bytes | None = None
        present = 0
        for block in blocks:
            key = _key(block)
            if key not in self._chains:
                if len(self._chains) >= self.capacity and not self._evict():
                    break
                self._chains.add(key, last)
                self._policy.insert(key)
            self._chains.hold(key)
            if last is not None:
                self._chains.release(last)
            last, present = key, present + 1
        if last is not None:
            for key in self._chains.release(last):
                self._policy.release(key)
        return present

    def _evict(self) -> bool:
        victim = self._policy.victim(self._chains.goes_for)
        if victim is None:
            return False
        freed = self._chains.remove(victim)
        if freed is not None:
            self._policy.release(freed)
        return True


def hit_ratio(requests: Iterable[TracedRequest], policy: Policy[bytes], capacity: int) -> float:
    """The share of all blocks of all requests that a tier of `capacity` blocks finds."""
    tier = TierModel(policy, capacity)
    found = total = 0
    for request in requests:
        total += len(request.blocks)
        found += tier.find(request.blocks)
        tier.add(request.blocks)
    return found / total if total else 0.0


def hit_curves(
    requests: Sequence[TracedRequest], capacities: Sequence[int], policies: Iterable[str] = tuple(POLICIES)
) -> dict[str, list[float]]:
    """For each policy by name, the hit ratio at each capacity (in blocks of the trace)."""
    return {name: [hit_ratio(requests, POLICIES[name](), capacity) for capacity in capacities] for name in policies}


def _key(block: int) -> bytes:
    return block.to_bytes(8, "big", signed=True)
