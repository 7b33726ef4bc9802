"""Quantised parameters from rows of stored tensors or of arrays, packed on several threads, on the host.

Letters: L layers, V vocabulary.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...kernels.host_memory import aligned_empty
from ...kernels.linear.groups import Groups, quantise
from ...kernels.linear.layouts import FLOAT_FORMS, part_shapes, write_rows
from ...kernels.linear.weight import CHANNELS, Mixed, Quantised, Split
from ..params import ParamSpec
from .errors import ModelError
from .gguf_groups import form_of, groups_of
from .placement import Piece, interleaved_rows

_TASK_ELEMENTS = 1 << 17  # what a task unpacks and packs stays in the L2 cache


class Rows(Protocol):
    """One matrix `[rows, cols]` of a parameter, in the parameter's order of rows."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def whole(self) -> bool:
        """Whether rows are best taken all at once."""

    @property
    def own_form(self) -> str | None:
        """The grouped form that holds the matrix exactly, if it is stored in one."""

    @property
    def name(self) -> str: ...

    def groups(self, start: int, stop: int) -> Groups:
        """Rows in the form `own_form`."""

    def floats(self, start: int, stop: int) -> np.ndarray:
        """Rows in float32."""


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """A tensor of a file. `order` lists the stored rows to take; None: all, as they are."""

    piece: Piece
    file: int
    order: np.ndarray | None = None

    @classmethod
    def of(cls, piece: Piece, file: int) -> StoredRows:
        order = None
        if piece.interleaved_heads:
            order = np.argsort(interleaved_rows(piece.interleaved_heads, piece.rows))
        return cls(piece, file, order)

    @property
    def rows(self) -> int:
        return self.piece.rows if self.order is None else len(self.order)

    @property
    def cols(self) -> int:
        return self.piece.cols

    @property
    def whole(self) -> bool:
        return bool(self.piece.interleaved_heads)

    @property
    def own_form(self) -> str | None:
        return form_of(self.piece.tensor)

    @property
    def name(self) -> str:
        return f"tensor {self.piece.tensor.name!r} in {self.piece.tensor.path}"

    def groups(self, start: int, stop: int) -> Groups:
        return groups_of(self.piece.tensor, self._raw(start, stop))

    def floats(self, start: int, stop: int) -> np.ndarray:
        if self.own_form is not None:  # the same values, in half the time of GGUF's own decoder
            return self.groups(start, stop).values()
        return self.piece.tensor.decode(self._raw(start, stop))

    def _raw(self, start: int, stop: int) -> np.ndarray:
        """uint8 `[stop - start, bytes of a row]`."""
        if self.order is None:
            return self.piece.tensor.read_raw(self.file, start, stop, self.cols)
        return self._all[self.order[start:stop]]

    @functools.cached_property
    def _all(self) -> np.ndarray:
        return self.piece.tensor.read_raw(self.file, 0, self.piece.rows, self.cols)


