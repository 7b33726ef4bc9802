"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from ...configs.machine import cores

FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that decide how fast a CPU runs a model."""

WIDEST = ("amx_int8", "avx512_vnni", "avx512f", "avx2", "asimd")
"""The widest vector extensions first."""


def machine() -> dict[str, Any]:
    """CPU, instruction sets, memory, system, and how busy the machine was when the measurement began."""
    info = _cpuinfo()
    there = set((info.get("flags") or info.get("Features") or "").split())
    flags = [flag for flag in FLAGS if flag in there]
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "flags": flags,
        "instructions": next((flag for flag in WIDEST if flag in flags), "none named"),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.split(":", 1) for line in path.read_text().split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
