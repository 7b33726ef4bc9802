"""What to assume for loops, branches and kernels whose work depends on data, and the least a program could move.

Both assume the same load, a full engine: every slot decodes, with `tokens` tokens in its KV cache; its pass takes the
last token and perhaps drafted ones behind it, which were drafted before. Programs that draft then draft for every slot
as many tokens as a shadow can. A prefill step also carries a full prompt chunk of one more sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from ...configs.engine import BLOCK, EngineConfig
from ...configs.trunk import LOCAL, TrunkConfig
from ...kernels.attention import GROUP, KVFormat, reference, tpu, tpu_sizes
from ...kernels.draft import SHADOW_PLACES
from ...kernels.draft.reference import NOISE
from ...model.params import param_specs
from ...serving.engine.drafting import Drafter
from ...serving.engine.programs import COPY_BLOCKS, Program
from .traffic import Assume, KernelWork

Sampling = Literal["greedy", "temperature", "top-p"]

_GREEDY = "no slot asks for more than the most likely token"
_SAMPLED = "every slot samples at a temperature"

STEPS = ("prefill", "decode", "decode_n")
"""Kinds of programs that run the trunk."""


@dataclasses.dataclass(frozen=True)
class Load:
    """The load that figures are worked out for."""

    config: TrunkConfig
    engine: EngineConfig
    kv: KVFormat
    tokens: int
    """Tokens in the KV cache of every sequence after the step's were written."""
    new_tokens: int = 1
    """Tokens of every decoding sequence in one pass: more than one where drafts are verified."""
    sampling: Sampling = "greedy"
    drafts: bool = True
    """Whether programs that can draft do so."""

    @property
    def windows(self) -> list[int]:
        """Tokens a query may see, layer by layer; 0: all."""
        return [self.config.sliding_window or 0 if kind == LOCAL else 0 for kind in self.config.layer_types]

    @property
    def seen(self) -> list[int]:
        """KV tokens a query reads, layer by layer."""
        return [min(self.tokens, window) if window else self.tokens for window in self.windows]

    @property
    def spans(self) -> float:
        """Spans of one block that attention walks in a layer, on average over the layers."""
        return sum(math.ceil(n / BLOCK) for n in self.seen) / self.config.n_layers

    def chunk(self, program: Program) -> int:
        """Prompt tokens of one more sequence that the step carries."""
        return self.engine.prefill_chunk if program.kind == "prefill" else 0

    def drafted(self, program: Program) -> int:
        """Tokens that one pass drafts for every sequence: all that the shadow can."""
        return SHADOW_PLACES if self.drafts and drafter(program) is not None else 0

    def lengths(self, program: Program) -> tuple[list[int], list[int]]:
        """Tokens in the cache and tokens of this step, sequence by sequence."""
        chunk = self.chunk(program)
        new = [self.new_tokens] * self.engine.slots + [chunk] * bool(chunk)
        return [self.tokens] * len(new), new

    def groups(self, program: Program) -> int:
        """Query groups of a step: those of the decoding sequences, and of the prompt chunk."""
        return sum(math.ceil(new / GROUP) for new in self.lengths(program)[1])

    def tiles(self, program: Program) -> float:
        """Tiles of query tokens of a group in plain JAX, on average."""
        tiles = sum(math.ceil(new / reference.TILE) for new in self.lengths(program)[1])
        return tiles / self.groups(program)

    def assume(self, program: Program, mesh: Mesh, chip: str) -> Assume:
        loops, branches = self._loops(program), self._branches(program)
        kernels = {tpu.NAME: self.attention(program, mesh, chip)}
        return Assume(
            loop=lambda source, op_name: loops.get(NOISE if f"/{NOISE}/" in op_name else source),
            branch=lambda source, op_name: branches.get(source),
            kernel=kernels.get,
        )

    def _loops(self, program: Program) -> dict[str, tuple[float, str]]:
        """Iterations by the place in the source."""
        drafted = self.drafted(program)
        written = sum(self.lengths(program)[1]) if program.kind in STEPS else 0
        return {
            "trunk.py:Trunk.__call__": (self.config.n_layers, "all layers run"),
            "reference.py:write_kv": (written, "all slots are taken"),
            "reference.py:attention": (self.groups(program), "all slots are taken"),
            "reference.py:attend": (self.groups(program), "all slots are taken"),
            "reference.py:_attend_tiles": (self.tiles(program), "all slots are taken"),
            "reference.py:_largest_key": (31, "a binary search over 31 bits takes its longest"),
            "reference.py:_attend_group": (self.spans, f"{self.tokens} tokens are in the KV cache of every sequence"),
            "tpu.py:once": (1, "every slot seeks a match for every token, and asks the shadow"),
            NOISE: (int(self.sampling != "greedy"), _GREEDY if self.sampling == "greedy" else _SAMPLED),
            "reference.py:draft": (drafted, f"{drafted} tokens are drafted for every slot"),
        }

    def _branches(self, program: Program) -> dict[str, tuple[int, str]]:
        """The branch (0: false) taken by what asks how slots choose, and where drafts come from."""
        some = self.new_tokens > 1
        drafts = self.drafted(program) > 0
        sampled = self.sampling != "greedy"
        filtered = self.sampling == "top-p"
        known = {
            "step.py:_choose": (sampled, _SAMPLED if sampled else _GREEDY),
            "step.py:_relaxed": (False, "no slot takes other tokens than the exact ones"),
            "reference.py:_conclude": (False, "no slot thinks"),
            "reference.py:_drafted": (some, "every slot has drafts" if some else "no slot has drafts yet"),
            "reference.py:_drafted.<locals>.<lambda>": (False, "the gate says how many drafts are tried"),
            "drafting.py:draft_next": (drafts, "every slot drafts" if drafts else "no slot drafts"),
            "drafting.py:_with_conclusion": (False, "no slot thinks"),
            "reference.py:_slots": (True, "every slot may use the shadow"),
            "reference.py:_extend": (True, "every slot seeks a match for every token, and asks the shadow"),
            "reference.py:_guess": (sampled, _SAMPLED if sampled else _GREEDY),
        }
        if sampled:
            known |= {
                "reference.py:row": (True, "all slots are taken"),
                "reference.py:choose_rows.<locals>.row": (True, "all slots are taken"),
                "reference.py:choose": (False, f"{_SAMPLED}, none wants log-probabilities"),
                "reference.py:_with_penalties": (False, "no slot has penalties"),
                "reference.py:_with_bias": (False, "no slot has a bias"),
                "reference.py:_top_k_threshold": (False, "no slot has top-k"),
                "reference.py:_noisy_scores": (filtered, "every slot has top-p" if filtered else "no slot has top-p"),
                "reference.py:_top_p_and_min_p": (filtered, "every slot has top-p"),
            }
        return {source: (int(taken), why) for source, (taken, why) in known.items()}

    def attention(self, program: Program, mesh: Mesh, chip: str) -> KernelWork | None:
        """What one call of the attention kernel does on one chip, on average over the layers."""
        if program.kind not in STEPS:
            return None
        model, c = mesh.shape["model"], self.config
        lengths, new = self.lengths(program)
        moved = {
            window: tpu.pool_bytes(
                c.n_kv_heads // model, c.head_dim, self.kv.dtype, lengths, new,
                n_heads=c.n_heads // model, tokens=program.width, rows=self.engine.slots,
                width=self.engine.table_width(c), window=window, on=tpu_sizes.CHIPS.get(chip, tpu_sizes.UNKNOWN),
                staged=program.hot[0].shape[0] // self.engine.slots if program.hot else 0,
            )
            for window in set(self.windows)
        }  # fmt: skip
        return KernelWork(
            bytes=sum(moved[window] for window in self.windows) / c.n_layers,
            flops=4.0 * sum(new) * self.spans * BLOCK * c.n_heads * c.head_dim / model,
            why=f"{self.tokens} tokens in every KV cache",
        )

    def min_bytes(self, program: Program, mesh: Mesh) -> float:
        """Bytes one chip cannot avoid to move: every shard of a weight once a pass, the KV that is attended to, the KV
        that is written, and what drafting reads. Whoever keeps some of that on the chip from pass to pass moves less.

        Of an embedding that is not also the output head only the rows of the step's tokens count. `admit` and the
        copies of blocks read and write what they are named for once.
        """
        c = self.config
        per_token = self.kv.bytes_per_token(1, c.n_kv_heads, c.head_dim) / mesh.shape["model"]
        if program.kind in ("save", "load", "copy"):
            return 2.0 * (1 if program.kind == "copy" else COPY_BLOCKS) * BLOCK * c.n_layers * per_token
        if program.kind == "admit":
            row = program.args[2]
            return 2.0 * sum(math.prod(a.shape) * a.dtype.itemsize for a in row) / mesh.shape["data"]
        lengths, new = self.lengths(program)
        kv = (len(lengths) * sum(self.seen) + c.n_layers * sum(new)) * per_token
        weights = weight_bytes(c, program.args[0].params, sum(new))
        return (weights + kv + self.min_draft_bytes(program)) * passes(self.engine, program)

    def min_draft_bytes(self, program: Program) -> float:
        """Bytes that drafting cannot avoid to read in a pass: its tables once, of the table of all tokens the rows of
        those that chains go over, and the tokens of every sequence, in which it looks up what followed."""
        if not self.drafted(program):
            return 0.0
        weights = drafter(program).weights  # type: ignore[union-attr]
        tables = sum(_shard_bytes(leaf) for leaf in weights)
        by_token = _shard_bytes(weights.read) + _shard_bytes(weights.read_scale)
        rows = self.engine.slots * self.drafted(program)
        read = min(by_token, rows * by_token / weights.read.shape[0])
        return tables - by_token + read + self.engine.slots * self.tokens * 4

    def tokens_per_run(self, program: Program, mesh: Mesh) -> int | None:
        """Tokens all chips together get on with in one run: prompt tokens for prefill, answer tokens for decode, when
        every draft in the pass is accepted."""
        if program.kind == "prefill":
            return self.chunk(program) * mesh.shape["data"]
        if program.kind in ("decode", "decode_n"):
            return self.engine.slots * self.new_tokens * passes(self.engine, program) * mesh.shape["data"]
        return None


def drafter(program: Program) -> Drafter | None:
    """The drafter of a program's arguments; None where it cannot draft."""
    return program.args[0].drafter if program.kind in STEPS else None


def weight_bytes(config: TrunkConfig, params: Mapping[str, Any], width: int) -> float:
    """Bytes of one chip's shards of all weights, without padding; of a mere embedding the rows of `width` tokens."""
    total = 0.0
    for path, value in params.items():
        size = sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(value))
        if path == "embed" and not config.tied_embeddings:
            size = min(size, width * size / param_specs(config)["embed"].shape[0])
        total += size
    return total


def _shard_bytes(leaf: Any) -> float:
    bits = 4 if leaf.dtype.name in ("int4", "uint4") else 8 * leaf.dtype.itemsize
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits / 8


def passes(engine: EngineConfig, program: Program) -> int:
    """Trunk passes of one run of the program."""
    return engine.passes("tpu") if program.kind == "decode_n" else 1
