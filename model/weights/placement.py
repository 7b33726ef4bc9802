"""Which stored tensor fills which part of which parameter.

A file format is described by a `Naming`: a table from parameter paths to tensor names, and the few ways in which its
tensors differ from our parameters. Everything is checked here, before a byte of weights is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from ...configs.trunk import TrunkConfig
from ..params import param_specs
from .errors import ModelError
from .stored import StoredTensor


@dataclasses.dataclass(frozen=True)
class Naming:
    """`names` has `{i}` where the layer's number goes. `interleaved` lists parameters whose rotary pairs are stored
    as neighbours (2i, 2i+1) within a head instead of (i, i + H/2). `norm_offset` is added to norm weights. Tensors
    for which `ignored` is true may be present without being used."""

    names: Mapping[str, str]
    interleaved: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    ignored: Callable[[str], bool] = lambda name: False


@dataclasses.dataclass(frozen=True)
class Piece:
    """`tensor` fills the `layer`-th entry of a stacked parameter, or all of an unstacked one (`layer` None).

    Seen as `[rows, cols]`, stored row r goes to row `interleaved_rows(...)[r]` if `interleaved_heads` is set.
    """

    tensor: StoredTensor
    layer: int | None
    rows: int
    cols: int
    interleaved_heads: int = 0
    add: float = 0.0


def interleaved_rows(heads: int, rows: int) -> np.ndarray:
    """For each stored row of a projection with neighbouring rotary pairs, its row with pairs (i, i + H/2)."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape model files give to one layer of the parameter `path`: heads and head size are one axis."""
    if path == "layers.o":
        return (shape[0], math.prod(shape[1:]))
    if path.endswith("_bias"):
        return (math.prod(shape),)
    return shape if len(shape) < 3 else (math.prod(shape[:-1]), shape[-1])


def place(config: TrunkConfig, tensors: Mapping[str, StoredTensor], naming: Naming) -> dict[str, list[Piece]]:
    """Pieces of every parameter. A `ModelError` names the first tensor that is missing, misshapen or not expected."""
    used: set[str] = set()
    pieces: dict[str, list[Piece]] = {}
    for path, spec in param_specs(config).items():
        stacked = path.startswith("layers.")
        want = stored_shape(path, spec.shape[1:] if stacked else spec.shape)
        pieces[path] = []
        for layer in range(config.n_layers) if stacked else (None,):
            name = naming.names[path].format(i=layer)
            tensor = _tensor(tensors, name, want)
            used.add(name)
            pieces[path].append(_piece(config, path, naming, tensor, layer))
    for name in sorted(tensors):
        if name not in used and not naming.ignored(name):
            raise ModelError(
                f"tensor {name!r} is not part of a {config.family} decoder of {config.n_layers} layers as Umbra knows "
                "it, and leaving it out would change the model's output"
            )
    return pieces


def _tensor(tensors: Mapping[str, StoredTensor], name: str, want: tuple[int, ...]) -> StoredTensor:
    if name not in tensors:
        raise ModelError(f"the model has no tensor {name!r} (shape {list(want)})")
    if tensors[name].shape != want:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensors[name].shape)}, the model's configuration asks for {list(want)}"
        )
    return tensors[name]


def _piece(config: TrunkConfig, path: str, naming: Naming, tensor: StoredTensor, layer: int | None) -> Piece:
    rows, cols = (1, *tensor.shape) if len(tensor.shape) == 1 else tensor.shape
    if path not in naming.interleaved:
        return Piece(tensor, layer, rows, cols, add=naming.norm_offset if path.endswith("norm") else 0.0)
    if len(tensor.shape) == 1:
        rows, cols = cols, 1
    heads = config.n_heads if path in ("layers.q", "layers.q_bias") else config.n_kv_heads
    return Piece(tensor, layer, rows, cols, interleaved_heads=heads)
