"""What this process may use of the machine."""

from __future__ import annotations

import os


def cores() -> int:
    """CPU cores this process may run on: its affinity mask where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
