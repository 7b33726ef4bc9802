"""Blocks between the device's pool and the tiers behind it: what a request finds there is brought up into its blocks,
what it seals is copied down. Engine thread only.

Bringing up. A request that is admitted looks up what the tiers have behind the blocks of the pool. Reading and
verifying happen on other threads; the request keeps its slot and blocks meanwhile and takes part in no step. What has
arrived is written into blocks that only this request holds, and published once everything it continues is there. When a
block cannot be read, the request computes the rest, as if it had never been found.

Copying down. A sealed block is copied by a program that runs after the step that filled it, so the copy cannot be of
anything else, whatever becomes of the block later; a reference keeps the block until that program is on its way.
Several blocks are copied at once. Waiting for the copy, packing and writing happen on the writer's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ...cache.context import ContextCache
from ...cache.keys import BlockInfo, pack_tokens, packed_tail_key
from ...cache.load import Load, Loaded
from ...configs.engine import BLOCK
from ...kernels.attention import KVPool
from .device import Device
from .programs import COPY_BLOCKS
from .scheduler import Shard
from .sequence import Phase, Sequence

log = logging.getLogger(__name__)

LONGEST_WAIT = 0.5
"""Seconds that a sealed block waits for others to be copied with."""

MOST_LOOKED_AT = 64
"""Sealed blocks of one sequence that are looked at in a step: a long prompt found in the pool has thousands."""

MOST_MOVING = 2
"""Groups of loaded blocks that the device may still be reading."""


@dataclasses.dataclass(frozen=True)
class Arrived:
    """How long a request has waited for what the tiers had of its prompt."""

    seconds: float
    """From its arrival until everything was in the pool."""
    hot_seconds: float
    """From its arrival until its hot window was."""
    hot_bytes: int


@dataclasses.dataclass
class _Waiting:
    """A block that is to be copied down. It holds a reference."""

    shard: Shard
    block: int
    info: BlockInfo
    persist: bool
    since: float


@dataclasses.dataclass(frozen=True)
class _Moving:
    """Loaded blocks that the device reads until all of `read` is ready."""

    read: list[Any]
    load: Load
    blocks: list[Loaded]


class _Copy:
    """Blocks that a program copies out of the pool, as the writer's thread reads them."""

    def __init__(self, copied: KVPool) -> None:
        self._copied: Any = copied
        self._host: list[np.ndarray] | None = None

    def arrays(self, at: int) -> list[np.ndarray]:
        """Those of one block. The first call waits for the program, and for the way to the host."""
        if self._host is None:
            self._host, self._copied = [np.asarray(leaf) for leaf in jax.tree.leaves(self._copied)], None
        return [leaf[at] for leaf in self._host]


