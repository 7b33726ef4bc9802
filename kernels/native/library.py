"""Loads the library of native kernels and makes its custom calls known to XLA.

JAX is imported only to register a call: a program may ask what runs here before it sets JAX up.
"""

from __future__ import annotations

import ctypes
import os
import threading

from . import build

ISAS = ("portable", "avx2", "avx512", "amx")
"""Instruction sets in the order of `Isa` in src/cpu.h."""


class NativeError(RuntimeError):
    """The native kernels cannot be used here: one line that says why."""


_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_reason: str | None = None
_registered: set[str] = set()


def load() -> ctypes.CDLL:
    """The library, built and loaded on the first call. Raises `NativeError`, again at every call, if that failed, and
    `ValueError` if `UMBRA_THREADS` or `UMBRA_ISA` is not possible."""
    global _library, _reason
    with _lock:
        if _library is None and _reason is None:
            try:
                library = _open()
            except build.BuildError as error:
                _reason = str(error)
            else:
                _preset(library)
                _library = library
        if _library is None:
            raise NativeError(_reason)
        return _library


def unavailable() -> str | None:
    """Why the native kernels cannot be used, in one line; None when they can. Builds and loads them on first use."""
    try:
        load()
    except NativeError as error:
        return str(error)
    return None


def _open() -> ctypes.CDLL:
    path = build.library()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # built on another system that shares the cache folder
        path = build.rebuild()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"the native kernels cannot be loaded: {error}") from error


def _preset(library: ctypes.CDLL) -> None:
    if count := os.environ.get("UMBRA_THREADS"):
        if not count.isdigit() or int(count) < 1:
            raise ValueError(f"UMBRA_THREADS must be a number of at least 1, got {count!r}")
        library.umbra_set_thread_count(int(count))
    if name := os.environ.get("UMBRA_ISA"):
        _set_isa(library, name, "UMBRA_ISA")


def handler(name: str) -> str:
    """`name` itself, a custom call of the library (`UMBRA_HANDLER` in src/), registered with XLA on first use."""
    import jax

    library = load()
    with _lock:
        if name not in _registered:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
            _registered.add(name)
    return name


def version() -> str:
    """Names the kernels' sources and how they are compiled: equal for equal bits of every result."""
    return build.key()


def threads() -> int:
    """Threads that may work on one call, the caller included."""
    return load().umbra_thread_count()


def set_threads(count: int | None) -> None:
    """Sets that number; None follows the cores this process may use. Running calls finish as they are."""
    if count is not None and count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    load().umbra_set_thread_count(count or 0)


def isa() -> str:
    """The instruction set that the kernels use: the best this processor has, unless another was set."""
    return ISAS[load().umbra_isa()]


def isas() -> tuple[str, ...]:
    """The instruction sets this processor has, the best last."""
    library = load()
    return tuple(name for i, name in enumerate(ISAS) if library.umbra_supports_isa(i))


def set_isa(name: str | None) -> None:
    """Switches all kernels to an instruction set of `isas()`; None: the best. Not while calls are running."""
    _set_isa(load(), isas()[-1] if name is None else name, "isa")


def _set_isa(library: ctypes.CDLL, name: str, what: str) -> None:
    if name not in ISAS or not library.umbra_set_isa(ISAS.index(name)):
        possible = ", ".join(n for i, n in enumerate(ISAS) if library.umbra_supports_isa(i))
        raise ValueError(f"{what}: this processor cannot run {name!r}; supported: {possible}")
