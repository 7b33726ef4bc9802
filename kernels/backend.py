"""Which implementation of each operation runs: plain JAX (`xla`), native code on a CPU (`cpu`) or Pallas (`tpu`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Backend = Literal["xla", "cpu", "tpu"]

ASKED = ("auto", "xla", "cpu", "tpu")
"""What can be asked for."""


class Kernels(NamedTuple):
    """The backend of every operation; part of a program's static description."""

    linear: Backend = "xla"
    attention: Backend = "xla"
    sample: Backend = "xla"
    draft: Backend = "xla"
    passes: Backend = "xla"


class Chosen(NamedTuple):
    kernels: Kernels
    why: str
    """One sentence for the log."""
    fallback: bool = False
    """Whether the platform's own kernels should have been taken, but cannot run."""


def choose(platform: str, asked: str = "auto") -> Chosen:
    """The backends for programs of `platform` ("cpu" or "tpu").

    `auto` takes the platform's own kernels where they can run, else plain JAX. Any other name must be possible: a
    `ValueError` says why it is not, and what is.
    """
    if asked not in ASKED:
        raise ValueError(f"kernels {asked!r} are not known; supported: {', '.join(ASKED)}")
    obstacle = None if asked == "xla" else _obstacle(platform)
    own: Backend = "tpu" if platform == "tpu" else "cpu"
    if asked == "xla":
        return Chosen(Kernels(), "plain JAX, as asked")
    if asked == "auto" and obstacle:
        return Chosen(Kernels(), f"plain JAX, which is slow: {obstacle}", fallback=True)
    if asked not in ("auto", own):
        raise ValueError(f"kernels {asked!r} do not run on the platform {platform}; supported here: auto, xla, {own}")
    if obstacle:
        raise ValueError(f"kernels {asked!r} cannot be used: {obstacle}; supported here: auto, xla")
    small: Backend = "cpu" if own == "cpu" else "xla"
    how = "native kernels" if own == "cpu" else "Pallas kernels; sampling in plain JAX, which the compiler fuses"
    return Chosen(Kernels(own, own, small, own, small), how)


def _obstacle(platform: str) -> str | None:
    """Why the platform's own kernels cannot run here; None when they can."""
    if platform == "tpu":
        return None
    if platform != "cpu":
        return f"there are no kernels for the platform {platform}"
    from . import native

    return native.unavailable()
