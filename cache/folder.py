"""Who owns which folder on the disk, and how much room there is.

    <folder>/0/     blocks of the first server: `owner` (locked while it runs), `store` (its random name), segments
    <folder>/1/     of a second one that runs at the same time, and so on

A server takes the lowest number whose lock is free, so after a restart it finds its own blocks again. The quota counts
the whole folder: two servers together keep it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

MAX_OWNERS = 64
_OTHERS_AGE = 5.0  # seconds for which the size of the other owners' files is believed


class Folder:
    """The part of a cache folder that belongs to this process."""

    def __init__(self, base: Path, path: Path, lock: int, store: bytes, writable: bool) -> None:
        self.base, self.path, self.store = base, path, store
        self.writable = writable
        self._lock = lock
        self._others = (0, -_OTHERS_AGE)

    @classmethod
    def open(cls, base: Path) -> Folder:
        """Take the first free part of `base`, which is made if it is missing.

        A folder that cannot be written is opened for reading. Raises `OSError` if that is not possible either.
        """
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            for number in range(MAX_OWNERS):
                path = base / str(number)
                path.mkdir(exist_ok=True, mode=0o700)
                lock = os.open(path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(base, path, lock, _store_name(path), True)
                except BlockingIOError:
                    os.close(lock)
                except OSError:
                    os.close(lock)
                    raise
        except OSError:
            return cls._open_for_reading(base)
        raise OSError(f"{base} has {MAX_OWNERS} owners already")

    @classmethod
    def _open_for_reading(cls, base: Path) -> Folder:
        for number in range(MAX_OWNERS):
            path = base / str(number)
            lock = os.open(path / "owner", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return cls(base, path, lock, bytes.fromhex((path / "store").read_text()), False)
            except BlockingIOError:
                os.close(lock)
            except (OSError, ValueError):
                os.close(lock)
                raise
        raise OSError(f"{base} has {MAX_OWNERS} owners already")

    @property
    def others_bytes(self) -> int:
        """What other owners' files take on the disk, at most a few seconds old."""
        size, at = self._others
        if time.monotonic() - at >= _OTHERS_AGE:
            size = sum(physical_bytes(path) for path in self.base.iterdir() if path.is_dir() and path != self.path)
            self._others = (size, time.monotonic())
        return size

    def free_bytes(self) -> int:
        """Room on the file system for those without privileges."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def default_reserve(self) -> int:
        """Room that is left to others: 2 GiB, or 5 % of the file system if that is more."""
        stat = os.statvfs(self.path)
        return max(2 << 30, stat.f_blocks * stat.f_frsize // 20)

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def physical_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def _store_name(path: Path) -> bytes:
    """16 bytes at random that name the store, made once. A damaged name makes the segments foreign."""
    file = path / "store"
    with contextlib.suppress(FileNotFoundError, ValueError):
        name = bytes.fromhex(file.read_text())
        if len(name) == 16:
            return name
    name = secrets.token_bytes(16)
    temporary = path / ".store"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write(name.hex())
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    return name
