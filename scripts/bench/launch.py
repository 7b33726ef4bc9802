"""Become another program that ends with its parent, even while it is stopped.

python -m umbra.scripts.bench.launch COMMAND ARGUMENT ...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: a stopped process could not end by itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
