"""The parameters of a trunk, declared once.

`param_specs` is the only place that knows a parameter's shape, logical axes and initialiser. The NNX module, the
abstract tree that programs are compiled against, the shardings and the loaders all derive from it.
A matrix may be an array or a quantised leaf (kernels/linear/weight.py); `partitions` says how either is split.
Layer parameters are stacked: their first axis is the layer, so that the step is one loop over a layer index.
Projections are stored `[out, in]`, as model files have them (and as XLA:CPU multiplies them fastest).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..configs.trunk import TrunkConfig
from ..kernels.linear.groups import GROUP, SUPER
from ..kernels.linear.layouts import part_shapes
from ..kernels.linear.weight import CHANNELS, Mixed, Quantised, Split

SHARDED_AXES = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}
"""Logical axis -> mesh axis. An axis that is not listed is replicated."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: `shape`, the logical name of each axis, and how a random trunk fills it."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1

    @property
    def matrix(self) -> bool:
        """Whether it takes part in products; norms and biases do not."""
        return self.init == "normal"

    @property
    def stacked(self) -> bool:
        """Whether the first axis is the layer."""
        return self.axes[0] == "layers"

    @property
    def inputs(self) -> int:
        """Input features of a matrix: the product of its last axes."""
        return self.fan_in

    @property
    def out_features(self) -> int:
        """Output features of a matrix, heads and head size multiplied."""
        return math.prod(self.shape[self.stacked :]) // self.inputs

    def partition(self) -> PartitionSpec:
        """The mesh axes this parameter is split over."""
        return PartitionSpec(*(SHARDED_AXES.get(axis) for axis in self.axes))

    def matrix_axes(self) -> tuple[str | None, str | None]:
        """The mesh axes over which a matrix's output features and its input features are split."""
        split = len(self.shape)
        while math.prod(self.shape[split:]) < self.inputs:
            split -= 1
        out, inputs = (
            next((SHARDED_AXES[axis] for axis in axes if axis in SHARDED_AXES), None)
            for axes in (self.axes[:split], self.axes[split:])
        )
        return out, inputs

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


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """One form for all matrices of a trunk: "float32", "bfloat16", "int8" or "int4" (the last two scaled per group of
    32, or int8 per output channel in the layout of a TPU); `vectors` is the type of norms and biases, `layout` how
    quantised matrices lie in memory (kernels/linear/weight.py)."""

    matrices: str
    vectors: str = "float32"
    layout: str = "plain"

    def __post_init__(self) -> None:
        supported = ("float32", "bfloat16", "int8", "int4")
        if self.matrices not in supported:
            raise ValueError(f"weights of {self.matrices!r} are not supported; supported: {', '.join(supported)}")

    def form(self, path: str, spec: ParamSpec) -> str | None:
        """The form of a quantised parameter; None where it is a float array."""
        if not spec.matrix:
            return None
        if self.matrices not in ("int8", "int4"):
            return None
        # In the TPU's 4-bit form a row of a table is a column, which costs as much to read as 32 of them.
        table = self.layout == "tpu" and path in ("embed", "head")
        return grouped_form("int8" if table else self.matrices, self.layout)


def grouped_form(precision: str, layout: str) -> str:
    """The form of "int8" or "int4" weights in a layout."""
    return {"int8": "c8", "int4": "s4"}[precision] if layout == "tpu" else {"int8": "w8", "int4": "w4"}[precision]


def abstract_params(config: TrunkConfig, form: WeightFormat | Any, mesh: Mesh | None = None) -> dict[str, Any]:
    """Shapes, types and shardings of the parameters, without memory: programs are compiled against these. `form` is a
    `WeightFormat`, or the type of all parameters."""
    if not isinstance(form, WeightFormat):
        form = WeightFormat(np.dtype(form).name, np.dtype(form).name)
    params = {path: _abstract(path, spec, form) for path, spec in param_specs(config).items()}
    return params if mesh is None else with_shardings(config, params, mesh)


def _abstract(path: str, spec: ParamSpec, form: WeightFormat) -> Any:
    if (name := form.form(path, spec)) is None:
        return jax.ShapeDtypeStruct(spec.shape, np.dtype(form.matrices if spec.matrix else form.vectors))
    return abstract_matrix(spec, (name,) * (spec.shape[0] if spec.stacked else 1), form.layout)


def abstract_matrix(spec: ParamSpec, forms: Sequence[str], layout: str) -> Quantised | Mixed:
    """A quantised parameter without memory; `forms` has an entry for each layer, or one."""
    kinds = list(dict.fromkeys(forms))
    stacks = tuple(_abstract_stack(spec, kind, forms.count(kind), layout) for kind in kinds)
    return stacks[0] if len(stacks) == 1 else Mixed(stacks, tuple(kinds.index(form) for form in forms))