class Tiers:
    """What the engine's loop calls."""

    def __init__(self, cache: ContextCache, device: Device, on_ready: Callable[[], None]) -> None:
        """`on_ready`: called on another thread when `poll` has something to do."""
        self.cache, self._device, self._on_ready = cache, device, on_ready
        self._structure = jax.tree.structure(device.block_shapes)
        self._waiting: dict[bytes, _Waiting] = {}  # by key, in the order of chains
        self._moving: deque[_Moving] = deque()

    # ---- up

    def expect(self, seq: Sequence, known_tokens: int) -> None:
        """`seq` has to wait for a slot: what it will need beyond what the pool has is read ahead."""
        seq.expected = True
        self.cache.expect(seq.identity, seq.prompt, known_blocks=known_tokens // BLOCK)

    def look_up(self, seq: Sequence) -> None:
        """`seq` was admitted: start to load what the tiers have behind its blocks from the pool."""
        match = self.cache.match(seq.identity, seq.prompt, known_blocks=len(seq.keys))
        if seq.part is not None and match.tokens <= seq.part[1]:
            match.release()  # the device has as much
        elif match.tokens:
            seq.load, seq.before_load = self.cache.load(match, self._on_ready), seq.prefilled
            seq.phase = Phase.LOADING

    def poll(self, shards: Iterable[Shard]) -> list[Arrived]:
        """Put what has arrived into its blocks. Gives an entry for every request that is through with it."""
        self._let_go(MOST_MOVING)
        through: list[Arrived] = []
        for shard in shards:
            loading = [seq for seq in shard.running if seq.phase is Phase.LOADING]
            most = COPY_BLOCKS if len(loading) < len(shard.running) else None  # others wait for the next step
            for seq in loading:
                through += self._take(shard, seq, most)
        return through

    def _take(self, shard: Shard, seq: Sequence, most: int | None) -> list[Arrived]:
        load = seq.load
        assert load is not None
        blocks = load.poll(most, least=COPY_BLOCKS)  # a call of the program takes as long for one
        if blocks:
            at = [seq.blocks[block.info.position // BLOCK] for block in blocks]
            contents = [jax.tree.unflatten(self._structure, block.arrays) for block in blocks]
            read = self._device.load([(shard.index, *each) for each in zip(at, contents, strict=True)])
            self._moving.append(_Moving(read, load, blocks))
            self._let_go(MOST_MOVING)
            self._advance(seq)
            shard.publish(seq)
        if not load.done:
            return []
        if load.failure:
            log.warning("stored KV could not be used and is computed again: %s", load.failure)
        self.stop(seq)
        waited = load.started - seq.submitted
        if not load.tokens:
            return []
        now = time.monotonic()
        return [Arrived(now - seq.submitted, waited + (load.hot_seconds or now - load.started), load.hot_bytes)]

    def _let_go(self, most: int) -> None:
        """Give back the memory of what the device has read; wait while it still reads more than `most`."""
        while self._moving and (len(self._moving) > most or all(part.is_ready() for part in self._moving[0].read)):
            moved = self._moving.popleft()
            jax.block_until_ready(moved.read)
            self.cache.promote(moved.load, moved.blocks)

    @staticmethod
    def _advance(seq: Sequence) -> None:
        """Count what is there without a gap."""
        assert seq.load is not None
        seq.prefilled = seq.before_load + seq.load.tokens
        seq.found = Counter(device=seq.before_load) + Counter(seq.load.by_tier)

    @staticmethod
    def stop(seq: Sequence) -> None:
        """End the load of `seq`, if it has one; what is there is kept."""
        if seq.load is not None:
            seq.load.close()
            seq.load = None
            seq.arranged = time.monotonic()
        if seq.phase is Phase.LOADING:
            seq.phase = Phase.PREFILL

    # ---- down

    def keep(self, shard: Shard, seq: Sequence, *, ended: bool = False) -> None:
        """Have the blocks copied down that `seq` has published since; at its end also the last one, partly filled, of a
        conversation. To be called before it gives its blocks back."""
        persist, looked_at = seq.keep != "nothing", 0
        while seq.kept < len(seq.keys) and (ended or looked_at < MOST_LOOKED_AT):
            info = self._info(seq, seq.kept)
            if self.cache.wanted(info, persist=persist):
                if not ended and self.cache.room < (len(self._waiting) + 1) * self.cache.layout.block_bytes:
                    return  # later
                self._add(shard, seq.blocks[seq.kept], info, persist)
            seq.kept += 1
            looked_at += 1
        if ended and seq.keep == "conversation" and seq.kv_length % BLOCK:
            tail = self._info(seq, seq.kv_length // BLOCK)
            if self.cache.wanted(tail):
                self._add(shard, seq.blocks[seq.kv_length // BLOCK], tail, persist=True)

    def _add(self, shard: Shard, block: int, info: BlockInfo, persist: bool) -> None:
        waiting = self._waiting.get(info.key)
        if waiting is not None:
            waiting.persist |= persist
            return
        shard.pool.retain([block])
        self._waiting[info.key] = _Waiting(shard, block, info, persist, time.monotonic())

    @staticmethod
    def _info(seq: Sequence, i: int) -> BlockInfo:
        """Block `i` of a sequence, which may be its last, partly filled one."""
        packed = pack_tokens(seq.tokens(i * BLOCK, min((i + 1) * BLOCK, seq.kv_length)))
        parent = seq.keys[i - 1] if i else seq.root
        key = seq.keys[i] if i < len(seq.keys) else packed_tail_key(parent, packed)
        return BlockInfo(key, parent, packed, i * BLOCK, seq.identity.space, seq.identity.model)

    def copy_down(self, *, now: bool = False) -> bool:
        """Start to copy the blocks that wait, if they are enough for a copy or have waited long; whether it did."""
        waiting = list(self._waiting.values())
        due = len(waiting) >= COPY_BLOCKS or (waiting and time.monotonic() - waiting[0].since > LONGEST_WAIT)
        if not waiting or not (now or due):
            return False
        self._waiting = {}
        for start in range(0, len(waiting), COPY_BLOCKS):
            part = waiting[start : start + COPY_BLOCKS]
            copy = _Copy(self._device.copy_out([(each.shard.index, each.block) for each in part]))
            for i, each in enumerate(part):
                at = each.shard.index * COPY_BLOCKS + i
                self.cache.offer(each.info, functools.partial(copy.arrays, at), persist=each.persist)
                each.shard.pool.release([each.block])
        return True

    def held(self, shard: Shard) -> list[int]:
        """Blocks of a shard that wait to be copied, once for each reference."""
        return [each.block for each in self._waiting.values() if each.shard is shard]

    def reset(self) -> None:
        """The device lost its blocks."""
        self._waiting = {}
        self._moving.clear()
