"""Memory that blocks are read into, kept and used again: new memory takes longer to be touched than to be filled."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..kernels.host_memory import aligned_empty

READY_BYTES = 32 * 2**20
"""What is touched at the start, so that the first blocks find it."""


class Buffers:
    """Buffers of one size, a multiple of 64 bytes. Thread-safe; one that is not given back is simply gone."""

    def __init__(self, nbytes: int, most: int) -> None:
        """`most`: bytes that are kept for later."""
        self._nbytes = nbytes
        self._free: deque[np.ndarray] = deque(maxlen=max(most // nbytes, 1))
        if most >= nbytes:
            kept = aligned_empty((most // nbytes, nbytes), np.dtype(np.uint8))
            kept[: max(READY_BYTES // nbytes, 1)] = 0
            self._free.extendleft(kept)

    def take(self) -> np.ndarray:
        """uint8 `[nbytes]`, with anything in it, at a multiple of 64 bytes."""
        try:
            return self._free.pop()  # the one used last: the likeliest to be in a cache
        except IndexError:
            return aligned_empty((self._nbytes,), np.dtype(np.uint8))

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back that nobody reads any more."""
        self._free.append(buffer)
