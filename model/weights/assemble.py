"""From stored tensors to parameters on their devices, one stacked parameter after the other.

Host memory holds one parameter at a time beside the finished ones, in its final form, and a few megabytes of rows that
are being decoded. On a CPU the finished buffer *is* the JAX array's memory (see buffers.py).
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from ...configs.machine import cores
from ...configs.trunk import TrunkConfig
from ...kernels.host_memory import aligned_empty
from ..params import param_specs, placements
from .pack import ArrayRows, Rows, StoredRows, build
from .placement import Piece, interleaved_rows
from .plan import ParamPlan, planned_bytes
from .stored import OpenFiles, row_spans

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes are done, and how many there are."""

_DECODE_ELEMENTS = 1 << 16  # a decoded span and its temporaries stay in the L2 cache
_TASK_ELEMENTS = 1 << 22


class Supply(Protocol):
    """Where values of parameters come from."""

    def array(self, path: str, dtype: np.dtype, pool: concurrent.futures.Executor) -> Any:
        """The parameter in a float type; on the host, or where it is to be."""

    def rows(self, path: str) -> Sequence[Rows]:
        """The matrices of a parameter: one for each layer, or one."""


def assemble(
    config: TrunkConfig,
    plans: Mapping[str, ParamPlan],
    supply: Supply,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Parameters as planned, by path, sharded over `mesh` (or on the default device)."""
    specs = param_specs(config)
    sizes = {path: planned_bytes(spec, plans[path]) for path, spec in specs.items()}
    done = 0
    params: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(min(8, cores())) as pool:
        for path, spec in specs.items():
            plan = plans[path]
            if isinstance(plan, np.dtype):
                value = supply.array(path, plan, pool)
            else:
                value = build(spec, supply.rows(path), plan, pool)
            params[path] = _put(config, path, value, mesh)
            done += sizes[path]
            if progress is not None:
                progress("loading weights", done, sum(sizes.values()))
            del value
    jax.block_until_ready(params)
    return params


def _put(config: TrunkConfig, path: str, value: Any, mesh: Mesh | None) -> Any:
    places = placements(config, {path: value}, mesh)[path]
    return jax.tree.map(jax.device_put, value, places)


class StoredSupply:
    """Parameters made of the tensors of open files."""

    def __init__(self, config: TrunkConfig, pieces: Mapping[str, Sequence[Piece]], files: OpenFiles) -> None:
        self.specs, self.pieces, self.files = param_specs(config), pieces, files

    def array(self, path: str, dtype: np.dtype, pool: concurrent.futures.Executor) -> np.ndarray:
        return fill(self.specs[path].shape, self.pieces[path], dtype, pool, self.files)

    def rows(self, path: str) -> list[StoredRows]:
        return [StoredRows.of(piece, self.files[piece.tensor.path]) for piece in self.pieces[path]]


class ArraySupply:
    """Parameters that `read(path, dtype)` gives as arrays of their shapes."""

    def __init__(self, config: TrunkConfig, read: Callable[[str, np.dtype | None], np.ndarray]) -> None:
        self.specs, self.read = param_specs(config), read

    def array(self, path: str, dtype: np.dtype, pool: concurrent.futures.Executor) -> np.ndarray:
        return self.read(path, dtype)

    def rows(self, path: str) -> list[ArrayRows]:
        spec = self.specs[path]
        matrices = self.read(path, None).reshape(-1, spec.out_features, spec.inputs)
        return [ArrayRows(f"parameter {path!r}", matrix) for matrix in matrices]


def fill(
    shape: tuple[int, ...],
    pieces: Sequence[Piece],
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
    files: OpenFiles,
) -> np.ndarray:
    """One parameter of `shape`, decoded on the threads of `pool`."""
    buffer = aligned_empty(shape, dtype)
    waiting = []
    for piece in pieces:
        target = (buffer if piece.layer is None else buffer[piece.layer]).reshape(piece.rows, piece.cols)
        file = files[piece.tensor.path]
        for start, stop in row_spans(piece.rows, piece.cols, _TASK_ELEMENTS):
            waiting.append(pool.submit(_decode_rows, piece, target, file, start, stop))
    try:
        for future in waiting:
            future.result()
    finally:
        for future in waiting:
            future.cancel()
    return buffer


def _decode_rows(piece: Piece, target: np.ndarray, file: int, start: int, stop: int) -> None:
    """Decodes stored rows `start` to `stop` into their places in `target` `[rows, cols]`."""
    order = interleaved_rows(piece.interleaved_heads, piece.rows) if piece.interleaved_heads else None
    for low, high in row_spans(stop - start, piece.cols, _DECODE_ELEMENTS):
        low, high = start + low, start + high
        rows = piece.tensor.read_rows(file, low, high, piece.cols, target.dtype)
        if piece.add:
            rows = rows.astype(np.float32) + np.float32(piece.add)
        with np.errstate(all="ignore"):
            target[slice(low, high) if order is None else order[low:high]] = rows
