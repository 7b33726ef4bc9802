"""Which blocks of a tier continue which, and which of them may go.

A tier holds blocks as trees: a block's parent is the block it continues. A block counts as held while it, or one that
continues it, is leased or pinned. Held blocks stay; of the others only leaves go, so that every block of a tier can be
reached from its head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class _Node:
    parent: bytes | None  # None: the first block of a chain
    children: dict[bytes, None] = field(default_factory=dict)  # in order of arrival
    own: int = 0  # leases and pins of this block
    holds: int = 0  # `own`, plus the number of children that are held


class Chains:
    """The trees of one tier. Not thread-safe: the tier's lock covers it. Operations cost O(1) amortised, except that a
    hold or release walks up to the next ancestor that is held otherwise."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._descent: tuple[bytes, bytes] | None = None  # where the last search for a leaf began, and ended above

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """A new block; its parent must be there."""
        if key in self._nodes:
            raise ValueError("the block is already in the tier")
        if parent is not None:
            self._nodes[parent].children[key] = None
        self._nodes[key] = _Node(parent)

    def remove(self, key: bytes) -> bytes | None:
        """Take a leaf out; its parent if that is a leaf now that may go."""
        node = self._nodes[key]
        if node.children:
            raise ValueError("other blocks continue this one")
        for _ in range(node.own):
            self.release(key)
        del self._nodes[key]
        if node.parent is None:
            return None
        above = self._nodes[node.parent]
        del above.children[key]
        return node.parent if self.evictable(node.parent) else None

    def hold(self, key: bytes) -> None:
        """One lease or pin more on a block."""
        self._nodes[key].own += 1
        at: bytes | None = key
        while at is not None:
            node = self._nodes[at]
            node.holds += 1
            if node.holds > 1:
                return
            at = node.parent

    def release(self, key: bytes) -> list[bytes]:
        """One lease or pin less; the blocks that nobody holds any more because of it."""
        if self._nodes[key].own < 1:
            raise ValueError("the block was released more often than it was held")
        self._nodes[key].own -= 1
        at: bytes | None = key
        free = []
        while at is not None:
            node = self._nodes[at]
            node.holds -= 1
            if node.holds:
                break
            free.append(at)
            at = node.parent
        return free

    def held(self, key: bytes) -> bool:
        """Whether the block or one behind it is leased or pinned."""
        return self._nodes[key].holds > 0

    def own_holds(self, key: bytes) -> int:
        """Leases and pins of this very block."""
        return self._nodes[key].own

    def evictable(self, key: bytes) -> bool:
        """Whether the block is a leaf that nobody holds."""
        node = self._nodes[key]
        return not node.holds and not node.children

    def parent(self, key: bytes) -> bytes | None:
        """The block that `key` continues."""
        return self._nodes[key].parent

    def children(self, key: bytes) -> list[bytes]:
        """The blocks that continue `key`, in order of arrival."""
        return list(self._nodes[key].children)

    def goes_for(self, key: bytes) -> bytes | None:
        """Who is evicted when it is `key`'s turn: a leaf behind it, or itself; None while it is held."""
        if self._nodes[key].holds:
            return None
        at = key
        if self._descent is not None and self._descent[0] == key and self._descent[1] in self._nodes:
            at = self._descent[1]  # long chains are given up leaf by leaf: go on where the last leaf was
        while self._nodes[at].children:
            at = next(iter(self._nodes[at].children))
        above = self._nodes[at].parent
        self._descent = (key, above) if above is not None and at != key else None
        return at

    def subtree(self, key: bytes) -> list[bytes]:
        """`key` and everything behind it, leaves first."""
        order, stack = [], [key]
        while stack:
            at = stack.pop()
            order.append(at)
            stack += self._nodes[at].children
        return order[::-1]

    def check(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        for key, node in self._nodes.items():
            assert node.own >= 0, f"block {key.hex()} has {node.own} holds"
            behind = 0
            for child in node.children:
                assert child in self._nodes and self._nodes[child].parent == key, f"{key.hex()}: a child is gone"
                behind += self._nodes[child].holds > 0
            assert node.holds == node.own + behind, f"block {key.hex()} counts {node.holds} holds"
            if node.parent is not None:
                assert node.parent in self._nodes, f"block {key.hex()} has lost its parent"
                assert key in self._nodes[node.parent].children, f"block {key.hex()} is unknown to its parent"
