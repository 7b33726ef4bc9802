"""What to assume for loops whose count depends on data, and the least a program could read.

Both assume the same load, a full engine: every slot decodes with `tokens` tokens in its KV cache, and a prefill step
also carries a full prompt chunk of one more sequence.
"""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh

from ...configs.engine import BLOCK, EngineConfig
from ...configs.trunk import LOCAL, TrunkConfig
from ...kernels.attention.reference import GROUP
from ...model.params import param_specs
from ...serving.engine.programs import COPY_BLOCKS, Program
from .traffic import Assume


@dataclasses.dataclass(frozen=True)
class Load:
    """The load that figures are worked out for."""

    config: TrunkConfig
    engine: EngineConfig
    tokens: int
    """Tokens in the KV cache of every sequence."""

    @property
    def seen(self) -> list[int]:
        """KV tokens a query reads, layer by layer: a local layer looks no further back than its window."""
        window = self.config.sliding_window or self.tokens
        return [min(self.tokens, window) if kind == LOCAL else self.tokens for kind in self.config.layer_types]

    @property
    def spans(self) -> float:
        """Spans of one block that attention walks in a layer, on average over the layers."""
        return sum(math.ceil(n / BLOCK) for n in self.seen) / self.config.n_layers

    def groups(self, program: Program) -> int:
        """Query groups of a step: one per decoding sequence, and those of the prompt chunk."""
        return self.engine.slots + (math.ceil(self.engine.prefill_chunk / GROUP) if program.kind == "prefill" else 0)

    def assume(self, program: Program) -> Assume:
        """Iterations of loops whose count is data, by the function that has the loop."""
        rules = {
            "trunk.py:Trunk.__call__": (self.config.n_layers, "all layers run"),
            "reference.py:write_kv": (program.width, "every token of the step is in use"),
            "reference.py:attend": (self.groups(program), "all slots are taken"),
            "reference.py:_largest_key": (31, "a binary search over 31 bits takes its longest"),
            "reference.py:_attend_group": (self.spans, f"{self.tokens} tokens are in the KV cache of every sequence"),
        }
        return lambda source, op_name: rules.get(source)


def min_bytes(load: Load, program: Program, mesh: Mesh, itemsize: int) -> float:
    """Bytes one chip cannot avoid to move: every shard of a weight once a pass, and the KV that is attended to.

    Of an embedding that is not also the output head only the rows of the step's tokens count. `admit` and the copies
    of blocks read and write what they are named for once.
    """
    config, model = load.config, mesh.shape["model"]
    per_token = 2 * config.n_kv_heads * config.head_dim * itemsize / model
    if program.kind in ("save", "load"):
        return 2.0 * COPY_BLOCKS * BLOCK * config.n_layers * per_token
    if program.kind == "admit":
        row = program.args[2]
        return 2.0 * sum(math.prod(a.shape) * a.dtype.itemsize for a in row) / mesh.shape["data"]
    weights = 0.0
    for name, spec in param_specs(config).items():
        size = math.prod(spec.sharding(mesh).shard_shape(spec.shape)) * itemsize
        if name == "embed" and not config.tied_embeddings:
            size = min(size, program.width * config.d_model * itemsize)
        weights += size
    kv = load.engine.slots * sum(load.seen) * per_token
    return (weights + kv) * passes(load.engine, program)


def passes(engine: EngineConfig, program: Program) -> int:
    """Trunk passes of one run of the program."""
    return engine.passes("tpu") if program.kind == "decode_n" else 1


def tokens_per_run(load: Load, program: Program, mesh: Mesh) -> int | None:
    """Tokens all chips together get on with in one run: prompt tokens for prefill, answer tokens for decode."""
    if program.kind == "prefill":
        return load.engine.prefill_chunk * mesh.shape["data"]
    if program.kind in ("decode", "decode_n"):
        return load.engine.slots * passes(load.engine, program) * mesh.shape["data"]
    return None
