"""Drafting on a TPU: plain JAX, but for the table of all tokens, whose rows a kernel fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .. import linear
from . import reference
from .base import DraftInput, Drafts, DraftWeights

LANES = 128

_MATRICES = ("context", "recur", "markov", "up", "down")


def laid_out(weights: DraftWeights) -> DraftWeights:
    """The weights with tables of whole vector lanes, the columns behind r zero, and matrices in bfloat16.

    XLA would lay a narrower table out by columns, and then copy the whole of it in every pass to get at a few rows.
    The matrix unit multiplies bfloat16 numbers: matrices in float32 would be rounded in every pass.
    """
    matrices = {name: getattr(weights, name).astype(jnp.bfloat16) for name in _MATRICES}
    return weights._replace(read=_padded(weights.read), head=_padded(weights.head), **matrices)


def _padded(table: Array) -> Array:
    missing = -table.shape[1] % LANES
    return jnp.pad(table, ((0, 0), (0, missing))) if missing else table


def draft(weights: DraftWeights, inputs: DraftInput) -> Drafts:
    """See `api.draft`."""
    return reference.draft(weights, inputs, reference.Ways(_rows, once))


def _rows(ids: Array, table: Array) -> Array:
    """XLA's own gather first brings a table that is small enough whole onto the chip."""
    return linear.embed(ids, table, n_rows=jnp.int32(len(ids)), backend="tpu")


def once(condition: Array, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`lax.cond` as a loop of one turn or none. XLA keeps in on-chip memory what the places of a chain share, the
    shadow's weights and the history, but brings nothing there for the branches of a conditional inside a loop."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, __: do(), otherwise())
