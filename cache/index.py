"""What a tier holds: blocks in trees, their order of eviction, and whose they are. Bookkeeping only, no bytes.

Each namespace has its own order of eviction, and the one that takes the most room gives up a block first: a tenant that
fills a tier pushes out its own blocks, not another's. With one tenant this is the plain policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from .chains import Chains
from .keys import BlockInfo
from .policies import Policy

P = TypeVar("P")


@dataclass(eq=False)
class Entry(Generic[P]):
    """A block that a tier holds. Two entries are never equal: a block that left and came back is another one."""

    info: BlockInfo
    place: P
    nbytes: int  # what it takes in the tier
    payload_bytes: int
    crc: int


class TierIndex(Generic[P]):
    """The entries of one tier. Not thread-safe: the tier's lock covers it."""

    def __init__(self, policy: Callable[[], Policy[bytes]]) -> None:
        self._make_policy = policy
        self._entries: dict[bytes, Entry[P]] = {}
        self._chains = Chains()
        self._heads: dict[bytes, dict[bytes, None]] = {}  # root -> first blocks
        self._policies: dict[bytes, Policy[bytes]] = {}
        self._pins: Counter[bytes] = Counter()
        self.space_bytes: Counter[bytes] = Counter()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[P]]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry[P] | None:
        """The entry of a key, whatever its tokens."""
        return self._entries.get(key)

    def find(self, info: BlockInfo) -> Entry[P] | None:
        """The entry of exactly this block: token ids and fingerprint are compared, not only the key."""
        entry = self._entries.get(info.key)
        return entry if entry is not None and entry.info == info else None

    def reachable(self, info: BlockInfo) -> bool:
        """Whether the block could be added: it begins a chain, or what it continues is here."""
        return info.first or info.parent in self._entries

    def after(self, parent: bytes) -> Iterator[Entry[P]]:
        """Blocks that continue `parent`, a key or a root."""
        return (self._entries[key] for key in self._after(parent))

    def siblings(self, info: BlockInfo) -> Iterator[Entry[P]]:
        """Blocks that continue the same block as `info`, itself included."""
        return self.after(info.parent)

    def _after(self, parent: bytes) -> Iterable[bytes]:
        return self._chains.children(parent) if parent in self._chains else self._heads.get(parent, ())

    def partial(self, parent: bytes, tokens: bytes) -> tuple[Entry[P], int] | None:
        """The block behind `parent` (a key or a root) that begins with the most of `tokens` (packed), and how many."""
        best: tuple[Entry[P], int] | None = None
        for key in self._after(parent):
            entry = self._entries[key]
            if entry.info.extras or entry.info.tokens[:4] != tokens[:4]:
                continue
            n = common_tokens(entry.info.tokens, tokens)
            if best is None or n > best[1]:
                best = entry, n
        return best

    def add(self, entry: Entry[P]) -> None:
        """A new block; it must be reachable."""
        info = entry.info
        self._chains.add(info.key, None if info.first else info.parent)
        self._entries[info.key] = entry
        if info.first:
            self._heads.setdefault(info.parent, {})[info.key] = None
        if info.space not in self._policies:
            self._policies[info.space] = self._make_policy()
        self._policies[info.space].insert(info.key)
        self.space_bytes[info.space] += entry.nbytes
        self.bytes += entry.nbytes
        for _ in range(self._pins[info.key]):
            self._chains.hold(info.key)

    def use(self, entries: Iterable[Entry[P]]) -> None:
        """Blocks of one chain were found, given from its head on."""
        for entry in reversed(list(entries)):
            if self._entries.get(entry.info.key) is entry:
                self._policies[entry.info.space].use(entry.info.key)

    def hold(self, entry: Entry[P]) -> None:
        """Neither the block nor those before it are evicted until it is released."""
        self._chains.hold(entry.info.key)

    def release(self, entry: Entry[P]) -> None:
        """Undo one `hold`; nothing happens if the block was removed since."""
        if self._entries.get(entry.info.key) is entry:
            self._released(self._chains.release(entry.info.key))

    def _released(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._policies[self._entries[key].info.space].release(key)

    def pin(self, key: bytes) -> None:
        """Hold a block, now or whenever it comes."""
        self._pins[key] += 1
        if key in self._chains:
            self._chains.hold(key)

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`."""
        if self._pins[key] < 1:
            raise ValueError("the block was not pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
        if key in self._chains:
            self._released(self._chains.release(key))

    def victim(self, space: bytes | None = None, keep: bytes | None = None) -> Entry[P] | None:
        """Take out the block that goes next, of `space` or of the one that takes the most room; None if none may.

        `keep`: a block that must not go this time, and so nothing before it.
        """
        spaces = [space] if space is not None else [space for space, _ in self.space_bytes.most_common()]
        for candidate in spaces:
            policy = self._policies.get(candidate)
            key = self._victim_of(policy, keep) if policy is not None else None
            if key is not None:
                return self._take_out(key)
        return None

    def _victim_of(self, policy: Policy[bytes], keep: bytes | None) -> bytes | None:
        spared: list[bytes] = []

        def choose(key: bytes) -> bytes | None:
            chosen = self._chains.goes_for(key)
            if chosen is None or chosen != keep:
                return chosen
            spared.append(key)
            return None

        key = policy.victim(choose)
        for other in spared:
            policy.release(other)
        return key

    def remove(self, key: bytes) -> list[Entry[P]]:
        """Take out a block and all that continue it, held or not; the entries, leaves first."""
        removed = []
        for at in self._chains.subtree(key):
            self._policies[self._entries[at].info.space].remove(at)
            removed.append(self._take_out(at))
        return removed

    def removable(self, key: bytes) -> bool:
        """Whether nothing continues the block and nobody holds it."""
        return key in self._chains and self._chains.evictable(key)

    def held(self, key: bytes) -> bool:
        """Whether the block, or one that continues it, is leased or pinned."""
        return self._chains.held(key)

    def _take_out(self, key: bytes) -> Entry[P]:
        entry = self._entries.pop(key)
        freed = self._chains.remove(key)
        if freed is not None:
            self._policies[self._entries[freed].info.space].release(freed)
        info = entry.info
        if info.first:
            del self._heads[info.parent][key]
            if not self._heads[info.parent]:
                del self._heads[info.parent]
        self.bytes -= entry.nbytes
        self.space_bytes[info.space] -= entry.nbytes
        if not self.space_bytes[info.space]:
            del self.space_bytes[info.space]
        return entry

    def check(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        self._chains.check()
        assert set(self._entries) == set(self._chains), "entries and chains differ"
        total: Counter[bytes] = Counter()
        for key, entry in self._entries.items():
            info = entry.info
            assert info.key == key
            assert self._chains.parent(key) == (None if info.first else info.parent)
            assert not info.first or key in self._heads[info.parent], "a first block cannot be reached"
            assert key in self._policies[info.space], "a block can never be evicted"
            total[info.space] += entry.nbytes
        assert sum(len(heads) for heads in self._heads.values()) == sum(e.info.first for e in self), "heads are wrong"
        assert sum(len(policy) for policy in self._policies.values()) == len(self), "the policy knows other blocks"
        assert total == self.space_bytes and total.total() == self.bytes, "bytes are counted wrong"


def common_tokens(a: bytes, b: bytes) -> int:
    """How many packed token ids two sequences have in common from their beginning."""
    n = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, "<u4", n) != np.frombuffer(b, "<u4", n)
    return int(differ.argmax()) if differ.any() else n
