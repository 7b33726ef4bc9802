"""A pool of blocks in an object store, shared by machines: one zarr3 array, one chunk (and object) per block.

    array     [2^56, record bytes] of bytes, chunks of one row, each with a CRC-32C
    row       the first 56 bits of a block's key; the record in it is that of segment files, so a row of another
              block, or one that was written by other weights, is noticed
    path      <url>/<model fingerprint>/: machines that compute the same bits share, others never meet

There is no index but the list of objects, which is fetched at the start and refreshed now and then: what another
machine has written since is found later, what was removed meanwhile is noticed when it is read. Whole blocks only; the
store's own life-cycle rules remove old ones.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from ..configs.engine import BLOCK
from .index import Entry
from .keys import BlockInfo
from .policies import LRU
from .record import HEADER, Damaged, Header, Kind, Place, decode, encode, padded, record_bytes, verify
from .tier import Put, Tier

log = logging.getLogger(__name__)

_ROW_BITS = 56
_STORE = b"umbra objects v1"


class ObjectTier(Tier[int]):
    """Blocks of `codec`, `block_bytes` each, computed by `model`, under `url`."""

    name = "objects"

    def __init__(
        self,
        url: str,
        codec: str,
        block_bytes: int,
        model: bytes,
        *,
        quota: int,
        retry: float = 60.0,
        concurrency: int = 4,
    ) -> None:
        """Raises `ValueError` or `OSError` if the store cannot be reached or holds another kind of array."""
        super().__init__(LRU)
        import tensorstore

        self.codec, self.model, self.quota, self.retry = codec, model, quota, retry
        self.block_bytes = block_bytes
        self._record = record_bytes(block_bytes)
        limit = {"limit": concurrency}
        context = {"file_io_concurrency": limit, "data_copy_concurrency": limit}
        if url.startswith("s3://"):
            context["s3_request_concurrency"] = limit
        elif url.startswith("gs://"):
            context["gcs_request_concurrency"] = limit
        spec = {
            "driver": "zarr3",
            "kvstore": f"{url.rstrip('/')}/{model.hex()}/",
            "metadata": {
                "shape": [1 << _ROW_BITS, self._record],
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, self._record]}},
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                "fill_value": 0,
            },
            "context": context,
        }
        self._array: Any = tensorstore.open(spec, open=True, create=True).result()
        self._known: set[int] = set()
        self._retry_at = 0.0
        self.refresh()

    def refresh(self) -> int:
        """Fetch the list of objects; how many blocks it names. Takes a request per thousand of them."""
        rows = set()
        for name in self._array.kvstore.list().result():
            parts = name.decode().split("/")
            if len(parts) == 3 and parts[0] == "c":
                rows.add(int(parts[1]))
        with self.lock:
            self._known = rows
        return len(rows)

    @staticmethod
    def row(key: bytes) -> int:
        return int.from_bytes(key[: _ROW_BITS // 8], "big")

    # ---- blocks come

    def put(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Put:
        """Store a block. What it continues may have been written by another machine. Moves bytes over a network."""
        with self.io:
            with self.lock:
                if self.index.find(info) is not None or self.row(info.key) in self._known:
                    return Put.KNOWN
            refused = self._room(info, len(payload))
            if refused is not None:
                return refused
            try:
                entry = self._store(info, payload, crc)
            except (OSError, ValueError, RuntimeError) as error:
                return self._stop(error)
            with self.lock:
                self._known.add(entry.place)
                self.written_bytes += len(payload)
                self.read_only_reason = None
                if self.index.get(info.key) is None and self.index.reachable(info):
                    self.index.add(entry)
            return Put.WRITTEN

    def has(self, info: BlockInfo) -> bool:
        return info.n_tokens != BLOCK or self.index.find(info) is not None or self.row(info.key) in self._known

    def _room(self, info: BlockInfo, payload_bytes: int) -> Put | None:
        if self.read_only:
            return Put.READ_ONLY
        if payload_bytes != self.block_bytes or info.model != self.model:
            return Put.NOT_KEPT
        return Put.FULL if self.used_bytes + self._record > self.quota else None

    def _store(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Entry[int]:
        row = self.row(info.key)
        header = Header(Kind.BLOCK, Place(_STORE, 0, 0), 0, time.time(), info, self.codec, len(payload), crc)
        record = np.zeros(self._record, np.uint8)
        record[:HEADER] = np.frombuffer(encode(header), np.uint8)
        record[HEADER : HEADER + len(payload)] = np.frombuffer(payload, np.uint8)
        self._array[row].write(record).result()
        return Entry(info, row, self._record, len(payload), crc)

    def _stop(self, error: Exception) -> Put:
        if self.read_only_reason is None:
            log.warning("the object store takes no more blocks for now: %s", error)
        self.read_only_reason = f"writing failed: {error}"
        self._retry_at = time.monotonic() + self.retry
        return Put.READ_ONLY

    @property
    def read_only(self) -> bool:
        """Whether the tier takes no blocks now."""
        return self.read_only_reason is not None and time.monotonic() < self._retry_at

    # ---- blocks are found

    def acquire_chain(self, chain: list[BlockInfo]) -> list[Entry[int]]:
        """As in other tiers; what only the list of objects promises is verified when it is read."""
        with self.lock:
            for info in chain:
                if self.index.get(info.key) is not None:
                    continue
                if info.n_tokens != BLOCK or self.row(info.key) not in self._known or not self.index.reachable(info):
                    break
                self.index.add(Entry(info, self.row(info.key), self._record, self.block_bytes, -1))
            return super().acquire_chain(chain)

    def _load(self, entry: Entry[int], buffer: np.ndarray | None) -> memoryview:
        del buffer  # tensorstore reads into memory of its own
        try:
            record = np.ascontiguousarray(self._array[entry.place].read().result()).data
        except (ValueError, RuntimeError) as error:  # tensorstore's words for a CRC-32C that does not match
            raise Damaged("checksum" if "crc" in str(error).lower() else "io_error", str(error)) from error
        header = decode(record)
        payload = record[HEADER : HEADER + padded(header.payload_bytes)]
        verify(header, payload, place=Place(_STORE, 0, 0), info=entry.info, codec=self.codec)
        if header.payload_bytes != self.block_bytes:
            raise Damaged("codec", f"{header.payload_bytes} bytes instead of {self.block_bytes}")
        entry.crc = header.payload_crc
        return payload[: header.payload_bytes]

    # ---- blocks go

    def _erase(self, entry: Entry[int]) -> None:
        self._known.discard(entry.place)
        try:
            self._array.kvstore.write(f"c/{entry.place}/0", None).result()
        except (OSError, ValueError, RuntimeError) as error:
            self._stop(error)

    @property
    def used_bytes(self) -> int:
        return len(self._known) * self._record

    @property
    def capacity_bytes(self) -> int:
        return self.quota
