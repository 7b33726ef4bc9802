"""Settings of a process that compiles for a TPU without having one. This module does not import JAX."""

from __future__ import annotations

import os


def prepare() -> None:
    """Must run before libtpu is loaded and, where nothing else has chosen the CPU, before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # no TPU is looked for ...
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # ... and libtpu does not ask the cloud which one this machine has
    # Compiling touches no device, so several processes may do it at once, also beside a running server.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # Quiet: libtpu complains about the hosts it does not find.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
