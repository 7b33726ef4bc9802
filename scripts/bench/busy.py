"""Busy neighbours: processes that want a core for themselves, as others on a shared machine do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

SETTLE = 0.2
"""Seconds for the neighbours to start."""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes of ordinary priority that compute all the time. They end with this one."""
    spin = [sys.executable, "-m", "umbra.scripts.bench.launch", sys.executable, "-S", "-c", "while True: pass"]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            running.append(subprocess.Popen(spin, stdin=subprocess.DEVNULL, start_new_session=True))
        time.sleep(SETTLE if processes else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
