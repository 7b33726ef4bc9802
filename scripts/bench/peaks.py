"""What the machine can do at most, measured in the same run as what is compared with it.

With a C++ compiler: peaks.cc, built for the occasion. Memory bandwidth is that of reading 256 MiB, on all threads, from
four places at once each; operations are products in registers (a multiplication and an addition count as two). Without
one: numpy, which is a lower bound.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("peaks.cc")
STREAMS = 4
BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Peaks:
    """None: not measured, because this CPU has no instruction for it that the probe knows."""

    read_bytes_s: float
    int8_ops_s: float | None
    float32_ops_s: float | None
    how: str


def measure_peaks(threads: int) -> Peaks:
    """The peaks of `threads` threads. Nothing else should be running."""
    library = _build()
    if library is None:
        return _with_numpy(threads)
    how = f"native probe: {BYTES >> 20} MiB read by {threads} threads from {STREAMS} places each; products in registers"
    return Peaks(
        library.umbra_read_bytes_s(threads, STREAMS, BYTES),
        library.umbra_int8_ops_s(threads) or None,
        library.umbra_float32_ops_s(threads) or None,
        how,
    )


def best(measured: list[Peaks]) -> Peaks:
    """The highest of each peak: whatever disturbs a measurement makes it lower."""

    def highest(values: list[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    return Peaks(
        max(peaks.read_bytes_s for peaks in measured),
        highest([peaks.int8_ops_s for peaks in measured]),
        highest([peaks.float32_ops_s for peaks in measured]),
        measured[0].how,
    )


@functools.cache
def _build() -> ctypes.CDLL | None:
    asked = os.environ.get("CXX")
    compiler = next(
        (found for name in (asked, "c++", "g++", "clang++") if name and (found := shutil.which(name))), None
    )
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        path = Path(folder) / "peaks.so"
        command = [compiler, "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", str(SOURCE), "-o", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        library = ctypes.CDLL(str(path))
    library.umbra_read_bytes_s.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    for name in ("umbra_read_bytes_s", "umbra_int8_ops_s", "umbra_float32_ops_s"):
        getattr(library, name).restype = ctypes.c_double
    return library


def _with_numpy(threads: int) -> Peaks:
    import numpy as np

    words = np.ones(BYTES // 8, np.int64)
    parts = np.array_split(words, threads * STREAMS)
    left = np.full((1024, 1024), 1e-3, np.float32)
    with concurrent.futures.ThreadPoolExecutor(threads * STREAMS) as pool:
        read = min(_timed(lambda: list(pool.map(np.sum, parts))) for _ in range(5))
    product = min(_timed(lambda: left @ left) for _ in range(5))
    return Peaks(
        words.nbytes / read,
        None,
        2 * 1024**3 / product,
        "numpy, as the native probe cannot be built here; a lower bound",
    )


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
