"""Host memory for parameters: aligned so that JAX takes it over without a copy on a CPU, on huge pages where it can be.

JAX needs 64 bytes of alignment. Large buffers start at a multiple of 2 MiB and ask for huge pages, with which a core
reads weights up to half again as fast: fewer address translations, and prefetching does not stop at 4 KiB.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

_CACHE_LINE = 64
_HUGE_PAGE = 1 << 21


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of arbitrary contents, fit to become a JAX array on a CPU."""
    size = math.prod(shape) * dtype.itemsize
    raw = _pages(size) if size >= _HUGE_PAGE else _line(size)
    return raw.view(dtype).reshape(shape)


def _line(size: int) -> np.ndarray:
    raw = np.empty(size + _CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return raw[start : start + size]


def _pages(size: int) -> np.ndarray:
    """Anonymous memory; it goes back to the system with the last array that shows it."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + size]
