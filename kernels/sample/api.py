"""The entry of the sampling kernel: the next token of every row of a step, on the backend asked for.

Letters: B slots, R rows, V vocabulary.
"""

from __future__ import annotations

from jax import Array

from ..backend import Backend
from . import reference
from .base import Choice, RowParams


def choose_rows(logits: Array, rows: RowParams, active: Array, *, backend: Backend) -> Choice:
    """Chooses for the rows of `logits` float32 [R, V] where `active` bool [R] is set.

    The fields of `rows` and of the result have a leading axis [R], but for `rows.counts` int32 [B, V] and
    `rows.masks` uint32 [M, ceil(V / 32)]. Rows that are
    not active get `Choice.none` and cost nothing. Every backend gives the bits of `reference.choose`, row by row.
    """
    if backend == "cpu":
        from .cpu import choose_rows as native_choose_rows

        return native_choose_rows(logits, rows, active)
    return reference.choose_rows(logits, rows, active)
