"""A segment: one file of records, appended to and never changed, except that a deleted record is crossed out.

The file begins with a page that names its store and its number. Deleting a record overwrites its header with one that
says so, and gives its payload's bytes back to the file system where that can be done (hole punching); so a deleted
block is gone from the disk at once, and the rest of the file can still be walked from record to record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from .record import ALIGN, HEADER, MAGIC, Damaged, Header, Kind, Place, decode, encode, padded, padding, record_bytes

SUFFIX = ".blocks"
_START = struct.Struct("<8sH16sQ")
_START_MAGIC = b"UMBRASEG"
_VERSION = 1
_KEEP_SIZE_AND_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_SCAN = 4 << 20


class Foreign(Exception):
    """A file is not a segment, or one of another store or number."""


@dataclass
class Scan:
    """What a walk through a segment found."""

    headers: list[Header]
    damaged: int = 0  # places where a record should have begun
    torn: int = 0  # bytes cut off at the end: a record whose writing was interrupted


class Segment:
    """An open segment file. One thread writes at a time (its store's lock), any number read."""

    def __init__(self, path: Path, store: bytes, number: int, fd: int, size: int) -> None:
        self.path, self.store, self.number = path, store, number
        self.size = size  # where the next record begins
        self.records = 0  # live ones
        self.live_bytes = 0
        self._fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Readers hold a reference, so that a segment can be unlinked while it is being read. The default is looked up
        # now: at the end of a process the module may be gone already.
        close(self._fd)

    @staticmethod
    def file_name(number: int) -> str:
        return f"{number:08d}{SUFFIX}"

    @classmethod
    def create(cls, folder: Path, store: bytes, number: int) -> Segment:
        """A new, empty segment, whose name is on the disk when this returns."""
        path = folder / cls.file_name(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            body = _START.pack(_START_MAGIC, _VERSION, store, number).ljust(ALIGN - 4, b"\0")
            _write_all(fd, [body, struct.pack("<I", crc32(body))], 0)
            os.fsync(fd)
            _sync_folder(folder)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return cls(path, store, number, fd, ALIGN)

    @classmethod
    def open(cls, path: Path, store: bytes, *, writable: bool = True) -> Segment:
        """An existing segment. Raises `Foreign` if the file is not the one that its name and `store` promise."""
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            start = os.pread(fd, ALIGN, 0)
            if len(start) < ALIGN or struct.unpack_from("<I", start, ALIGN - 4)[0] != crc32(start[: ALIGN - 4]):
                raise Foreign(f"{path.name} does not begin like a segment")
            magic, version, owner, number = _START.unpack_from(start)
            if (magic, version, owner) != (_START_MAGIC, _VERSION, store) or path.name != cls.file_name(number):
                raise Foreign(f"{path.name} belongs to another store or has another number")
            return cls(path, store, number, fd, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise

    def scan(self, *, repair: bool = True) -> Scan:
        """Walk through all records. `repair` cuts off what an interrupted write has left at the end."""
        end = os.fstat(self._fd).st_size
        scan = Scan([])
        at = ALIGN
        while at < end:
            header = self._header_at(at, end)
            if header is None:
                found = self._next_record(at + ALIGN, end)
                if found is None:
                    scan.torn = end - at
                    break
                scan.damaged += 1
                if repair:
                    punch(self._fd, at, found - at)
                at = found
                continue
            scan.headers.append(header)
            at += header.record_bytes
        self.size = at if repair else -(-end // ALIGN) * ALIGN
        if scan.torn and repair:
            os.ftruncate(self._fd, at)
        return scan

    def _header_at(self, offset: int, end: int) -> Header | None:
        try:
            header = decode(os.pread(self._fd, HEADER, offset))
        except (Damaged, ValueError):
            return None
        whole = header.place == Place(self.store, self.number, offset) and offset + header.record_bytes <= end
        return header if whole else None

    def _next_record(self, start: int, end: int) -> int | None:
        """Where the next whole record begins, at or behind `start`."""
        while start < end:
            data = os.pread(self._fd, _SCAN, start)
            pages = np.frombuffer(data[: len(data) // ALIGN * ALIGN], np.uint8).reshape(-1, ALIGN)
            starts = np.flatnonzero((pages[:, : len(MAGIC)] == np.frombuffer(MAGIC, np.uint8)).all(axis=1))
            for page in starts:
                if self._header_at(start + int(page) * ALIGN, end) is not None:
                    return start + int(page) * ALIGN
            start += _SCAN
        return None

    def append(self, make: Callable[[Place], Header], payload: bytes | memoryview) -> Header:
        """Write a record at the end; `make` gives its header for the place it gets.

        Raises `OSError` with nothing appended.
        """
        header = make(Place(self.store, self.number, self.size))
        try:
            _write_all(self._fd, [encode(header), payload, padding(header.payload_bytes)], self.size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += header.record_bytes
        self.records += 1
        self.live_bytes += header.record_bytes
        return header

    def read(self, offset: int, payload_bytes: int, buffer: np.ndarray | None = None) -> tuple[bytes, memoryview]:
        """Header and payload (with the zeros behind it) of a record, not verified, in `buffer` or new memory. Raises
        `Damaged` if it is cut off, `OSError` if the device fails."""
        nbytes = record_bytes(payload_bytes)
        held = np.empty(nbytes, np.uint8) if buffer is None else buffer[:nbytes]
        got = 0
        while got < nbytes:
            n = os.preadv(self._fd, [held[got:].data], offset + got)
            if not n:
                raise Damaged("truncated", f"{got} of {nbytes} bytes")
            got += n
        view = held.data
        return bytes(view[:HEADER]), view[HEADER : HEADER + padded(payload_bytes)]

    def expect(self, offset: int, payload_bytes: int) -> None:
        """Ask the system to read a record ahead; returns at once."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, record_bytes(payload_bytes), os.POSIX_FADV_WILLNEED)

    def forget_pages(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the disk (for measurements)."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def delete(self, run: list[Header]) -> None:
        """Cross out records that lie one behind the other, and give their bytes back.

        Raises `OSError` if the file cannot be written.
        """
        self.records -= len(run)
        self.live_bytes -= sum(header.record_bytes for header in run)
        first = run[0]
        length = sum(header.record_bytes for header in run) - HEADER
        nobody = replace(first.info, tokens=b"", extras={}, key=bytes(32), parent=bytes(32), space=bytes(16))
        dead = replace(first, kind=Kind.DEAD, info=nobody, payload_bytes=length, payload_crc=0)
        _write_all(self._fd, [encode(dead)], first.place.offset)
        start = first.place.offset + HEADER
        if not punch(self._fd, start, length):
            for at in range(start, start + length, _SCAN):
                _write_all(self._fd, [bytes(min(_SCAN, start + length - at))], at)

    def sync(self) -> None:
        """What was appended is on the disk when this returns."""
        os.fdatasync(self._fd)

    @property
    def physical_bytes(self) -> int:
        """What the file takes on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    def unlink(self) -> None:
        """Remove the file; those who read it may go on."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def punch(fd: int, start: int, length: int) -> bool:
    """Give bytes of a file back to the file system; False where it cannot."""
    fallocate = getattr(_libc(), "fallocate", None)
    if fallocate is None:
        return False
    done: int = fallocate(fd, _KEEP_SIZE_AND_PUNCH, ctypes.c_int64(start), ctypes.c_int64(length))
    if done and ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done == 0


def can_punch(folder: Path) -> bool:
    """Whether the file system of `folder` takes bytes back."""
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=".punch-")
    except OSError:
        return False  # it takes nothing at all now
    try:
        _write_all(fd, [bytes(2 * ALIGN)], 0)
        return punch(fd, 0, ALIGN)
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(name)


_loaded: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _loaded:
        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


def _write_all(fd: int, parts: list[bytes | memoryview], offset: int) -> None:
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        n = os.pwritev(fd, views, offset)
        if not n:
            raise OSError(errno.EIO, "nothing was written")
        offset += n
        while views and n >= len(views[0]):
            n -= len(views.pop(0))
        if n:
            views[0] = views[0][n:]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
