"""Which form every parameter gets: what `--quant` and `--embedding` mean for a model and the kernels that will run it.

auto    native CPU kernels: matrices stored in groups stay in them, bfloat16 ones stay bfloat16, all others become
        float32. Plain JAX on a CPU: float32. A TPU: bfloat16.
none    float32 on a CPU, bfloat16 on a TPU.
int8    groups of 32 with a scale each; on a TPU's kernels one scale for each output channel.
int4    groups of 32 with scale and minimum each; on a TPU's kernels a scale alone, and the table of tokens in int8.
        Matrices that are stored in groups of the form asked for are taken as they are.

Norms and biases are vectors: never quantised, and float32 wherever native kernels or quantised matrices are used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from ...configs.embedding import FILE, EmbeddingForm
from ...configs.trunk import TrunkConfig
from ...kernels.backend import Backend
from ...kernels.linear.groups import GROUP
from ..params import (
    ParamSpec,
    WeightFormat,
    abstract_matrix,
    abstract_split,
    grouped_form,
    param_specs,
    split_obstacle,
)
from .errors import ModelError
from .pack import Plan, SplitPlan, host_bytes
from .stored import BFLOAT16

QUANTS = ("auto", "none", "int8", "int4")

ParamPlan: TypeAlias = "np.dtype | Plan | SplitPlan"
"""What one parameter becomes: an array of a float type, or quantised."""

_FLOAT32 = np.dtype(np.float32)
_LAYOUTS: dict[Backend, str] = {"xla": "plain", "cpu": "cpu", "tpu": "tpu"}


class Stored(Protocol):
    """What a plan needs to know about a model's files."""

    @property
    def config(self) -> TrunkConfig: ...

    def exact_dtype(self, path: str) -> np.dtype: ...

    def own_forms(self, path: str) -> tuple[str, ...] | None: ...

    def types(self, path: str) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True)
class Planned:
    plans: Mapping[str, ParamPlan]
    words: str
    """The form of the weights for people and for the numerics class, for example "int8 in groups of 32"."""


def plan(
    source: Stored,
    quant: str,
    backend: Backend,
    platform: str,
    *,
    embedding: EmbeddingForm = FILE,
    frequent: Callable[[int], np.ndarray] | None = None,
) -> Planned:
    """`backend` is that of linear layers, `platform` "cpu" or "tpu". `frequent(n)` lists the n most frequent tokens in
    ascending order. A `ModelError` names what cannot be had."""
    if quant not in QUANTS:
        raise ModelError(f"quant {quant!r} is not supported; supported: {', '.join(QUANTS)}")
    layout = _LAYOUTS[backend]
    if quant == "auto" and backend == "cpu":
        made = _own(source, layout)
    else:
        float_type = "float32" if platform == "cpu" else "bfloat16"
        matrices = float_type if quant in ("auto", "none") else quant
        vectors = "float32" if matrices == quant or backend == "cpu" else float_type
        made = uniform(source.config, WeightFormat(matrices, vectors, layout))
    return _with_embedding(source, made, embedding, layout, frequent)


def uniform(config: TrunkConfig, form: WeightFormat) -> Planned:
    """Every matrix in one form."""
    plans: dict[str, ParamPlan] = {}
    for path, spec in param_specs(config).items():
        name = form.form(path, spec)
        if name is None:
            plans[path] = np.dtype(form.matrices if spec.matrix else form.vectors)
            continue
        plans[path] = _grouped(config, path, spec, name, form.layout)
    words = form.matrices
    if form.matrices in ("int8", "int4"):
        words += " for each output channel" if grouped_form(form.matrices, form.layout) == "c8" else " in groups of 32"
    return Planned(plans, words)


def floats(config: TrunkConfig, dtype: np.dtype) -> dict[str, ParamPlan]:
    """Every parameter an array of type `dtype`."""
    return dict.fromkeys(param_specs(config), dtype)


def _grouped(config: TrunkConfig, path: str, spec: ParamSpec, form: str, layout: str) -> Plan:
    if form != "c8" and spec.inputs % GROUP:
        raise ModelError(
            f"{path!r} of {config.name} has {spec.inputs} inputs, no whole number of groups of {GROUP}; supported: "
            "--quant none"
        )
    return Plan((form,) * (spec.shape[0] if spec.stacked else 1), layout)


def _own(source: Stored, layout: str) -> Planned:
    plans: dict[str, ParamPlan] = {}
    grouped: set[str] = set()
    others: set[str] = set()
    for path, spec in param_specs(source.config).items():
        forms = source.own_forms(path) if spec.matrix else None
        if forms is not None:
            plans[path] = Plan(forms, layout)
            grouped.update(source.types(path))
        elif not spec.matrix:
            plans[path] = _FLOAT32
        else:
            plans[path] = kind = BFLOAT16 if source.exact_dtype(path) == BFLOAT16 else _FLOAT32
            others.add(kind.name)
    words = " and ".join(sorted(others))
    if grouped:
        words = "the file's own groups (" + ", ".join(sorted(grouped)) + ")" + (f" and {words}" if words else "")
    return Planned(plans, words)


def _with_embedding(
    source: Stored,
    planned: Planned,
    embedding: EmbeddingForm,
    layout: str,
    frequent: Callable[[int], np.ndarray] | None,
) -> Planned:
    """The plan with the table of tokens as `embedding` asks."""
    if embedding == FILE:
        return planned
    config, spec = source.config, param_specs(source.config)["embed"]
    if config.vocab_size <= embedding.frequent:
        raise ModelError(
            f"embedding {embedding} keeps {embedding.frequent} rows apart; {config.name} has {config.vocab_size}"
        )
    if layout == "tpu" and "int4" in embedding.precisions:
        raise ModelError(f"embedding {embedding} is not supported on a TPU; supported there: file, int8")
    own = source.own_forms("embed")
    forms = [own[0] if own and _is(own[0], p) else grouped_form(p, layout) for p in embedding.precisions]
    made: ParamPlan = _grouped(config, "embed", spec, forms[-1], layout)
    if embedding.frequent:
        if frequent is None:
            raise ValueError("a split embedding needs to know the most frequent tokens")
        made = SplitPlan(frequent(embedding.frequent), (forms[0], forms[1]), layout)
    return Planned({**planned.plans, "embed": made}, f"{planned.words}; embedding {embedding}")


def _is(form: str, precision: str) -> bool:
    """Whether a stored form already has the precision asked for."""
    return form in {"int8": ("w8", "w8m"), "int4": ("w4", "w4k")}[precision]


def abstract_planned(config: TrunkConfig, plans: Mapping[str, ParamPlan]) -> dict[str, Any]:
    """The parameters without memory."""
    params: dict[str, Any] = {}
    for path, spec in param_specs(config).items():
        made = plans[path]
        if isinstance(made, np.dtype):
            params[path] = jax.ShapeDtypeStruct(spec.shape, made)
        elif isinstance(made, Plan):
            params[path] = abstract_matrix(spec, made.forms, made.layout)
        else:
            params[path] = abstract_split(spec, len(made.frequent), made.forms, made.layout)
    return params


def check_mesh(config: TrunkConfig, plans: Mapping[str, ParamPlan], model: int) -> None:
    """A `ModelError` when the planned parameters cannot be split over `model` devices."""
    if obstacle := split_obstacle(config, abstract_planned(config, plans), model):
        raise ModelError(obstacle)


def planned_bytes(spec: ParamSpec, made: ParamPlan) -> int:
    """Bytes of a parameter in memory."""
    return math.prod(spec.shape) * made.itemsize if isinstance(made, np.dtype) else host_bytes(spec, made)
