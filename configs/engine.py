"""Sizes of the engine: how many sequences run at once, how much context they have, how work is cut into steps."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .trunk import TrunkConfig

BLOCK = 128
"""Tokens of one KV block, and the span over which attention adds up at a time (letter P)."""

NULL_BLOCK = 0
"""The block that padding writes to. It never belongs to a sequence."""


MAX_DRAFT = 15
"""Drafted tokens of one sequence in a pass, at most (letter J): with the token before them half a query group
(kernels/attention). Wider passes have not paid on any machine measured."""

PASS_ROWS = 256
"""Rows of a pass on an accelerator, at most by default: its matrix units need about as long for them as the weights
take to arrive (240 rows of bfloat16 on a v5e, 560 on a v6e), and kernels/linear/tpu.py multiplies as many at once."""

MAX_TOP_LOGPROBS = 20
"""Most likely tokens that are reported beside the chosen one."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Choices that fix the compiled programs. All counts are per data shard of the mesh."""

    slots: int = 16
    """Sequences that run at once (letter B)."""
    context_length: int | None = None
    """Positions of a sequence, prompt and answer; None: the model's, at most 8,192."""
    kv_memory: float = 2.0
    """GiB of KV blocks, if `blocks` is not given; always enough for one full context, never more than four full
    contexts a slot."""
    blocks: int | None = None
    """KV blocks, the null block included."""
    kv: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """How keys and values are stored; auto: int8 with native kernels, else the type of unquantised weights."""
    logits: bool = False
    """Hand the logits of the last pass back to the host, which digests are made of."""
    features: bool = False
    """Hand the hidden states back that chose the tokens, which a shadow network is trained on."""
    embeddings: bool = False
    """Hand the sum of a prompt's hidden states back, which embeddings are made of."""
    prefill_chunk: int = 128
    """Prompt tokens of one step, beside one token of every running sequence."""
    decode_steps: int | None = None
    """Steps of one device loop while no prompt waits; more than 1 streams in bursts of that many tokens. None: 8 on a
    TPU, where the host would otherwise be slower than a step, and 1 on a CPU."""
    draft_rows: int | None = None
    """Drafted tokens of one pass, of all sequences together; 0: nothing is ever drafted. None: 16 on a CPU, where rows
    cost arithmetic, and elsewhere 7 a slot, up to passes of `PASS_ROWS` rows."""
    draft_length: int | None = None
    """Draft exactly this many tokens where there are as many, instead of as many as pay (for comparisons)."""
    hot_window: Literal["auto", "off"] = "auto"
    """Whether the device loop keeps blocks of KV on the chip (kernels/attention/tpu_hot.py); auto: on TPUs, where the
    compiler does keep them there."""
    max_queue: int = 256
    """Requests that may wait for a slot; one more is refused."""
    tile: int = 8
    """Rows of one product in decode steps on the plain CPU path (kernels/tiles.py)."""
    prefill_tile: int = 32
    """Rows of one product in steps with prompt tokens."""

    def __post_init__(self) -> None:
        for field in ("slots", "prefill_chunk", "decode_steps", "max_queue"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if self.draft_rows is not None and self.draft_rows < 0:
            raise ValueError(f"draft_rows must be 0 (no drafting) or positive, got {self.draft_rows}")
        if self.draft_length is not None and not 1 <= self.draft_length <= MAX_DRAFT:
            raise ValueError(f"draft_length must be between 1 and {MAX_DRAFT}, got {self.draft_length}")
        for field in ("tile", "prefill_tile"):
            if not 2 <= getattr(self, field) <= 32:  # in this range XLA:CPU rounds alike (tests/kernels/test_tiles.py)
                raise ValueError(f"{field} must be between 2 and 32 rows, got {getattr(self, field)}")
        if self.kv not in ("auto", "float32", "bfloat16", "int8"):
            raise ValueError(f"kv {self.kv!r} is not supported; supported: auto, float32, bfloat16, int8")
        if self.hot_window not in ("auto", "off"):
            raise ValueError(f"hot_window {self.hot_window!r} is not supported; supported: auto, off")
        if self.context_length is not None and self.context_length < 2:
            raise ValueError(f"context_length must be at least 2, got {self.context_length}")
        if self.blocks is None and not self.kv_memory > 0:
            raise ValueError(f"kv_memory must be positive, got {self.kv_memory}")

    def passes(self, platform: str) -> int:
        """`decode_steps` on this platform."""
        return self.decode_steps if self.decode_steps is not None else 8 if platform == "tpu" else 1

    def drafted_rows(self, platform: str) -> int:
        """`draft_rows` on this platform."""
        most = MAX_DRAFT * self.slots
        if self.draft_rows is not None:
            return min(most, self.draft_rows)
        return min(most, 16 if platform == "cpu" else min(7 * self.slots, max(0, PASS_ROWS - self.slots)))

    def context(self, trunk: TrunkConfig) -> int:
        """Positions of a sequence; a `ValueError` when more is asked for than the trunk was made for."""
        if self.context_length is None:
            return min(trunk.context_length, 8192)
        if self.context_length > trunk.context_length:
            raise ValueError(
                f"context_length {self.context_length} is more than the {trunk.context_length} positions "
                f"of {trunk.name}"
            )
        return self.context_length

    def table_width(self, trunk: TrunkConfig) -> int:
        """Entries of a block table: blocks of one full context."""
        return -(-self.context(trunk) // BLOCK)

    def pool_blocks(self, trunk: TrunkConfig, kv_bytes: int) -> int:
        """KV blocks of the pool, at `kv_bytes` a token; a `ValueError` when not even one full context would fit."""
        per_block = kv_bytes * BLOCK
        needed = self.table_width(trunk) + 1
        if self.blocks is None:
            most = 4 * self.slots * self.table_width(trunk) + 1
            return max(needed, min(most, int(self.kv_memory * 2**30 // per_block)))
        if self.blocks < needed:
            raise ValueError(
                f"{self.blocks} KV blocks ({self.blocks * per_block / 2**30:.2f} GiB) cannot hold one context of "
                f"{self.context(trunk)} tokens; {needed} blocks ({needed * per_block / 2**30:.2f} GiB) can"
            )
        return self.blocks
