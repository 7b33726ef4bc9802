"""The cold tier: blocks in segment files, found again after a restart by walking through them.

Quota. Room is counted as the disk counts it (allocated blocks of all files in the folder, other owners' too) and made
before anything is written: by giving up exactly what is missing, the leaves that were used least recently first. Beyond
that `tidy` keeps the folder between two watermarks. The file system keeps a reserve.

Durability. Records are appended, then made durable in groups (`sync`); a block is findable as soon as it is appended,
since whoever reads it verifies it. A process that is killed loses nothing that was appended, a machine that loses its
power at most the last group. Either way a record is whole or is not there.

Failure. When the disk is full, fails, or the folder cannot be written, the tier is read-only for a while and then tries
again; blocks that are there are still found.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .folder import Folder
from .index import Entry, TierIndex
from .keys import BlockInfo
from .policies import LRU
from .record import ALIGN, Damaged, Header, Kind, Place, decode, record_bytes, verify
from .segment import SUFFIX, Foreign, Segment, can_punch
from .tier import Put, Tier

log = logging.getLogger(__name__)

Location = tuple[Segment, Header]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTier(Tier[Location]):
    """At most `quota` physical bytes in `base`, blocks of `codec` only."""

    name = "disk"

    def __init__(
        self,
        base: Path,
        codec: str,
        *,
        quota: int,
        model: bytes = b"",
        segment_bytes: int | None = None,
        reserve: int | None = None,
        tenant_share: float = 1.0,
        watermarks: tuple[float, float] = (0.90, 0.75),
        retry: float = 60.0,
    ) -> None:
        """`model`: fingerprint of whose blocks to keep longest; blocks of others are the first to go.
        `reserve`: bytes left free on the file system; None: `Folder.default_reserve`. `retry`: seconds."""
        super().__init__(LRU)
        self.codec, self.quota, self.retry = codec, quota, retry
        self.tenant_share, self.watermarks = tenant_share, watermarks
        self.segment_bytes = segment_bytes or (256 << 20 if quota >= 8 << 30 else max(quota // 16, 4 << 20))
        self.folder = Folder.open(base)
        self.reserve = self.folder.default_reserve() if reserve is None else reserve
        self._retry_at = 0.0
        self._full = False  # what failed last, failed for want of room
        self.appended_bytes = 0  # records, moved ones included: over `written_bytes` this is write amplification
        self.torn_bytes = self.foreign_files = self.other_models = 0
        self._segments: dict[int, Segment] = {}
        self._sizes: dict[int, int] = {}  # physical bytes by segment
        self._active: Segment | None = None
        self._unsynced = 0
        self._sequence = 0
        self._punches = self.folder.writable and can_punch(self.folder.path)
        self._draining = False  # above the high watermark, until below the low one
        if not self.folder.writable:
            self._go_read_only("the folder cannot be written", forever=True)
        self._open_all(model)

    # ---- start

    def _open_all(self, model: bytes) -> None:
        found: list[tuple[Segment, Header]] = []
        for path in sorted(self.folder.path.glob("*" + SUFFIX)):
            segment = self._open_segment(path)
            if segment is None:
                continue
            scan = segment.scan(repair=self.folder.writable)
            self._segments[segment.number] = segment
            self.torn_bytes += scan.torn
            if scan.damaged:
                self.lost["header"] += scan.damaged
            self._sequence = max([self._sequence, *(header.sequence for header in scan.headers)])
            alive = [header for header in scan.headers if header.kind is Kind.BLOCK]
            segment.records, segment.live_bytes = len(alive), sum(header.record_bytes for header in alive)
            found += [(segment, header) for header in alive]
        self._index_found(found, model)
        for segment in list(self._segments.values()):
            self._measure(segment)
            self._drop_if_empty(segment)

    def _open_segment(self, path: Path) -> Segment | None:
        try:
            return Segment.open(path, self.folder.store, writable=self.folder.writable)
        except (Foreign, OSError) as error:
            log.warning("%s is not used: %s", path, error)
            self.foreign_files += 1
            if isinstance(error, Foreign) and self.folder.writable:
                path.unlink(missing_ok=True)  # a cache of nobody: it would only take room
            return None

    def _index_found(self, found: list[Location], model: bytes) -> None:
        """Index what was found: heads before what continues them; blocks of other models are the oldest."""
        newest: dict[bytes, Location] = {}
        for location in sorted(found, key=lambda location: location[1].sequence):
            older = newest.pop(location[1].info.key, None)
            if older is not None:
                self._cross_out(older[0], [older[1]])
            newest[location[1].info.key] = location
        order = sorted(
            newest.values(),
            key=lambda location: (location[1].info.model == model, location[1].info.position, location[1].sequence),
        )
        self.other_models = sum(header.info.model != model for _, header in order)
        for segment, header in order:
            info = header.info
            if header.codec == self.codec and info.expected_key() == info.key and self.index.reachable(info):
                self.index.add(self._entry(segment, header))
            else:
                self.lost["headless"] += 1
                self._cross_out(segment, [header])
        recent = sorted(self.index, key=lambda entry: entry.place[1].sequence)
        self.index.use(reversed([entry for entry in recent if entry.info.model == model]))

    @staticmethod
    def _entry(segment: Segment, header: Header) -> Entry[Location]:
        place = (segment, header)
        return Entry(header.info, place, header.record_bytes, header.payload_bytes, header.payload_crc)

    # ---- bytes

    def _store(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Entry[Location]:
        segment = self._writable_segment(record_bytes(len(payload)))
        self._sequence += 1
        sequence, written = self._sequence, time.time()
        header = segment.append(
            lambda place: Header(Kind.BLOCK, place, sequence, written, info, self.codec, len(payload), crc), payload
        )
        self._unsynced += header.record_bytes
        self.appended_bytes += header.record_bytes
        self._measure(segment)
        return self._entry(segment, header)

    def _writable_segment(self, need: int) -> Segment:
        active = self._active
        if active is not None and active.size + need > self.segment_bytes and active.records:
            active.sync()
            self._active = active = None
        if active is None:
            number = max(self._segments, default=0) + 1
            active = self._active = Segment.create(self.folder.path, self.folder.store, number)
            self._segments[number] = active
        return active

    def _load(self, entry: Entry[Location], buffer: np.ndarray | None) -> memoryview:
        place = entry.place
        try:
            return self._load_from(entry, place, buffer)
        except Damaged:
            if entry.place is place:
                raise
            return self._load_from(entry, entry.place, buffer)  # it was moved meanwhile

    def _load_from(self, entry: Entry[Location], location: Location, buffer: np.ndarray | None) -> memoryview:
        segment, expected = location
        head, payload = segment.read(expected.place.offset, entry.payload_bytes, buffer)
        place = Place(self.folder.store, segment.number, expected.place.offset)
        verify(decode(head), payload, place=place, info=entry.info, codec=self.codec)
        return payload[: entry.payload_bytes]

    def expect(self, entries: list[Entry[Location]]) -> None:
        """Ask the system to read blocks ahead."""
        for entry in entries:
            entry.place[0].expect(entry.place[1].place.offset, entry.payload_bytes)

    def _erase(self, entry: Entry[Location]) -> None:
        self._cross_out(entry.place[0], [entry.place[1]])

    def _erase_all(self, entries: list[Entry[Location]]) -> None:
        by_segment: dict[Segment, list[Header]] = {}
        for entry in entries:
            by_segment.setdefault(entry.place[0], []).append(entry.place[1])
        for segment, headers in by_segment.items():
            self._cross_out(segment, headers)

    def _cross_out(self, segment: Segment, headers: list[Header]) -> None:
        """Delete records of one segment; if they are all it has, the file."""
        try:
            if self.folder.writable:
                if len(headers) == segment.records and segment is self._active:
                    self._active = None
                if len(headers) == segment.records:
                    segment.records = segment.live_bytes = 0
                else:
                    for run in _runs(headers):
                        segment.delete(run)
        except OSError as error:
            self._go_read_only(f"deleting failed: {error}")
        self._measure(segment)
        self._drop_if_empty(segment)

    def _drop_if_empty(self, segment: Segment) -> None:
        if segment.records or segment is self._active or not self.folder.writable:
            return
        try:
            segment.unlink()
        except OSError as error:
            self._go_read_only(f"removing a segment failed: {error}")
            return
        self._segments.pop(segment.number, None)
        self._sizes.pop(segment.number, None)

    def _measure(self, segment: Segment) -> None:
        if segment.number in self._segments:
            self._sizes[segment.number] = segment.physical_bytes

    # ---- room

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def capacity_bytes(self) -> int:
        return max(0, self.quota - self.folder.others_bytes)

    @property
    def read_only(self) -> bool:
        """Whether the tier takes no blocks now."""
        return self.read_only_reason is not None and time.monotonic() < self._retry_at

    def _go_read_only(self, reason: str, *, forever: bool = False) -> None:
        if self.read_only_reason is None:
            log.warning("the cache folder %s takes no more blocks: %s", self.folder.path, reason)
        self.read_only_reason = reason
        self._retry_at = float("inf") if forever else time.monotonic() + self.retry

    def _room(self, info: BlockInfo, payload_bytes: int) -> Put | None:
        if self.read_only:
            return Put.READ_ONLY
        need = record_bytes(payload_bytes) + ALIGN  # and the first page of a segment
        share = self.tenant_share * self.quota
        if need > min(self.capacity_bytes, share):
            return Put.FULL
        while self.index.space_bytes[info.space] + need > share:
            if not self._evict("tenant_share", info, info.space):
                return Put.FULL
        while self.used_bytes + need > self.capacity_bytes:
            if not self._free_some("quota", info):
                return Put.FULL
        while self.folder.free_bytes() - need < self.reserve:
            if not self._free_some("disk_free", info):
                self._go_read_only("the file system is full but for its reserve")
                return Put.READ_ONLY
        return Put.READ_ONLY if self.read_only else None

    def _store_and_index(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Put | None:
        refused = super()._store_and_index(info, payload, crc)
        if refused is Put.READ_ONLY and self._full and self._evict_bytes(record_bytes(len(payload)), info):
            self._retry_at = 0.0
            refused = super()._store_and_index(info, payload, crc)
        if refused is None and self.read_only_reason is not None:
            log.warning("the cache folder %s takes blocks again", self.folder.path)
            self.read_only_reason = None
        return refused

    def _evict_bytes(self, need: int, info: BlockInfo) -> bool:
        """Give up blocks that take `need` bytes together; False if that cannot be done."""
        goal = self.index.bytes - need
        while self.index.bytes > goal:
            if not self._free_some("disk_full", info):
                return False
        return True

    def _free_some(self, reason: str, info: BlockInfo | None = None) -> bool:
        """Give up a block, or, where single ones leave no room behind, all of the oldest segment; False if nothing may
        go. `info` is about to be stored."""
        if self._punches:
            return self._evict(reason, info)
        chain = None if info is None else self.index.get(info.parent)
        with self.lock:
            if chain is not None:
                self.index.hold(chain)
            try:
                return any(self._free_segment(segment, reason) for segment in list(self._segments.values()))
            finally:
                if chain is not None:
                    self.index.release(chain)

    def _free_segment(self, segment: Segment, reason: str) -> bool:
        """Give up the blocks of a segment; whether that removed the file."""
        inside = [entry.info.key for entry in self.index if entry.place[0] is segment]
        for key in inside:
            if self.index.get(key) is not None and not self.index.held(key):
                self._remove(key, reason)
        if segment is self._active and not segment.records:
            self._active = None
        self._drop_if_empty(segment)
        return segment.number not in self._segments

    def _failed(self, error: OSError) -> Put:
        broken, self._active = self._active, None  # whatever is wrong with this file, the next attempt begins another
        self._full = error.errno in _NO_ROOM
        self._go_read_only("the disk is full" if self._full else f"writing failed: {error}")
        if broken is not None:
            self._drop_if_empty(broken)
        return Put.READ_ONLY

    # ---- upkeep, beside the step

    def sync(self) -> int:
        """Make everything that was appended durable; how many bytes that were. Takes milliseconds."""
        with self.io:
            unsynced, segment, self._unsynced = self._unsynced, self._active, 0
            if unsynced and segment is not None:
                try:
                    segment.sync()
                except OSError as error:
                    self._failed(error)
            return unsynced

    def tidy(self, most: int = 64) -> int:
        """Keep the watermarks, and rewrite segments that are mostly deleted, `most` blocks at a time; how many were
        evicted or moved."""
        with self.io:
            if self.read_only:
                return 0
            return self._keep_watermarks(most) or self._compact(most)

    def _keep_watermarks(self, most: int) -> int:
        high, low = (share * self.capacity_bytes for share in self.watermarks)
        done = 0
        if self.used_bytes > high:
            self._draining = True
        while self._draining and done < most:
            self._draining = self.used_bytes > low and self._free_some("watermark")
            done += self._draining
        return done

    def _compact(self, most: int) -> int:
        """Move the live records of the emptiest old segment to the newest. Where deleted records take no room anyway,
        only the number of files is gained."""
        worth = 0.125 if self._punches else 0.5
        for segment in sorted(self._segments.values(), key=lambda segment: segment.live_bytes):
            if segment is not self._active and segment.live_bytes < worth * segment.size:
                return self._move_from(segment, most)
        return 0

    def _move_from(self, segment: Segment, most: int) -> int:
        with self.lock:
            entries = [entry for entry in self.index if entry.place[0] is segment][:most]
        moved = 0
        for entry in entries:
            try:
                payload = self._load(entry, None)
            except (Damaged, OSError) as error:
                self.lose(entry, getattr(error, "reason", "io_error"))
                continue
            try:
                new = self._store(entry.info, payload, entry.crc)
            except OSError as error:
                self._failed(error)
                return moved
            old, entry.place = entry.place, new.place
            self._cross_out(old[0], [old[1]])
            moved += 1
        self._drop_if_empty(segment)
        return moved

    def close(self) -> None:
        """Make everything durable and let another process have the folder."""
        with self.io:
            self.sync()
            self._active = None
            for segment in list(self._segments.values()):
                self._drop_if_empty(segment)
            with self.lock:
                self.index = TierIndex(LRU)  # lets go of the files
            self._segments.clear()
            self._sizes.clear()
            self.folder.close()

    def forget_pages(self) -> None:
        """Drop the blocks from the page cache, so that they are next read from the disk (for measurements)."""
        for segment in self._segments.values():
            segment.forget_pages()


def _runs(headers: list[Header]) -> Iterator[list[Header]]:
    """Records of one segment, in groups that lie one behind the other."""
    run: list[Header] = []
    for header in sorted(headers, key=lambda header: header.place.offset):
        if run and run[-1].place.offset + run[-1].record_bytes != header.place.offset:
            yield run
            run = []
        run.append(header)
    if run:
        yield run
