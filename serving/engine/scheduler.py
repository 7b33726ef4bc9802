"""Who runs in the next step: slots, blocks and the order of work of one data shard. Host code, no JAX.

Order of service: running answers first (one token each), then prompts in the order they were admitted (as many tokens
as fit the chunk), then paused sequences, then the waiting queue. A sequence that needs a block when none is free pauses
the one admitted last, and a long answer makes way for somebody who waits when no slot has become free for a while; KV
is copied out, never recomputed.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Iterable

import numpy as np

from ...cache.context import LEAST_PART
from ...cache.keys import block_key
from ...cache.pool import BlockPool
from ...configs.engine import BLOCK
from ...kernels.attention import GROUP
from .sequence import Phase, Sequence, blocks_for
from .state import StepInput

Layers = tuple[int, ...] | None
"""The layers that a step runs; None: all."""


MAKE_WAY_AFTER = 0.5
"""Seconds without a free slot after which a long answer makes way, one at a time: it goes on when there is one."""

LONG = 16
"""Tokens that an answer has had before it may have to make way."""

PRIORITY_SECONDS = 15.0
"""A step of priority is worth so many seconds of waiting, so nobody waits for ever."""


class Turns:
    """In which order those who wait are admitted: the principals in turn, by start-time fair queueing (Goyal, Vin and
    Cheng 1996) with the clock on the wall. A request begins, for the order, when the principal's one before it would
    have been served had it been alone: who sends many at once waits behind who sends few, and in the order sent."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], float] = {}

    def turn(self, principal: str, priority: int, now: float, seconds: float) -> float:
        """The place of a request that arrives `now`, when requests are served one every so many `seconds`."""
        who = (principal, priority)
        begin = max(now, self._next.get(who, now))
        if len(self._next) > 1000:
            self._next = {key: at for key, at in self._next.items() if at > now}
        self._next[who] = begin + seconds
        return begin - PRIORITY_SECONDS * priority

    @staticmethod
    def first(waiting: Iterable[Sequence], now: float) -> Sequence:
        """Who is admitted next: of the principal whose turn it is, whoever has waited longest for what it asks for
        (highest response ratio next, Brinch Hansen 1971). So a short answer does not wait behind many long ones, and
        those of one size are served in the order sent. It takes the turn of the one that it passes."""
        due = min(waiting, key=lambda seq: seq.turn)
        first = max((seq for seq in waiting if seq.flow == due.flow), key=lambda seq: (now - seq.submitted) / seq.size)
        due.turn, first.turn = first.turn, due.turn
        return first


