"""Single passes of an engine's compiled programs, over one sequence, while the engine has no requests.

A pass of W tokens is what verifies W - 1 drafted ones: W consecutive tokens of one sequence, causal among themselves,
with logits and a choice at every one. A slot holds `SLOT` of them at most; wider passes go on in further slots with the
same block table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ....configs.engine import BLOCK, MAX_DRAFT
from ....configs.trunk import LOCAL
from ....kernels.attention import GROUP
from ....serving.engine.programs import cost_entries

if TYPE_CHECKING:
    from ....serving.engine import Engine
    from ....serving.engine.state import SlotState, StepInput

SLOT = 1 + MAX_DRAFT
"""Tokens of one slot in a pass."""
TIMED = 4
"""Passes that are timed together, one after the other without waiting for results, as the engine runs them."""


class Steps:
    """The sequence is at the first slots of the first data shard and owns the first blocks of the pool."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device = engine, engine.device
        self.widest = min(self.device.rows, SLOT * engine.config.slots) if self.device.drafts else 1
        self.chunk = engine.config.prefill_chunk
        if self.device.drafts:  # what a pass costs is to be seen, not to be weighed: no token is left out of one
            self.device.set_cost(np.ones(cost_entries(self.device.rows)))

    def run(self, ids: Sequence[int], start: int) -> tuple[Any, Any]:
        """Dispatch a pass of the tokens `ids` at positions `start` and after, all of which choose. Gives the step's
        result and what it chose from, row by row, not yet ready."""
        rows, inputs = self._prepare(ids, start)
        self.device.put_slots(rows)
        return self.device.run("decode", inputs)

    def fill(self, ids: Sequence[int], start: int = 0) -> None:
        """Compute and keep the KV of `ids` from position `start` on."""
        for first in range(0, len(ids), self.chunk):
            part = ids[first : first + self.chunk]
            n, inputs = len(part), self._inputs(prefill=True, slots=1)
            inputs.ids[:n] = part
            inputs.positions[:n] = np.arange(start + first, start + first + n)
            groups = range(0, n, GROUP)
            inputs.starts[: len(groups)] = groups
            inputs.counts[: len(groups)] = [min(GROUP, n - at) for at in groups]
            inputs.sizes[0] = n, len(groups)
            result, _ = self.device.run("prefill", inputs)
        jax.block_until_ready(result)

    def seconds(self, ids: Sequence[int], start: int) -> float:
        """The time of a pass among others: of `TIMED` in all, until the host has the tokens of the last one."""
        rows, inputs = self._prepare(ids, start)
        copies = [self.device.placed(rows) for _ in range(TIMED)]
        self.run(ids, start)[0].tokens.block_until_ready()  # the machine is awake, and the weights where they will be
        began = time.perf_counter()
        for copy in copies:
            self.device.take_slots(copy)
            result, _ = self.device.run("decode", inputs)
        np.asarray(result.tokens)
        return (time.perf_counter() - began) / TIMED

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Logits `[len(ids), V]` after each of the tokens, at most `widest` of them."""
        _, kept = self.run(ids, start)
        return np.asarray(kept.logits)[: len(ids)]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of keys and values that a pass reads at a context of `tokens`: local layers see their window."""
        config = self.engine.model.config
        one_layer = self.device.kv.bytes_per_token(1, config.n_kv_heads, config.head_dim)
        seen = (min(tokens, config.sliding_window or tokens) if t == LOCAL else tokens for t in config.layer_types)
        return one_layer * sum(seen)

    def _prepare(self, ids: Sequence[int], start: int) -> tuple[SlotState, StepInput]:
        """The tokens in slots: each has one as its last token, and the next ones as drafts that are certain."""
        if len(ids) > self.widest:
            raise ValueError(f"a pass has at most {self.widest} tokens here, got {len(ids)}")
        rows = self.device.empty_rows(self.device.data * self.engine.config.slots)
        parts = [ids[first : first + SLOT] for first in range(0, len(ids), SLOT)]
        inputs = self._inputs(prefill=False, slots=len(parts))
        for slot, part in enumerate(parts):
            drafts = len(part) - 1
            rows.active[slot], rows.limit[slot] = True, self.engine.context_length - 1
            rows.token[slot], rows.position[slot] = part[0], start + slot * SLOT
            rows.drafts[slot, :drafts], rows.draft_odds[slot, :drafts] = part[1:], 1.0
            rows.n_drafts[slot] = drafts
            rows.repetition[slot] = 1.0  # the most likely token as the model has it
            inputs.decodes[slot] = True
        return rows, inputs

    def _inputs(self, *, prefill: bool, slots: int) -> StepInput:
        inputs = self.device.new_input(prefill)
        inputs.tables[:slots] = 1 + np.arange(inputs.tables.shape[1])
        inputs.capacity[:slots] = BLOCK * inputs.tables.shape[1]
        return inputs
