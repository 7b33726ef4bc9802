"""Memory that blocks are read into, kept and used again: new memory takes longer to be touched than to be filled."""

from __future__ import annotations

from collections import deque

import numpy as np

READY_BYTES = 32 * 2**20
"""What is touched at the start, so that the first blocks find it,"""
READY = 32
"""and at most so many buffers."""


class Buffers:
    """Buffers of one size. Thread-safe; one that is not given back is simply gone."""

    def __init__(self, nbytes: int, most: int) -> None:
        """`most`: bytes that are kept for later."""
        self._nbytes = nbytes
        self._free: deque[np.ndarray] = deque(maxlen=max(most // nbytes, 1))
        for _ in range(min(READY_BYTES // nbytes, READY, most // nbytes)):
            self.give(np.full(nbytes, 0, np.uint8))

    def take(self) -> np.ndarray:
        """uint8 `[nbytes]`, with anything in it."""
        try:
            return self._free.pop()  # the one used last: the likeliest to be in a cache
        except IndexError:
            return np.empty(self._nbytes, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back that nobody reads any more."""
        self._free.append(buffer)
