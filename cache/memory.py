"""Blocks in host memory: one slab of equal slots. Of use where the device is not the host itself."""

from __future__ import annotations

import numpy as np
from isal.isal_zlib import crc32

from ..kernels.host_memory import aligned_empty
from .index import Entry
from .keys import BlockInfo
from .policies import S3FIFO
from .record import Damaged, padding
from .tier import Put, Tier


class MemoryTier(Tier[int]):
    """At most `capacity` bytes of slots of `block_bytes` each, of which a tail takes a whole one.

    The slab is reserved at once, but the system gives memory only to slots that were used.
    """

    name = "memory"

    def __init__(self, capacity: int, block_bytes: int) -> None:
        super().__init__(S3FIFO)
        slots = capacity // block_bytes
        if slots < 1:
            raise ValueError(f"host memory of {capacity} bytes cannot hold a block of {block_bytes}")
        self._slab = aligned_empty((slots, block_bytes), np.dtype(np.uint8))
        self._free = list(range(slots - 1, -1, -1))

    def _room(self, info: BlockInfo, payload_bytes: int) -> Put | None:
        if payload_bytes > self._slab.shape[1]:
            return Put.FULL
        return None if self._free or self._evict("capacity", info) else Put.FULL

    def _store(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Entry[int]:
        slot = self._free.pop()
        self._slab[slot, : len(payload)] = np.frombuffer(payload, np.uint8)
        return Entry(info, slot, self._slab.shape[1], len(payload), crc)

    def _load(self, entry: Entry[int], buffer: np.ndarray | None) -> memoryview:
        held = np.empty(entry.payload_bytes, np.uint8) if buffer is None else buffer[: entry.payload_bytes]
        held[:] = self._slab[entry.place, : entry.payload_bytes]
        payload = held.data
        if crc32(padding(entry.payload_bytes), crc32(payload)) != entry.crc:
            raise Damaged("checksum", "host memory")
        return payload

    def _erase(self, entry: Entry[int]) -> None:
        self._free.append(entry.place)

    @property
    def used_bytes(self) -> int:
        return self.index.bytes

    @property
    def capacity_bytes(self) -> int:
        return self._slab.nbytes