@dataclasses.dataclass
class Plan:
    """One step of one shard."""

    decode: list[Sequence] = dataclasses.field(default_factory=list)
    chunks: list[tuple[Sequence, int, int]] = dataclasses.field(default_factory=list)  # sequence, first, tokens

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Shard:
    """Slots and blocks of one data shard, and the sequences that hold them."""

    def __init__(self, index: int, slots: int, blocks: int) -> None:
        self.index = index
        self.slots = slots
        self.pool = BlockPool(blocks, BLOCK)
        self.free_slots = list(range(slots))
        self.running: list[Sequence] = []  # in order of admission
        self.paused: deque[Sequence] = deque()

    # ---- slots and blocks

    def enter(self, seq: Sequence, phase: Phase) -> None:
        """Give `seq` the lowest free slot (low slots keep steps small)."""
        seq.slot, seq.shard, seq.phase = heapq.heappop(self.free_slots), self.index, phase
        self.running.append(seq)

    def leave(self, seq: Sequence) -> None:
        """Take slot and blocks away. The last block, partly filled, can be found by prompts that go on alike."""
        at, n = divmod(seq.kv_length, BLOCK)
        if n >= LEAST_PART and at == len(seq.keys):
            tail = seq.tokens(at * BLOCK, seq.kv_length)
            self.pool.publish_tail(seq.blocks[at], tail, seq.keys[-1] if seq.keys else None, seq.root)
        self.pool.release(seq.blocks)
        seq.blocks = []
        heapq.heappush(self.free_slots, seq.slot)
        seq.slot = -1
        self.running.remove(seq)

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        """Make `seq` own blocks for `tokens` positions; False, and nothing changes, when there are not enough."""
        missing = blocks_for(tokens) - len(seq.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        seq.blocks += blocks
        return True

    def admit(self, seq: Sequence) -> bool:
        """Start the prompt of a waiting sequence, if a slot and blocks for all of it are free."""
        # The last prompt token is always computed, since its logits are needed.
        whole = 0 if seq.params.embed else (len(seq.prompt) - 1) // BLOCK * BLOCK
        if not self._take(seq, seq.prompt[:whole], len(seq.prompt) + 1):
            return False
        seq.prefilled = seq.found["device"] = len(seq.keys) * BLOCK
        self.pool.use(seq.blocks[: len(seq.keys)])
        if not seq.params.embed:
            seq.part = self._part(seq)
        self.enter(seq, Phase.PREFILL)
        return True

    def _part(self, seq: Sequence) -> tuple[int, int] | None:
        """A block that begins like the next one of the prompt, one reference taken, and how far: worth copying."""
        rest = seq.prompt[seq.prefilled : min(seq.prefilled + BLOCK, len(seq.prompt) - 1)]
        found = self.pool.match_part(seq.keys[-1] if seq.keys else seq.root, rest)
        if found is None or found[1] >= LEAST_PART:
            return found
        self.pool.release([found[0]])
        return None

    def restore(self, seq: Sequence) -> bool:
        """Give a paused sequence a slot and blocks again, if there are enough. Blocks past those of `seq.keys` are
        new: their contents must be loaded."""
        whole = seq.kv_length // BLOCK * BLOCK
        if not self._take(seq, seq.tokens(0, whole), seq.position + 2):
            return False
        self.enter(seq, seq.resume_as)
        return True

    def _take(self, seq: Sequence, known: np.ndarray, tokens: int) -> bool:
        """Blocks for `tokens` positions, those found for the tokens `known` first; all or nothing. One block for each
        running sequence stays free, so that the next step does not pause this one again."""
        if not self.free_slots:
            return False
        matched = list(self.pool.match(seq.root, known))
        missing = blocks_for(tokens) - len(matched)
        spare = len(self.running) if missing else 0
        blocks = self.pool.allocate(missing) if missing + spare <= self.pool.available else None
        if blocks is None:
            self.pool.release(matched)
            return False
        seq.blocks = matched + blocks
        seq.keys = _chain(seq.root, known[: len(matched) * BLOCK])
        return True

    def known_tokens(self, seq: Sequence) -> int:
        """Prompt tokens whose KV this shard has."""
        if seq.params.embed:
            return 0
        matched = self.pool.match(seq.root, seq.prompt[: (len(seq.prompt) - 1) // BLOCK * BLOCK])
        self.pool.release(matched)
        return len(matched) * BLOCK

    def victim(self) -> Sequence:
        """The running sequence to pause: the one admitted last."""
        return self.running[-1]

    def longer(self, waiting: Sequence) -> Sequence | None:
        """The running answer that can make way for one that waits: the longest, if it is `LONG` and has had more than
        that one asks for, and nobody is paused already."""
        if self.free_slots or self.paused:
            return None
        least = max(LONG, waiting.size)
        long = (seq for seq in self.running if seq.phase is Phase.DECODE and len(seq.generated) >= least)
        return max(long, key=lambda seq: len(seq.generated), default=None)

    # ---- published blocks

    def publish(self, seq: Sequence) -> None:
        """Make the blocks that `seq` has filled findable by others. A block is full once its KV is certain."""
        for i in range(len(seq.keys), seq.kv_length // BLOCK):
            parent = seq.keys[-1] if seq.keys else seq.root
            tokens = seq.tokens(i * BLOCK, (i + 1) * BLOCK)
            key = block_key(parent, tokens)
            self.pool.publish(seq.blocks[i], key, tokens, parent if i else None, seq.root)
            seq.keys.append(key)

    def skip_known(self, seq: Sequence) -> None:
        """Use blocks that others have published since `seq` was admitted, instead of computing them again."""
        while not seq.params.embed and seq.prefilled % BLOCK == 0 and seq.prefilled + BLOCK < len(seq.prompt):
            i = seq.prefilled // BLOCK
            tokens = seq.prompt[seq.prefilled : seq.prefilled + BLOCK]
            key = block_key(seq.keys[-1] if seq.keys else seq.root, tokens)
            found = self.pool.lookup(key, tokens)
            if found is None:
                return
            self.pool.release([seq.blocks[i]])
            seq.blocks[i] = found
            seq.keys.append(key)
            seq.prefilled += BLOCK
            seq.found["device"] += BLOCK
            self.pool.use([found])

    # ---- the next step

    def plan_chunks(self, budget: int, layers: Layers) -> list[tuple[Sequence, int, int]]:
        """Prompt tokens of the next step over `layers`, at most `budget`."""
        chunks = []
        for seq in self.running:
            if seq.phase is not Phase.PREFILL or seq.params.layers != layers or budget <= 0:
                continue
            self.skip_known(seq)
            count = min(budget, len(seq.prompt) - seq.prefilled)
            chunks.append((seq, seq.prefilled, count))
            budget -= count
        return chunks

    def fill(self, plan: Plan, inputs: StepInput, tokens: int, groups: int) -> None:
        """Write the shard's part of the step's input: `tokens` and `groups` are its prompt sizes per shard."""
        t0, g0, b0 = self.index * tokens, self.index * groups, self.index * self.slots
        t = g = 0
        for seq in plan.decode:
            inputs.decodes[b0 + seq.slot] = True
        for seq, first, count in plan.chunks:
            at = slice(t0 + t, t0 + t + count)
            inputs.ids[at] = seq.prompt[first : first + count]
            inputs.slots[at] = seq.slot
            inputs.positions[at] = np.arange(first, first + count)
            for start in range(0, count, GROUP):
                inputs.starts[g0 + g], inputs.counts[g0 + g] = t + start, min(GROUP, count - start)
                g += 1
            t += count
            if first + count == len(seq.prompt):
                inputs.last[b0 + seq.slot] = t - 1
        for seq in [*plan.decode, *(chunk[0] for chunk in plan.chunks)]:
            inputs.tables[b0 + seq.slot, : len(seq.blocks)] = seq.blocks
            inputs.capacity[b0 + seq.slot] = len(seq.blocks) * BLOCK
        inputs.sizes[self.index] = t, g

    def dispatched(self, plan: Plan, passes: int) -> list[Sequence]:
        """Account for a dispatched step; the sequences that may have chosen a token in it."""
        choosing = list(plan.decode)
        for seq in plan.decode:
            seq.in_flight += passes
        for seq, _, count in plan.chunks:
            seq.prefilled += count
            self.publish(seq)
            if seq.prefilled == len(seq.prompt):
                seq.phase = Phase.DECODE
                seq.in_flight += 1
                choosing.append(seq)
        return choosing


def _chain(root: bytes, tokens: np.ndarray) -> list[bytes]:
    """Keys of the full blocks that hold `tokens`."""
    keys: list[bytes] = []
    for start in range(0, len(tokens), BLOCK):
        keys.append(block_key(keys[-1] if keys else root, tokens[start : start + BLOCK]))
    return keys
