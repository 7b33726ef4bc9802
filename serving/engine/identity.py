"""The numerics class: everything, apart from the weights, that decides the bits of a logit on this machine."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import jax
import jaxlib
from jax.sharding import Mesh

from ...kernels import native
from ...kernels.attention import KVFormat
from ...kernels.backend import Kernels


@functools.cache
def instruction_set() -> str:
    """The widest vector extension XLA:CPU generates code for here."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return "unknown"
    names = {"avx512_vnni": "avx512vnni", "avx512f": "avx512", "avx2": "avx2", "asimd": "neon"}
    return next((name for flag, name in names.items() if flag in flags), "baseline")


def numerics_class(mesh: Mesh, kernels: Kernels, weights: str, kv: KVFormat) -> str:
    """For example `cpu/native-3f9c2d1a/jaxlib-0.10.2/w-float32/kv-int8-scaled-per-token/model-1`.

    Native kernels round alike on every instruction set, so that only their version counts; what XLA compiles depends
    on the machine.
    """
    device = mesh.devices.flat[0]
    if kernels.linear == "cpu":
        code = f"native-{native.version()}"
    else:
        machine = instruction_set() if device.platform == "cpu" else device.device_kind.replace(" ", "-")
        code = f"{machine}/{'pallas' if kernels.linear == 'tpu' else 'xla'}"
    parts = (
        device.platform, code, f"jaxlib-{jaxlib.__version__}", f"w-{_word(weights)}", f"kv-{_word(kv.name)}",
        f"model-{mesh.shape['model']}",
    )  # fmt: skip
    return "/".join(parts)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def system_fingerprint(weights_id: str, numerics: str) -> str:
    """What the API reports: equal fingerprints give equal answers to equal seeded requests."""
    return "fp_" + hashlib.sha256(f"{weights_id}\0{numerics}".encode()).hexdigest()[:12]


class CompilationCounter:
    """Counts every program JAX compiles (or reads from its cache) in this process."""

    count = 0

    @classmethod
    def install(cls) -> None:
        """Start counting; further calls do nothing."""
        if not _installed:
            _installed.append(True)
            jax.monitoring.register_event_duration_secs_listener(cls._heard)

    @classmethod
    def _heard(cls, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            cls.count += 1


_installed: list[bool] = []
