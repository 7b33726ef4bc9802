"""Native CPU kernels: built on first use, loaded into the process, called from JAX programs.

    from umbra.kernels import native
    if (reason := native.unavailable()) is None:
        y = jax.ffi.ffi_call(native.handler("umbra_probe"), results)(work=1)

`UMBRA_THREADS` and `UMBRA_ISA` (portable, avx2, avx512, amx) preset what `set_threads` and `set_isa` change.
"""

from .library import ISAS, NativeError, handler, isa, isas, load, set_isa, set_threads, threads, unavailable, version

__all__ = [
    "ISAS",
    "NativeError",
    "handler",
    "isa",
    "isas",
    "load",
    "set_isa",
    "set_threads",
    "threads",
    "unavailable",
    "version",
]