def _abstract_stack(spec: ParamSpec, form: str, layers: int, layout: str) -> Quantised:
    lead = (layers,) if spec.stacked else ()
    shapes = part_shapes(form, layout, spec.out_features, spec.inputs)
    parts = {part: jax.ShapeDtypeStruct((*lead, *shape), dtype) for part, (shape, dtype) in shapes.items()}
    return Quantised(parts, form, layout, (*lead, *spec.shape[spec.stacked :]), spec.inputs, spec.stacked)


def abstract_split(spec: ParamSpec, frequent: int, forms: Sequence[str], layout: str) -> Split:
    """A table in two precisions without memory, `frequent` rows in the first."""
    rows = spec.shape[0]
    sizes = (frequent, rows - frequent)
    first, second = (
        abstract_matrix(dataclasses.replace(spec, shape=(n, *spec.shape[1:])), (form,), layout)
        for n, form in zip(sizes, forms, strict=True)
    )
    index = jax.ShapeDtypeStruct((rows,), np.int32)
    return Split(first, second, index, index)


def partitions(config: TrunkConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh axes that `params` (arrays or abstract ones) are split over: the same tree, of `PartitionSpec`s."""
    specs = param_specs(config)
    return {path: _partition(specs[path], value) for path, value in params.items()}


def _partition(spec: ParamSpec, value: Any) -> Any:
    if isinstance(value, Mixed):
        return Mixed(tuple(_partition(spec, stack) for stack in value.stacks), value.which)
    if isinstance(value, Split):
        return jax.tree.map(lambda _: PartitionSpec(), value)
    if not isinstance(value, Quantised):
        return spec.partition()
    out, inputs = spec.matrix_axes()
    lead = (None,) * value.stacked

    axes = (*lead, inputs, out) if value.form == "s4" else (*lead, out, inputs)

    def of(part: Any) -> PartitionSpec:
        return PartitionSpec(*axes[: len(part.shape)])

    return dataclasses.replace(value, parts={name: of(part) for name, part in value.parts.items()})


def placements(config: TrunkConfig, params: Mapping[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """Where `params` are to be (on the default device without a mesh): the same tree, of what `jax.device_put` takes.

    On a TPU, operands of kernels lie row by row. XLA would choose another order for rows that do not fill its lanes,
    and copy them at every step.
    """
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]

    def place(spec: PartitionSpec, part: Any, *, rows: bool) -> Any:
        sharding = NamedSharding(mesh, spec) if mesh is not None else SingleDeviceSharding(device)
        return Format(Layout(tuple(range(len(part.shape)))), sharding) if rows else sharding

    def places(path: str, specs: Any) -> Any:
        operand = path in ("embed", "head") or isinstance(params[path], Quantised | Mixed | Split)
        one = functools.partial(place, rows=operand and device.platform == "tpu")
        return jax.tree.map(one, specs, params[path], is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    return {path: places(path, specs) for path, specs in partitions(config, params).items()}


def with_shardings(config: TrunkConfig, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Abstract parameters with their places on the mesh."""
    return jax.tree.map(
        lambda place, part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=place),
        placements(config, params, mesh), dict(params), is_leaf=lambda leaf: isinstance(leaf, Format | NamedSharding),
    )  # fmt: skip


def split_obstacle(config: TrunkConfig, params: Mapping[str, Any], model: int) -> str | None:
    """Why `params` cannot be split over `model` devices, in one sentence: groups and blocks stay whole."""
    if model == 1:
        return None
    specs = param_specs(config)
    for path, value in params.items():
        if isinstance(value, Split):
            return (
                f"{path!r} in two precisions cannot be split over model={model}; supported: model=1, or an embedding "
                "of one form"
            )
        for part in value.stacks if isinstance(value, Mixed) else [value]:
            if isinstance(part, Quantised) and (why := _cut(specs[path], part, model)):
                return f"{path!r} of {config.name} cannot be split over model={model}: {why}"
    return None


def _cut(spec: ParamSpec, value: Quantised, model: int) -> str | None:
    out, inputs = spec.matrix_axes()
    if out and value.layout == "cpu" and spec.out_features // model % CHANNELS:
        return f"{spec.out_features // model} output channels a device are no whole number of blocks of {CHANNELS}"
    unit = 1 if value.form == "c8" else SUPER if value.form in ("w4k", "w6k") else GROUP
    if inputs and spec.inputs // model % unit:
        return f"{spec.inputs // model} inputs a device are no whole number of groups of {unit}"
    return None
