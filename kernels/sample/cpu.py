"""The sampling kernel in native code (`native/src/sample.cc`): all rows of a step in one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from .. import native
from .base import Choice, RowParams


def unsupported() -> str | None:
    """Why this backend cannot be used here; None when it can."""
    return native.unavailable()


def choose_rows(logits: Array, rows: RowParams, active: Array) -> Choice:
    """`reference.choose_rows` with the same bits; sharded arrays only as parts, inside `shard_map`."""
    results = jax.eval_shape(lambda: Choice.none(logits.shape[0]))
    call = jax.ffi.ffi_call(native.handler("umbra_sample"), tuple(results))
    return Choice(*call(logits.astype(jnp.float32), active, *rows))
