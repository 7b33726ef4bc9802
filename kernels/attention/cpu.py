"""Attention in native code for CPUs: one custom call prepares, writes and attends (native/src/attention.cc).

The pool is updated in place, also inside loops. With an int8 pool queries and weights are rounded to 15 bits and their
products added as integers; everything else is float32. The bits of a token's result depend on its query and on the
blocks it sees alone, not on threads, instruction set, or what else is in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from .pool import KVPool

if TYPE_CHECKING:
    from .api import AttentionResult, Norm, Queries, Want

_MAX_HEAD = 512


def unsupported(n_heads: int, n_kv_heads: int, head_dim: int, dtype: str) -> str | None:
    """Why native code cannot attend with these heads; None when it can."""
    if head_dim % 8 or head_dim > _MAX_HEAD:
        return f"heads of {head_dim}; native code takes multiples of 8 up to {_MAX_HEAD}"
    return native.unavailable()


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    layer: jax.Array,
    queries: Queries,
    *,
    angles: jax.Array | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    scale: float,
    window: jax.Array,
    softcap: float | None,
    want: Want,
) -> AttentionResult:
    from .api import AttentionResult

    T, N, _ = q.shape
    none, no_table = jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.int32)
    scales = none if pool.scales is None else pool.scales
    operands = [
        *(x.astype(jnp.float32) for x in (q, k, v)),
        pool.values,
        scales,
        layer,
        window,
        none if angles is None else angles,
        *(none if norm is None else norm[0].astype(jnp.float32) for norm in (q_norm, k_norm)),
        *(queries.slots, queries.positions, queries.n_tokens, queries.starts, queries.counts, queries.n_groups),
        queries.tables,
        *(no_table if x is None else x for x in (queries.blocks_at, queries.n_blocks)),
    ]
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct(pool.values.shape, pool.values.dtype),
        jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        jax.ShapeDtypeStruct((T, N) if want.lse else (0,), jnp.float32),
        jax.ShapeDtypeStruct((T, queries.tables.shape[1]) if want.block_mass else (0,), jnp.float32),
    )
    call = jax.ffi.ffi_call(native.handler("umbra_attention"), results, input_output_aliases={3: 1, 4: 2})
    out, values, new_scales, lse, mass = call(
        *operands,
        q_eps=np.float32(0.0 if q_norm is None else q_norm[1]),
        k_eps=np.float32(0.0 if k_norm is None else k_norm[1]),
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
    )
    return AttentionResult(
        out,
        KVPool(values, None if pool.scales is None else new_scales),
        lse if want.lse else None,
        mass if want.block_mass else None,
    )
