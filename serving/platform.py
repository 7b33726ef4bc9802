"""Settings of the process that must be made before JAX is imported. This module does not import it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..configs.files import cache_dir
from ..configs.machine import cores
from ..kernels import native

GOOGLE_PCI_VENDOR = "0x1ae0"


def has_tpu() -> bool:
    """Whether this machine has a TPU device (not: whether libtpu is installed): `/dev/accel0` on older hosts, and a
    PCI device of Google's with a VFIO group on those since v5e."""
    if list(Path("/dev").glob("accel[0-9]*")):
        return True
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == GOOGLE_PCI_VENDOR:
                return bool(list(Path("/dev/vfio").glob("[0-9]*")))
    return False


def setup(threads: int | None = None, devices: int | None = None, kernels: str = "auto") -> None:
    """Choose the platform, size the thread pools, and switch the persistent compilation cache on.

    `threads` limits the threads that compute (default: the cores this process may use): those of the native kernels,
    beside which XLA's pool has one thread, or XLA's own where `kernels` is "xla" or there are no native ones. `devices`
    splits the CPU into that many devices, to run a mesh without an accelerator. What the user has set in the
    environment stays.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if not has_tpu() and kernels != "xla" and native.unavailable() is None:
        os.environ.setdefault("NPROC", "1")  # what XLA sizes its pool by
        native.set_threads(threads or cores())
    elif threads is not None:
        os.environ["NPROC"] = str(threads)
    if not has_tpu():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if devices is not None and devices > 1 and os.environ.get("JAX_PLATFORMS") == "cpu":
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "compile"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def parse_mesh(text: str) -> tuple[int, int]:
    """`data=2,model=4` as (2, 4); either part may be missing and is then 1."""
    sizes = {"data": 1, "model": 1}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(f"mesh {text!r} is not understood; write for example data=2,model=4")
        sizes[axis.strip()] = int(size)
    return sizes["data"], sizes["model"]
