"""From stored tensors to parameters on their devices, one stacked parameter after the other.

Host memory holds one parameter at a time beside the finished ones, in its final type, and a few megabytes of rows that
are being decoded. On a CPU the finished buffer *is* the JAX array's memory (JAX takes over 64-byte aligned buffers).
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from ...configs.machine import cores
from ...configs.trunk import TrunkConfig
from ..params import param_specs
from .placement import Piece
from .stored import OpenFiles, row_spans

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes are done, and how many there are."""

_DECODE_ELEMENTS = 1 << 16  # a decoded span and its temporaries stay in the L2 cache
_TASK_ELEMENTS = 1 << 22


def assemble(
    config: TrunkConfig,
    pieces: Mapping[str, Sequence[Piece]],
    *,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Parameters in `dtype`, by path, sharded over `mesh` (or on the default device)."""
    specs = param_specs(config)
    total = sum(int(np.prod(spec.shape)) * dtype.itemsize for spec in specs.values())
    done = 0
    params: dict[str, jax.Array] = {}
    with concurrent.futures.ThreadPoolExecutor(_workers()) as pool, OpenFiles() as files:
        for path, spec in specs.items():
            buffer = fill(spec.shape, pieces[path], dtype, pool, files)
            params[path] = jax.device_put(buffer, spec.sharding(mesh) if mesh is not None else None)
            done += buffer.nbytes
            if progress is not None:
                progress("loading weights", done, total)
            del buffer
    jax.block_until_ready(params)
    return params


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


def interleaved_rows(heads: int, rows: int) -> np.ndarray:
    """For each stored row of a projection with neighbouring rotary pairs, its row with pairs (i, i + H/2)."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """An uninitialised array whose memory starts at a multiple of `alignment` bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def _workers() -> int:
    return min(8, cores())
