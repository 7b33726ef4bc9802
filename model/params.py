"""The parameters of a trunk, declared once.

`param_specs` is the only place that knows a parameter's shape, logical axes and initialiser. The NNX module, the
abstract tree that programs are compiled against, the shardings and the loaders all derive from it.
Layer parameters are stacked: their first axis is the layer, so that the step is one loop over a layer index.
Projections are stored `[out, in]`, as model files have them (and as XLA:CPU multiplies them fastest).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..configs.trunk import TrunkConfig

SHARDED_AXES = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}
"""Logical axis -> mesh axis. An axis that is not listed is replicated."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: `shape`, the logical name of each axis, and how a random trunk fills it."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1

    def partition(self) -> PartitionSpec:
        """The mesh axes this parameter is split over."""
        return PartitionSpec(*(SHARDED_AXES.get(axis) for axis in self.axes))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.partition())


def param_specs(config: TrunkConfig) -> dict[str, ParamSpec]:
    """Every parameter of the trunk by its dotted path, for example `layers.q` of shape `[L, N, H, D]`.

    Norm weights are plain multipliers: loaders add Gemma's implicit one. Rotary pairs are (i, i + H/2), as Hugging
    Face stores them: loaders undo GGUF's interleaving.
    """
    c = config
    L, D, N, K, H, F, V = c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff, c.vocab_size
    specs = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), fan_in=D),
        "layers.attn_norm": ParamSpec((L, D), ("layers", "embed"), "ones"),
        "layers.q": ParamSpec((L, N, H, D), ("layers", "heads", "head_dim", "embed"), fan_in=D),
        "layers.k": ParamSpec((L, K, H, D), ("layers", "kv_heads", "head_dim", "embed"), fan_in=D),
        "layers.v": ParamSpec((L, K, H, D), ("layers", "kv_heads", "head_dim", "embed"), fan_in=D),
        "layers.o": ParamSpec((L, D, N, H), ("layers", "embed", "heads", "head_dim"), fan_in=N * H),
        "layers.mlp_norm": ParamSpec((L, D), ("layers", "embed"), "ones"),
        "layers.gate": ParamSpec((L, F, D), ("layers", "mlp", "embed"), fan_in=D),
        "layers.up": ParamSpec((L, F, D), ("layers", "mlp", "embed"), fan_in=D),
        "layers.down": ParamSpec((L, D, F), ("layers", "embed", "mlp"), fan_in=F),
        "final_norm": ParamSpec((D,), ("embed",), "ones"),
    }
    if c.qkv_bias:
        specs["layers.q_bias"] = ParamSpec((L, N, H), ("layers", "heads", "head_dim"), "zeros")
        specs["layers.k_bias"] = ParamSpec((L, K, H), ("layers", "kv_heads", "head_dim"), "zeros")
        specs["layers.v_bias"] = ParamSpec((L, K, H), ("layers", "kv_heads", "head_dim"), "zeros")
    if c.qk_norm:
        specs["layers.q_norm"] = ParamSpec((L, H), ("layers", "head_dim"), "ones")
        specs["layers.k_norm"] = ParamSpec((L, H), ("layers", "head_dim"), "ones")
    if c.sandwich_norms:
        specs["layers.post_attn_norm"] = ParamSpec((L, D), ("layers", "embed"), "ones")
        specs["layers.post_mlp_norm"] = ParamSpec((L, D), ("layers", "embed"), "ones")
    if not c.tied_embeddings:
        specs["head"] = ParamSpec((V, D), ("vocab", "embed"), fan_in=D)
    return specs


def abstract_params(config: TrunkConfig, dtype: Any, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, type and shardings of the parameters, without memory: programs are compiled against these."""
    return {
        path: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=spec.sharding(mesh) if mesh is not None else None)
        for path, spec in param_specs(config).items()
    }
