"""Weights that are not plain arrays, as leaves that model code passes around like one.

Letters: L layers, V vocabulary. `out` and `in` are a matrix's output and input features, all their axes flattened.

A `Quantised` matrix (or stack of L matrices) is integers with a scale for every group of inputs of an output channel.
`form` says what the integers and scales are (groups.py), `layout` how they lie in memory, which is up to the backend:

plain   for plain JAX, all forms alike: `q` int8 `[.., out, in]`, `scale` float32 `[.., out, in/16 or in/32]` and, for
        the forms that have one, `min` float32 of the same shape. A weight is `scale * q + min`, exactly.
cpu     what packing.py makes for the native kernels: its parts have axes `[.., out/16, in/32, bytes]`.
tpu     `q` int8 `[.., out, in]` with `scale` float32 `[.., out]` (form c8), or `q` int4 `[.., in, out]` with `scale`
        bfloat16 `[.., in/32, out]` (form s4: the scale of an output channel lies in its lane).

Parts of a stack have the axis L first. The axes of `out` and `in`, in whatever units, come next, so that a mesh axis
that splits either splits every part; inside `shard_map` parts are this device's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeAlias

import jax
import numpy as np

from .groups import GROUP, Groups
from .layouts import CHANNELS

__all__ = ["CHANNELS", "GROUP", "Groups", "Mixed", "Quantised", "Split", "Weight", "out_features"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parts"],
    meta_fields=["form", "layout", "shape", "inputs", "stacked"],
)
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A quantised parameter.

    `shape` is the logical shape of the whole parameter, with L first if `stacked`; `inputs` is how many of its
    elements one output channel takes. Both describe the whole parameter also where `parts` are one device's.
    """

    parts: dict[str, Any]
    form: str
    layout: str
    shape: tuple[int, ...]
    inputs: int
    stacked: bool

    @property
    def out_features(self) -> int:
        """Output channels held here: of this device inside `shard_map`."""
        if self.layout != "cpu":
            return self.parts["q"].shape[-1 if self.form == "s4" else -2]
        whole = math.prod(self.shape[self.stacked :]) // self.inputs
        blocks = self.parts["blocks"].shape[-3]
        return whole if blocks == -(-whole // CHANNELS) else blocks * CHANNELS

    @property
    def in_features(self) -> int:
        """Inputs of the part held here."""
        if self.layout == "cpu":
            return self.parts["blocks"].shape[-2] * GROUP
        return self.parts["q"].shape[-2 if self.form == "s4" else -1]

    @property
    def nbytes(self) -> int:
        """Bytes of the parts, padding included."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts.values())


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=["which"])
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A stack whose layers have different forms: one stack for each form; layer i is the next one of
    `stacks[which[i]]`."""

    stacks: tuple[Quantised, ...]
    which: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.which), *self.stacks[0].shape[1:])

    @property
    def out_features(self) -> int:
        return self.stacks[0].out_features

    @property
    def in_features(self) -> int:
        return self.stacks[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    @property
    def rows(self) -> np.ndarray:
        """int32 `[L]`: each layer's index in its own stack."""
        seen = [0] * len(self.stacks)
        rows = []
        for kind in self.which:
            rows.append(seen[kind])
            seen[kind] += 1
        return np.array(rows, np.int32)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["frequent", "rest", "place", "tokens"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Split:
    """An embedding whose rows have two precisions: those of frequent tokens one, all others another.

    `place` int32 `[V]` is each token's row in the two tables put one after the other, `tokens` int32 `[V]` the token of
    each such row. Rows of a table are in ascending order of their tokens.
    """

    frequent: Any
    rest: Any
    place: Any
    tokens: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.frequent.shape[0] + self.rest.shape[0], *self.frequent.shape[1:])

    @property
    def out_features(self) -> int:
        return self.place.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


Weight: TypeAlias = jax.Array | Quantised | Mixed | Split


def out_features(weight: Weight, inputs: int, *, stacked: bool) -> int:
    """Output channels of a weight that takes `inputs` inputs; `stacked`: its first axis is the layer."""
    if isinstance(weight, Quantised | Mixed | Split):
        return weight.out_features
    return math.prod(weight.shape[stacked:]) // inputs
