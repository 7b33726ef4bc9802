"""Which programs a report compiles, for which load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ...configs.engine import BLOCK, EngineConfig
from ...configs.trunk import TrunkConfig
from ...kernels.attention import KVFormat
from ...kernels.backend import Kernels
from ...model.params import WeightFormat, abstract_params
from ...serving.engine.programs import Program, kv_format, programs
from .assume import Load, Sampling
from .report import Job

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

    def engine(self, slots: int, **more: Any) -> EngineConfig:
        """An engine for `slots` sequences of the target's context: longer than the default where it must be."""
        default = EngineConfig(slots=slots, kv=self.kv, decode_steps=self.decode_steps, **more)  # type: ignore[arg-type]
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

    def kv_format(self, engine: EngineConfig) -> KVFormat:
        return kv_format(engine, self.kernels, "tpu")

    def programs(self, engine: EngineConfig) -> list[Program]:
        return programs(
            self.config, engine, self.mesh,
            params=self.params(), kernels=self.kernels, kv=self.kv_format(engine),
        )  # fmt: skip

    def load(self, engine: EngineConfig, new_tokens: int = 1) -> Load:
        return Load(self.config, engine, self.kv_format(engine), self.context, new_tokens, self.sampling)


def engine_jobs(target: Target, slots: int) -> list[Job]:
    """Every program of an engine."""
    engine = target.engine(slots)
    return [Job(program, target.load(engine)) for program in target.programs(engine)]


def decode_jobs(target: Target, sequences: Sequence[int], new_tokens: Sequence[int] = (1,)) -> list[Job]:
    """One pass of the trunk for each number of sequences and of tokens of each.

    A pass that verifies several tokens of every sequence is compiled as the prefill step of the same width: it differs
    in the number of rows that reach the head, which moves the same weights.
    """
    jobs = []
    for slots in sequences:
        for new in new_tokens:
            engine = target.engine(slots, **({} if new == 1 else {"prefill_chunk": slots * (new - 1)}))
            kind = "decode" if new == 1 else "prefill"
            jobs += [Job(p, target.load(engine, new)) for p in target.programs(engine) if p.kind == kind]
    return jobs
