"""What the contract suites of the kernels share: every backend, and every instruction set of the native one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["xla", "cpu-portable", "cpu-avx2", "cpu-avx512", "cpu-amx"])
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backends of a CPU, one after the other; what this machine lacks is skipped."""
    from umbra.kernels import native

    backend, _, isa = request.param.partition("-")
    if isa:
        if reason := native.unavailable():
            pytest.skip(reason)
        if isa not in native.isas():
            pytest.skip(f"this processor has no {isa}")
        native.set_isa(isa)
    yield backend
    if isa:
        native.set_isa(None)
