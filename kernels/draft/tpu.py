"""Drafting on a TPU: plain JAX, but for the table of all tokens, whose rows a kernel fetches."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .. import linear
from . import reference
from .base import DraftInput, Drafts, DraftWeights

LANES = 128


def laid_out(weights: DraftWeights) -> DraftWeights:
    """The weights with tables of whole vector lanes, the columns behind r zero.

    XLA would lay a narrower table out by columns, and then copy the whole of it in every pass to get at a few rows.
    """
    return weights._replace(read=_padded(weights.read), head=_padded(weights.head))


def _padded(table: Array) -> Array:
    missing = -table.shape[1] % LANES
    return jnp.pad(table, ((0, 0), (0, missing))) if missing else table


def draft(weights: DraftWeights, inputs: DraftInput) -> Drafts:
    """See `api.draft`."""
    return reference.draft(weights, inputs, rows=_rows)


def _rows(ids: Array, table: Array) -> Array:
    """XLA's own gather first brings a table that is small enough whole onto the chip."""
    return linear.embed(ids, table, n_rows=jnp.int32(len(ids)), backend="tpu")