@dataclasses.dataclass(frozen=True)
class ArrayRows:
    """Rows of an array in memory `[rows, cols]`, any float type."""

    name: str
    values: np.ndarray
    order: np.ndarray | None = None

    @property
    def whole(self) -> bool:
        return False

    @property
    def own_form(self) -> str | None:
        return None

    @property
    def rows(self) -> int:
        return len(self.values) if self.order is None else len(self.order)

    @property
    def cols(self) -> int:
        return self.values.shape[1]

    def groups(self, start: int, stop: int) -> Groups:
        raise ValueError(f"{self.name} is not stored in groups")

    def floats(self, start: int, stop: int) -> np.ndarray:
        picked = self.values[start:stop] if self.order is None else self.values[self.order[start:stop]]
        return picked.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one matrix parameter becomes: a form for each layer (one form if it is no stack), in a layout."""

    forms: tuple[str, ...]
    layout: str


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """An embedding in two parts: rows of the tokens `frequent` (ascending) in one form, all others in another."""

    frequent: np.ndarray
    forms: tuple[str, str]
    layout: str


def host_bytes(spec: ParamSpec, plan: Plan | SplitPlan) -> int:
    """Bytes of the packed parameter."""
    out, inputs = spec.out_features, spec.inputs
    rows = [out] * len(plan.forms)
    if isinstance(plan, SplitPlan):
        rows = [len(plan.frequent), out - len(plan.frequent)]
    shapes = (part_shapes(form, plan.layout, n, inputs) for form, n in zip(plan.forms, rows, strict=True))
    return sum(math.prod(shape) * dtype.itemsize for parts in shapes for shape, dtype in parts.values())


def build(
    spec: ParamSpec, layers: Sequence[Rows], plan: Plan | SplitPlan, pool: concurrent.futures.Executor
) -> Quantised | Mixed | Split:
    """The parameter with numpy arrays for parts, packed on the threads of `pool`."""
    if isinstance(plan, SplitPlan):
        return _build_split(spec, layers[0], plan, pool)
    kinds = list(dict.fromkeys(plan.forms))
    stacks = []
    for kind in kinds:
        members = [rows for rows, form in zip(layers, plan.forms, strict=True) if form == kind]
        stacks.append(_build_stack(spec, members, kind, plan.layout, pool))
    if len(stacks) == 1:
        return stacks[0]
    return Mixed(tuple(stacks), tuple(kinds.index(form) for form in plan.forms))


def _build_stack(
    spec: ParamSpec, members: Sequence[Rows], form: str, layout: str, pool: concurrent.futures.Executor
) -> Quantised:
    shapes = part_shapes(form, layout, spec.out_features, spec.inputs)
    lead = (len(members),) if spec.stacked else ()
    parts = {name: aligned_empty((*lead, *shape), dtype) for name, (shape, dtype) in shapes.items()}
    targets = [{name: part[i] for name, part in parts.items()} for i in range(len(members))] if lead else [parts]
    _run(pool, ((rows, target, form, layout) for rows, target in zip(members, targets, strict=True)))
    shape = (*lead, *spec.shape[spec.stacked :])
    return Quantised(parts, form, layout, shape, spec.inputs, spec.stacked)


def _build_split(spec: ParamSpec, rows: Rows, plan: SplitPlan, pool: concurrent.futures.Executor) -> Split:
    rest = np.setdiff1d(np.arange(spec.out_features), plan.frequent)
    tokens = np.concatenate([plan.frequent, rest]).astype(np.int32)
    place = np.empty_like(tokens)
    place[tokens] = np.arange(len(tokens), dtype=np.int32)
    tables = []
    for form, order in zip(plan.forms, (plan.frequent, rest), strict=True):
        part = dataclasses.replace(spec, shape=(len(order), *spec.shape[1:]))
        picked = dataclasses.replace(rows, order=order)  # type: ignore[type-var]
        tables.append(_build_stack(part, [picked], form, plan.layout, pool))
    return Split(tables[0], tables[1], place, tokens)


def _run(pool: concurrent.futures.Executor, work: Iterator[tuple[Rows, Mapping[str, Any], str, str]]) -> None:
    waiting = [
        pool.submit(_pack, rows, target, form, layout, start, stop)
        for rows, target, form, layout in work
        for start, stop in _spans(rows)
    ]
    try:
        for future in waiting:
            future.result()
    finally:
        for future in waiting:
            future.cancel()


def _spans(rows: Rows) -> Iterator[tuple[int, int]]:
    step = rows.rows if rows.whole else max(1, _TASK_ELEMENTS // rows.cols // CHANNELS) * CHANNELS
    for start in range(0, rows.rows, step):
        yield start, min(rows.rows, start + step)


def _pack(rows: Rows, target: Mapping[str, Any], form: str, layout: str, start: int, stop: int) -> None:
    try:
        write_rows(target, form, layout, start, _in_form(rows, form, start, stop))
    except ValueError as error:
        raise ModelError(f"{rows.name} cannot be quantised: {error}") from error


def _in_form(rows: Rows, form: str, start: int, stop: int) -> Groups | np.ndarray:
    """Rows as they are stored if that is the form, else requantised from floats."""
    if rows.own_form == form:
        return rows.groups(start, stop)
    values = rows.floats(start, stop)
    return values if form in FLOAT_FORMS else quantise(values, 4 if form == "w4" else 8)
