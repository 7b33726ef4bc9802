"""Single passes of an engine's compiled programs, over one sequence, while the engine has no requests.

A pass of W tokens is what verifies W - 1 drafted ones: W consecutive tokens of one sequence, causal among themselves,
with logits and a choice at every one. A prompt chunk is the same computation, so its program is used where the engine
has none for drafts. Every row of logits chooses for a slot of its own, which is why the engine must have W slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ....configs.trunk import LOCAL
from ....kernels.attention import GROUP

if TYPE_CHECKING:
    from ....serving.engine import Engine


class Steps:
    """The sequence is at slot 0 of the first data shard and owns the first blocks of the pool."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device = engine, engine.device
        kinds = [program.kind for program in engine.programs]
        self.wide = "verify" if "verify" in kinds else "prefill"
        self.widest = engine.config.slots
        self.chunk = engine.config.prefill_chunk

    def run(self, ids: Sequence[int], start: int, *, choose: int, kind: str | None = None) -> tuple[Any, Any]:
        """Dispatch a pass of the tokens `ids` at positions `start` and after. Logits are taken at the last `choose`
        tokens. Gives the step's result and its logits `[slots, V]` in that order, not yet ready."""
        kind = kind or self.wide
        n = len(ids)
        inputs = self.device.new_input(kind != "decode")
        inputs.ids[:n] = ids
        inputs.positions[:n] = np.arange(start, start + n)
        groups = range(0, n, GROUP)
        inputs.starts[: len(groups)] = groups
        inputs.counts[: len(groups)] = [min(GROUP, n - first) for first in groups]
        inputs.sample_at[:choose] = np.arange(n - choose, n)
        inputs.tables[0] = 1 + np.arange(inputs.tables.shape[1])
        inputs.sizes[0] = n, len(groups), choose
        return self.device.run(kind, inputs)

    def fill(self, ids: Sequence[int], start: int = 0) -> None:
        """Compute and keep the KV of `ids` from position `start` on."""
        for first in range(0, len(ids), self.chunk):
            result, _ = self.run(ids[first : first + self.chunk], start + first, choose=0, kind="prefill")
        jax.block_until_ready(result)

    def seconds(self, ids: Sequence[int], start: int, kind: str | None = None) -> float:
        """The time of a pass from its dispatch until the host has its tokens."""
        began = time.perf_counter()
        result, _ = self.run(ids, start, choose=len(ids), kind=kind)
        np.asarray(result.tokens)
        return time.perf_counter() - began

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Logits `[len(ids), V]` after each of the tokens, at most `widest` of them."""
        _, kept = self.run(ids, start, choose=len(ids))
        return np.asarray(kept.logits)[: len(ids)]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of keys and values that a pass reads at a context of `tokens`: local layers see their window."""
        config = self.engine.model.config
        one_layer = self.device.kv.bytes_per_token(1, config.n_kv_heads, config.head_dim)
        seen = (min(tokens, config.sliding_window or tokens) if t == LOCAL else tokens for t in config.layer_types)
        return one_layer * sum(seen)
