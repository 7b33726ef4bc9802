"""Does a folder keep what it is given, and how fast does it give it back?"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from isal.isal_zlib import crc32


def measure_folder(folder: Path, nbytes: int) -> float | None:
    """Write, sync and read back a file of `nbytes`; bytes a second of the fastest of three reads, or None if there is
    no room for it.

    Raises `OSError` if the folder gives back something else, or fails in another way.
    """
    path = folder / f".selftest-{os.getpid()}"
    data = secrets.token_bytes(nbytes)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        try:
            os.pwrite(fd, data, 0)
            os.fdatasync(fd)
        except OSError:
            return None  # full: what is there can still be read
        seconds = []
        for _ in range(3):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            same = crc32(os.pread(fd, nbytes, 0)) == crc32(data)
            seconds.append(time.perf_counter() - start)
            if not same:
                raise OSError(f"{folder} does not give back what was written to it")
        return nbytes / min(seconds)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
