"""Which programs a report compiles, for which load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...configs.engine import BLOCK, EngineConfig
from ...configs.shadow import ShadowConfig, TrainingConfig
from ...configs.trunk import TrunkConfig
from ...kernels.attention import KVFormat
from ...kernels.backend import Kernels
from ...kernels.draft import SHADOW_PLACES, DraftWeights
from ...model.params import WeightFormat, abstract_params
from ...serving.engine.programs import Program, kv_format, programs
from .assume import Load, Sampling, drafter
from .report import Case, Job

ROOFLINE_SEQUENCES = (1, 8, 32, 128)
ROOFLINE_NEW_TOKENS = (1, 5)
"""Plain decoding, and verifying four drafted tokens beside the last accepted one."""

_VECTORS = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Target:
    """What is compiled, apart from how many sequences it serves."""

    config: TrunkConfig
    mesh: Mesh
    kernels: Kernels
    quant: str  # none, int8 or int4
    kv: str  # of `EngineConfig.kv`
    context: int
    sampling: Sampling
    decode_steps: int | None
    drafts: bool = True
    """Whether engines draft, with a shadow of the size that this trunk allows."""

    def engine(self, slots: int, **more: Any) -> EngineConfig:
        """An engine for `slots` sequences of the target's context: longer than the default where it must be."""
        how: dict[str, Any] = dict(slots=slots, kv=self.kv, decode_steps=self.decode_steps, embeddings=True)
        default = EngineConfig(**how | ({} if self.drafts else {"draft_rows": 0}) | more)
        if self.context <= default.context(self.config):
            return default
        length = math.ceil((self.context + 1) / BLOCK) * BLOCK
        longer = dataclasses.replace(default, context_length=min(length, self.config.context_length))
        # Memory for what is assumed to be in the cache: whether it fits is part of the answer.
        return dataclasses.replace(longer, blocks=1 + (slots + 1) * longer.table_width(self.config))

    def params(self) -> dict[str, Any]:
        layout = "tpu" if self.kernels.linear == "tpu" else "plain"
        if self.quant == "none":
            return abstract_params(self.config, WeightFormat("bfloat16", _VECTORS, layout), self.mesh)
        return abstract_params(self.config, WeightFormat(self.quant, "float32", layout), self.mesh)

    @property
    def shadow(self) -> ShadowConfig:
        """The sizes of the trunk's shadow."""
        return ShadowConfig.for_trunk(self.config, (0.0, *TrainingConfig().temperatures))

    def kv_format(self, engine: EngineConfig) -> KVFormat:
        return kv_format(engine, self.kernels, "tpu")

    def programs(self, engine: EngineConfig) -> list[Program]:
        return programs(
            self.config, engine, self.mesh,
            params=self.params(), kernels=self.kernels, kv=self.kv_format(engine),
            shadow=draft_weights(self.shadow, self.config.vocab_size) if self.drafts else None,
        )  # fmt: skip

    def load(self, engine: EngineConfig, new_tokens: int = 1) -> Load:
        return Load(self.config, engine, self.kv_format(engine), self.context, new_tokens, self.sampling)

    def job(self, program: Program, engine: EngineConfig) -> Job:
        """A program and what is worked out for it: of a pass that can draft also what drafting costs, and what it costs
        when all of the rows for drafts are in use."""
        cases = [Case(program.kind, self.load(engine))]
        if program.kind == "decode" and drafter(program) is not None:
            cases.append(Case("verify", self.load(engine, program.width // engine.slots)))
            cases.append(Case("draft", self.load(engine)))
        return Job(program, tuple(cases))


def draft_weights(shadow: ShadowConfig, vocab_size: int) -> DraftWeights:
    """The abstract drafting form of a shadow (model/shadow.py: drafting)."""

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    r, Z = shadow.rank, shadow.vocab
    trained = {name: of(np.float32, *shape) for name, shape in shadow.shapes.items() if name in DraftWeights._fields}
    return DraftWeights(
        **trained, epsilon=of(np.float32), gate_temperatures=of(np.float32, len(shadow.temperatures)),
        read=of(np.int8, vocab_size, r), read_scale=of(np.float32, vocab_size),
        head=of(np.int8, Z, r), head_scale=of(np.float32, Z), vocab=of(np.int32, Z),
    )  # fmt: skip


def engine_jobs(target: Target, slots: int) -> list[Job]:
    """Every program of an engine."""
    engine = target.engine(slots)
    return [target.job(program, engine) for program in target.programs(engine)]


def decode_jobs(target: Target, sequences: Sequence[int]) -> list[Job]:
    """The decode programs of an engine for each number of sequences."""
    listed = []
    for slots in sequences:
        engine = target.engine(slots)
        listed += [target.job(p, engine) for p in target.programs(engine) if p.kind in ("decode", "decode_n")]
    return listed


def roofline_jobs(target: Target, sequences: Sequence[int], new_tokens: Sequence[int]) -> list[Job]:
    """One pass for each number of sequences and of tokens of each, with as many rows as are in use: a pass of one token
    that drafts nothing, or one that tries drafts and then drafts for the next."""
    listed = []
    for slots in sequences:
        for new in new_tokens:
            how = target if new > 1 else dataclasses.replace(target, drafts=False)
            engine = how.engine(slots, draft_rows=slots * (new - 1))
            for program in how.programs(engine):
                if program.kind == "decode":
                    kind = "decode" if new == 1 else "verify"
                    listed.append(Job(program, (Case(kind, how.load(engine, new)),)))
    return listed


def drafting(target: Target, engine: EngineConfig) -> dict[str, Any] | None:
    """What the report says about drafting: sizes, and what is assumed; None where nothing is drafted."""
    rows = engine.drafted_rows("tpu")
    if not target.drafts or not rows:
        return None
    shadow = target.shadow
    return {
        "shadow": {"parameters": shadow.parameters, "rank": shadow.rank, "mlp": shadow.mlp, "vocab": shadow.vocab},
        "rows": rows,
        "drafted_tokens": SHADOW_PLACES,
        "tokens_of_a_sequence": {
            "prefill": 1, "decode": 1, "decode_n": 1, "verify": (engine.slots + rows) // engine.slots,
        },
        "thinking": False,
        "relaxed": False,
    }  # fmt: skip
