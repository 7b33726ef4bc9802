"""Attention in plain JAX: a loop over query groups, inside it a loop over the blocks of the sequence.

No gather of pages (XLA:CPU would copy the whole context) and no mask over a padded context: a group walks exactly the
blocks it can see. See `api` for the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ...configs.engine import BLOCK, NULL_BLOCK
from .. import numerics

if TYPE_CHECKING:
    from .api import Queries

GROUP = 8
"""Tokens of one query group."""

_NEVER = -1e30
"""A logit no key can have: finite, so that a fully masked block leaves the running maximum and sums as they are."""


def write_kv(
    pool: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, queries: Queries, *, pin: bool
) -> jax.Array:
    positions = queries.positions
    known = positions >= 0
    blocks = queries.tables[queries.slots, jnp.maximum(positions, 0) // BLOCK]
    blocks = jnp.where(known, blocks, NULL_BLOCK)
    offsets = jnp.where(known, positions % BLOCK, 0)
    kv = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [T, 2, K, H]

    def write(t: jax.Array, pool: jax.Array) -> jax.Array:
        one = _as_stored(lax.dynamic_index_in_dim(kv, t, 0, keepdims=False)[None, None, :, :, None, :], pin)
        return lax.dynamic_update_slice(pool, one, (blocks[t], layer, 0, 0, offsets[t], 0))

    return lax.fori_loop(0, queries.n_tokens, write, pool)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    queries: Queries,
    *,
    scale: float,
    window: jax.Array,
    softcap: float | None,
    pin: bool,
) -> jax.Array:
    T, N, H = q.shape
    K = pool.shape[3]
    padded = jnp.pad(q, ((0, GROUP), (0, 0), (0, 0)))

    def group(g: jax.Array, out: jax.Array) -> jax.Array:
        start, count = queries.starts[g], queries.counts[g]
        rows = lax.dynamic_slice_in_dim(padded, start, GROUP)
        rows = rows.reshape(GROUP, K, N // K, H).swapaxes(0, 1).reshape(K, GROUP * (N // K), H)
        table = lax.dynamic_index_in_dim(queries.tables, queries.slots[start], 0, keepdims=False)
        result = _attend_group(
            rows, pool, layer, table, queries.positions[start], count, scale=scale, window=window, softcap=softcap,
            pin=pin,
        )  # fmt: skip
        result = result.reshape(K, GROUP, N // K, H).swapaxes(0, 1).reshape(GROUP, N, H)
        # Rows past `count` belong to later groups, which overwrite them.
        return lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return lax.fori_loop(0, queries.n_groups, group, jnp.zeros_like(padded))[:T]


def _attend_group(
    q: jax.Array,  # [K, GROUP * N/K, H]
    pool: jax.Array,
    layer: jax.Array,
    table: jax.Array,
    position: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: jax.Array,
    softcap: float | None,
    pin: bool,
) -> jax.Array:
    K, R, H = q.shape
    positions = position + jnp.repeat(jnp.arange(GROUP, dtype=jnp.int32), R // GROUP)  # [R]
    last = position + count - 1
    oldest = jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0)  # [R]
    q = q.astype(jnp.float32) * scale

    def block(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, acc = carry
        kv = lax.dynamic_slice(pool, (table[j], layer, 0, 0, 0, 0), (1, 1, 2, K, BLOCK, H))
        kv = _as_stored(kv, pin)[0, 0].astype(jnp.float32)
        keys = j * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        k, v = jnp.where((keys <= last)[:, None], kv, 0.0)  # blocks are not cleared: their rest may hold anything
        logits = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)  # [K, R, P]
        if softcap is not None:
            logits = softcap * numerics.tanh(logits / softcap)
        seen = (keys[None] <= positions[:, None]) & (keys[None] >= oldest[:, None])  # [R, P]
        logits = jnp.where(seen, logits, _NEVER)
        new_top = jnp.maximum(top, logits.max(-1))
        weights = jnp.where(seen, numerics.exp(logits - new_top[..., None]), 0.0)
        shrink = numerics.exp(top - new_top)
        total = _shrunk(total, shrink) + numerics.ordered_sum(weights)
        acc = _shrunk(acc, shrink[..., None]) + lax.dot_general(
            weights, v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        return new_top, total, acc

    carry = (jnp.full((K, R), _NEVER), jnp.zeros((K, R)), jnp.zeros((K, R, H)))
    # A token at position -1 sees no block.
    first = jnp.maximum(oldest[0], 0) // BLOCK
    _, total, acc = lax.fori_loop(first, last // BLOCK + 1, block, carry)
    return (acc / jnp.where(total > 0, total, 1.0)[..., None]).astype(q.dtype)


def _as_stored(x: jax.Array, pin: bool) -> jax.Array:
    """Part of a pool, in the layout a TPU gives the pool: its longer last axis across the 128 lanes."""
    if not pin:
        return x
    return with_layout_constraint(x, Layout((0, 1, 2, 3, 5, 4) if x.shape[-1] < BLOCK else (0, 1, 2, 3, 4, 5)))


def _shrunk(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor`, and exactly `x` for a factor of 1: a block in which a query sees nothing must change nothing."""
    return jnp.where(factor == 1.0, x, numerics.product(x, factor))
