"""Which KV block belongs to whom: allocation, sharing and eviction of the pool's blocks. Host only, no JAX.

A block is a number; its bytes live in the engine's arrays. At any moment it is one of

* free: nobody's, content meaningless;
* used: at least one reference, from a request that writes or reads it (or an ancestor of such a block);
* cached: no reference, but published under its key: found by later requests until its place is needed.

Invariants (`check` verifies them):

* A published block is sealed: the engine never writes to it again. Its parent is published too, so that a chain is
  always reachable from its head; leaves are evicted before what they continue. One that is only partly filled, a tail,
  is a leaf.
* A lookup takes its references at once, so that what it found cannot be evicted before it is used.
* `allocate` gives all or nothing, and evicts exactly what is missing, in the order of LRU-2: blocks that one request
  has used go before those that several have.
* Block 0 is never handed out: padding rows and empty table entries point to it, and write there.

Not thread-safe: it belongs to the engine thread. Operations cost O(1) per block, allocation O(log blocks).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..configs.engine import BLOCK, NULL_BLOCK
from .index import common_tokens
from .keys import pack_tokens, packed_block_key, packed_tail_key
from .policies import LRU2

MOST_COMPARED = 64
"""Blocks that a part is looked for in: all first blocks of a tenant have the same root."""


@dataclass
class _Published:
    """What is known about a published block."""

    key: bytes
    packed: bytes  # its token ids, compared on every hit
    parent: int | None  # the block it continues, None for a first one
    behind: bytes | None  # the key of that block, or the root of a first one, if it may be found in part
    children: int = 0  # published blocks that continue it


class BlockPool:
    """Bookkeeping of `n_blocks` KV blocks of `block_size` tokens, block 0 included."""

    def __init__(self, n_blocks: int, block_size: int = BLOCK) -> None:
        if n_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (block 0 is reserved), got {n_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = list(range(n_blocks - 1, NULL_BLOCK, -1))
        self._references = [0] * n_blocks
        # References plus published children in use: a block with none, and only then, can be evicted, leaves first.
        self._holds = [0] * n_blocks
        self._published: dict[int, _Published] = {}
        self._by_key: dict[bytes, int] = {}
        self._behind: dict[bytes, dict[int, None]] = {}  # key or root -> blocks that continue it
        self._cached = 0
        self._order: LRU2[bytes] = LRU2()  # of all published blocks, by key

    @property
    def total(self) -> int:
        """Blocks that can be handed out: all but block 0."""
        return self.n_blocks - 1

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Published blocks that no request uses: found by lookups, evicted when their place is needed."""
        return self._cached

    @property
    def used(self) -> int:
        """Blocks of running requests."""
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.free + self.cached

    def references(self, block: int) -> int:
        """How many references are held on a block."""
        return self._references[block]

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None (and no change) if fewer are available."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.available:
            return None
        for _ in range(n - self.free):
            self._evict()
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._references[block] = self._holds[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference on each block, all of which must be in use or published."""
        for block in blocks:
            if self._references[block] < 1 and block not in self._published:
                raise ValueError(f"block {block} cannot be shared: it is neither in use nor published")
            self._take(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less on each block. Without any, published blocks stay cached, others become free."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} was released more often than it was taken")
            self._references[block] -= 1
            self._drop_hold(block)

    def publish(
        self,
        block: int,
        key: bytes,
        tokens: Sequence[int] | np.ndarray,
        parent_key: bytes | None,
        root: bytes | None = None,
    ) -> int | None:
        """Make a sealed block findable; `parent_key` is the key of the block it continues, None for a first block,
        which is found in part only if its `root` is given.

        Returns the block that is now found under `key`: `block` itself; or another one that was published with the
        same content before (the caller may keep its own, private, or share the other: `retain` it, then `release`
        its own); or None, with nothing published, if the parent is not published (any more) or other tokens have
        this key. The caller must hold a reference, and never write to a published block again.
        """
        return self._publish(block, key, self._pack(tokens), parent_key, root)

    def publish_tail(
        self, block: int, tokens: Sequence[int] | np.ndarray, parent_key: bytes | None, root: bytes
    ) -> int | None:
        """The same for a block of which only the first `tokens` are certain, and that nobody writes to any more: for
        those whose prompts go on alike. Gives what `publish` gives."""
        if not 0 < len(tokens) < self.block_size:
            raise ValueError(f"a tail holds 1 to {self.block_size - 1} tokens, got {len(tokens)}")
        packed = pack_tokens(tokens)
        return self._publish(block, packed_tail_key(parent_key or root, packed), packed, parent_key, root)

    def _publish(
        self, block: int, key: bytes, packed: bytes, parent_key: bytes | None, root: bytes | None
    ) -> int | None:
        if self._references[block] < 1:
            raise ValueError(f"block {block} cannot be published: it has no reference")
        if block in self._published and self._published[block].key != key:
            raise ValueError(f"block {block} is already published under another key")
        holder = self._by_key.get(key)
        if holder is not None:
            return holder if self._published[holder].packed == packed else None
        parent = None if parent_key is None else self._by_key.get(parent_key)
        if parent is None and parent_key is not None:
            return None
        behind = parent_key or root
        self._published[block] = _Published(key, packed, parent, behind)
        self._by_key[key] = block
        if behind is not None:
            self._behind.setdefault(behind, {})[block] = None
        self._order.insert(key)
        if parent is not None:
            self._published[parent].children += 1
            self._add_hold(parent)
        return block

    def match(self, root: bytes, token_ids: Sequence[int] | np.ndarray) -> list[int]:
        """The published blocks that hold the longest prefix of `token_ids` under `root`, one reference taken on each.

        Only whole blocks match. At least one token must be run to get logits, so callers leave the last one out.
        """
        packed = pack_tokens(token_ids)
        size = 4 * self.block_size
        blocks: list[int] = []
        parent, key = None, root
        for start in range(0, len(packed) - size + 1, size):
            part = packed[start : start + size]
            key = packed_block_key(key, part)
            block = self._find(key, part)
            if block is None or self._published[block].parent != parent:
                break
            self._take(block)
            blocks.append(block)
            parent = block
        return blocks

    def match_part(self, behind: bytes, token_ids: Sequence[int] | np.ndarray) -> tuple[int, int] | None:
        """The block behind a key or a root that begins with the most of `token_ids`, one reference taken, and how many
        they are; None if none begins with the first. Looks at the newest blocks only, where there are many."""
        packed = pack_tokens(token_ids)
        best, most = None, 0
        for block in itertools.islice(reversed(self._behind.get(behind, {})), MOST_COMPARED):
            held = self._published[block].packed
            if held[:4] == packed[:4] and (n := common_tokens(held, packed)) > most:
                best, most = block, n
        if best is None:
            return None
        self._take(best)
        return best, most

    def use(self, blocks: Sequence[int]) -> None:
        """A request works from these published blocks of one chain, given from its head on: what eviction goes by.

        To be called once a request, when it has its blocks; finding them alone does not count.
        """
        for block in reversed(blocks):  # so that heads outlive what continues them
            self._order.use(self._published[block].key)

    def lookup(self, key: bytes, tokens: Sequence[int] | np.ndarray) -> int | None:
        """The block published under `key`, one reference taken, or None; its tokens are compared."""
        block = self._find(key, self._pack(tokens))
        if block is not None:
            self._take(block)
        return block

    def clear(self) -> int:
        """Evict every cached block (new weights, a secret that changed); returns how many there were."""
        evicted = self._cached
        for _ in range(evicted):
            self._evict()
        return evicted

    def check(self, held: Iterable[int] | None = None) -> None:
        """Raise `AssertionError` naming what is inconsistent.

        `held` lists every block once per reference that its holders know of: a difference is a leak (or a double
        release). When nothing runs, `check(held=())` says that every block is free or cached.
        """
        self._check_states()
        self._check_chains()
        if held is not None:
            known = Counter(held)
            actual = Counter({block: n for block, n in enumerate(self._references) if n})
            leaked, missing = actual - known, known - actual
            assert not leaked, f"references that nobody holds: {dict(leaked)}"
            assert not missing, f"references held but not counted: {dict(missing)}"

    def _pack(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        if len(tokens) != self.block_size:
            raise ValueError(f"a block holds {self.block_size} tokens, got {len(tokens)}")
        return pack_tokens(tokens)

    def _find(self, key: bytes, packed: bytes) -> int | None:
        block = self._by_key.get(key)
        return block if block is not None and self._published[block].packed == packed else None

    def _take(self, block: int) -> None:
        self._references[block] += 1
        self._add_hold(block)

    def _add_hold(self, block: int | None) -> None:
        """Count a hold; a published block that was cached is in use now, and so is what it continues."""
        while block is not None:
            self._holds[block] += 1
            if self._holds[block] > 1:
                return
            self._cached -= 1
            block = self._published[block].parent

    def _drop_hold(self, block: int | None) -> None:
        """Uncount a hold; without any, an unpublished block is free, a published one cached."""
        while block is not None:
            self._holds[block] -= 1
            if self._holds[block]:
                return
            entry = self._published.get(block)
            if entry is None:
                self._free.append(block)
                return
            self._cached += 1
            self._order.release(entry.key)
            block = entry.parent

    def _evict(self) -> None:
        """Free the next cached block that no other continues. There must be a cached one."""
        key = self._order.victim(self._evictable)
        assert key is not None, "no cached block can be evicted"
        block = self._by_key.pop(key)
        entry = self._published.pop(block)
        if entry.behind is not None:
            del self._behind[entry.behind][block]
            if not self._behind[entry.behind]:
                del self._behind[entry.behind]
        self._cached -= 1
        self._free.append(block)
        if entry.parent is not None:
            parent = self._published[entry.parent]
            parent.children -= 1
            self._order.release(parent.key)

    def _evictable(self, key: bytes) -> bytes | None:
        block = self._by_key[key]
        return None if self._holds[block] or self._published[block].children else key

    def _check_states(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert NULL_BLOCK not in free and not self._holds[NULL_BLOCK], "block 0 was handed out or released"
        cached = 0
        for block in range(1, self.n_blocks):
            references, holds, published = self._references[block], self._holds[block], block in self._published
            assert 0 <= references <= holds, f"block {block} has {references} references and {holds} holds"
            assert (block in free) == (not holds and not published), (
                f"block {block} is {'' if block in free else 'not '}free with {holds} holds, published: {published}"
            )
            assert published or references == holds, f"unpublished block {block} has holds beyond its references"
            cached += published and not holds
        assert cached == self._cached, f"{self._cached} blocks counted as cached, {cached} are"

    def _check_chains(self) -> None:
        children: Counter[int] = Counter()
        holding: Counter[int] = Counter()
        for block, entry in self._published.items():
            assert self._by_key.get(entry.key) == block, f"published block {block} is not found by its key"
            if entry.parent is not None:
                assert entry.parent in self._published, f"block {block} continues block {entry.parent}, which is gone"
                children[entry.parent] += 1
                holding[entry.parent] += self._holds[block] > 0
        assert len(self._by_key) == len(self._published), "keys without a block"
        behind = {block: key for key, blocks in self._behind.items() for block in blocks}
        known = {block: entry.behind for block, entry in self._published.items() if entry.behind is not None}
        assert behind == known, "blocks that can be found in part are not those that are published"
        assert len(self._order) == len(self._published), "the order of eviction has other blocks"
        for block, entry in self._published.items():
            assert entry.children == children[block], f"block {block} counts {entry.children} children"
            assert self._holds[block] == self._references[block] + holding[block], f"block {block}: holds are wrong"
            assert entry.key in self._order, f"cached block {block} can never be evicted"
