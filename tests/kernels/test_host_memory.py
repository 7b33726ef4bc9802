"""Host memory for arrays: taken over without a copy, and on huge pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from umbra.kernels.host_memory import aligned_empty, move_to_huge_pages

HUGE_PAGE = 1 << 21


def test_buffers_become_arrays_without_a_copy() -> None:
    for size in (100, 3 << 20):
        buffer = aligned_empty((size,), np.dtype(np.uint8))
        buffer[:] = 7
        array = jax.device_put(buffer, jax.devices("cpu")[0])
        assert array.unsafe_buffer_pointer() == buffer.ctypes.data
        del buffer
        assert int(array[0]) == int(array[-1]) == 7


def test_arrays_move_to_huge_pages() -> None:
    x = jnp.arange(3 << 20, dtype=jnp.int32)
    want = np.asarray(x).copy()
    move_to_huge_pages(x)
    move_to_huge_pages(jnp.zeros(3))  # smaller than a page
    np.testing.assert_array_equal(np.asarray(x), want)
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if sys.platform == "linux" and enabled.exists() and "[never]" not in enabled.read_text():
        assert "hg" in flags(-(-x.unsafe_buffer_pointer() // HUGE_PAGE) * HUGE_PAGE)


def flags(address: int) -> list[str]:
    """Those of the mapping at an address of this process: `hg` asks for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")
