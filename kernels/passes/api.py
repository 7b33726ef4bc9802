"""The entries of a pass's bookkeeping, on the backend asked for. All backends give the same integers."""

from __future__ import annotations

import jax

from ..backend import Backend
from . import reference
from .base import Advanced, Grown, Layout, Pace, Sent, Slots


def lay_out(slots: Slots, sent: Sent, pace: Pace | None, rows: int, tile: int | None, *, backend: Backend) -> Layout:
    """The layout of the next pass, with at most `rows` rows that choose, one for every slot at least. Its tokens are
    the prompt's and as many as there are rows, filled up to whole tiles of `tile` tokens. Without `pace` no drafts go
    into it."""
    if backend == "cpu":
        from .cpu import lay_out as native_lay_out

        return native_lay_out(slots, sent, pace, rows, tile)
    return reference.lay_out(slots, sent, pace, rows, tile)


def advance(slots: Slots, place: Layout, chosen: jax.Array, *, backend: Backend) -> tuple[Advanced, Grown]:
    """The slots after their rows chose the tokens `chosen` int32 [R], and what they grew by. A slot ends at a stop id
    or at its limit. The slots should be donated: native code updates them in place."""
    if backend == "cpu":
        from .cpu import advance as native_advance

        return native_advance(slots, place, chosen)
    return reference.advance(slots, place, chosen)
