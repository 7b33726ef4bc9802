"""What decides the bits of a logit and of KV: the numerics class of this machine, and with weights, layers and owner
the identity of blocks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jaxlib
from jax.sharding import Mesh

from ...cache.keys import Identity, Namespaces, model_fingerprint
from ...kernels import native
from ...kernels.attention import SCHEMA, KVFormat
from ...kernels.backend import Kernels

if TYPE_CHECKING:
    from ...model.load import Model
    from ...model.tokenizer import Tokenizer


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


def kv_fingerprint(model: Model, numerics: str, kv: KVFormat, layers: tuple[int, ...] | None = None) -> bytes:
    """The name of everything besides tokens that decides the bytes of KV: KV of other layers (None: all) is other KV.

    Raises `ValueError` for layers that the model does not have.
    """
    if layers is not None and not 0 <= layers[0] <= layers[-1] < model.config.n_layers:
        raise ValueError(f"layers are numbered 0 to {model.config.n_layers - 1}, got {list(layers)}")
    trunk = dataclasses.asdict(model.config)
    del trunk["name"]  # names are given to other weights, and the same weights have several
    return model_fingerprint(
        weights_id=model.weights_id, numerics_class=numerics, kv_format=f"{kv.name} {kv.scale_dtype}", schema=SCHEMA,
        trunk=trunk, tokenizer=_vocabulary(model.tokenizer, model.config.vocab_size), layers=layers,
    )  # fmt: skip


@functools.lru_cache(1)  # a store and an engine ask for the same one
def _vocabulary(tokenizer: Tokenizer | None, size: int) -> bytes:
    """A digest of what the token ids stand for."""
    digest = hashlib.sha256()
    if tokenizer is not None:
        for token in range(size):
            text = tokenizer.token_bytes(token)
            digest.update(len(text).to_bytes(4, "little") + text)
    return digest.digest()


class Identities:
    """Whose KV a request may share: that of the same principal and the same layers. For any thread."""

    def __init__(self, model: Model, numerics: str, kv: KVFormat, namespaces: Namespaces) -> None:
        self._fingerprint = functools.cache(functools.partial(kv_fingerprint, model, numerics, kv))
        self._namespaces = namespaces
        self._of = functools.lru_cache(4096)(self._make)

    def fingerprint(self, layers: tuple[int, ...] | None) -> bytes:
        """`kv_fingerprint`."""
        return self._fingerprint(layers)

    def of(self, principal: str, layers: tuple[int, ...] | None) -> Identity:
        """Raises `ValueError` for layers that the model does not have."""
        return self._of(principal, layers)

    def _make(self, principal: str, layers: tuple[int, ...] | None) -> Identity:
        return Identity(self._namespaces.of(principal), self._fingerprint(layers))


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
