"""Attention in plain JAX: a loop over query groups, inside it a loop over the blocks of the sequence.

No gather of pages (XLA:CPU would copy the whole context) and no mask over a padded context: a group walks exactly the
blocks it can see. See `api` for the contract; this is the oracle of the other backends, and what runs without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ...configs.engine import BLOCK, NULL_BLOCK
from .. import numerics
from ..rows import rms_norm, rotate, spread
from .pool import KVPool

if TYPE_CHECKING:
    from .api import AttentionResult, Norm, Queries, Want

GROUP = 32
"""Tokens a query group may hold."""

TILE = 8
"""Tokens of a group that this file works on at a time, whatever the group holds."""

_NEVER = -1e30
"""A logit no key can have: finite, so that a fully masked block leaves the running maximum and sums as they are."""

_MAX_SCALE = np.float32(65504.0)  # the largest float16


def unsupported(n_heads: int, n_kv_heads: int, head_dim: int, dtype: str) -> str | None:
    return None


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

    quantised = pool.scales is not None
    q, k = prepared(q, layer, angles, q_norm, quantised), prepared(k, layer, angles, k_norm, quantised)
    pool = write_kv(pool, layer, k, v, queries)
    out, lse, mass = attend(q, pool, layer, queries, scale=scale, window=window, softcap=softcap, want=want)
    return AttentionResult(out, pool, lse, mass)


def prepared(x: jax.Array, layer: jax.Array, angles: jax.Array | None, norm: Norm | None, quantised: bool) -> jax.Array:
    """Queries or keys `[T, heads, H]`, normalised and rotated, float32; those of a `quantised` pool also spread."""
    x = x.astype(jnp.float32)
    if norm is not None:
        weight, eps = norm
        x = rms_norm(x, lax.dynamic_index_in_dim(weight, layer, 0, keepdims=False), eps)
    x = x if angles is None else rotate(x, angles)
    return spread(x) if quantised else x


def quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 values `[..., H]` and scales `[...]` (float32, but each a float16 number) of keys or values `[..., H]`."""
    scale = jnp.minimum(jnp.abs(x).max(-1) * np.float32(1 / 127), _MAX_SCALE)
    scale = _rounded_to_float16(scale)
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.clip(jnp.round(x * inverse[..., None]), -127, 127).astype(jnp.int8), scale


def _rounded_to_float16(x: jax.Array) -> jax.Array:
    """float32 `x` >= 0 rounded to the nearest float16 (ties to even), without the type: a TPU has none, and XLA may
    drop a conversion there and back. NaN stays what it is."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    normal = lax.bitcast_convert_type((bits + 0xFFF + ((bits >> 13) & 1)) & np.int32(-0x2000), jnp.float32)
    small = (x + np.float32(0.5)) - np.float32(0.5)  # below the normal numbers all float16 are multiples of 2^-24
    return jnp.where(x < np.float32(2.0**-14), small, normal)


def entries(queries: Queries, slots: jax.Array, block: jax.Array) -> jax.Array:
    """Entry of the table rows `slots` that holds block `block` of the sequence, or the next one that is listed."""
    if queries.blocks_at is None or queries.n_blocks is None:
        return block
    listed = queries.blocks_at[slots]
    valid = jnp.arange(listed.shape[-1], dtype=jnp.int32) < queries.n_blocks[slots][..., None]
    return (valid & (listed < block[..., None])).sum(-1, dtype=jnp.int32)


def write_kv(pool: KVPool, layer: jax.Array, k: jax.Array, v: jax.Array, queries: Queries) -> KVPool:
    """The pool with the keys and values `[T, K, H]` of the step's tokens stored at their positions."""
    known = queries.positions >= 0
    wanted = jnp.maximum(queries.positions, 0) // BLOCK
    at = jnp.minimum(entries(queries, queries.slots, wanted), queries.tables.shape[1] - 1)
    if queries.blocks_at is not None and queries.n_blocks is not None:
        known &= (queries.blocks_at[queries.slots, at] == wanted) & (at < queries.n_blocks[queries.slots])
    blocks = jnp.where(known, queries.tables[queries.slots, at], NULL_BLOCK)
    offsets = jnp.where(known, queries.positions % BLOCK, 0)
    kv, scales = jnp.stack([k, v], axis=2), None  # [T, K, 2, H]
    if pool.scales is not None:
        kv, scales = quantised(kv)
        scales = scales.astype(pool.scales.dtype)  # [T, K, 2]
    kv = kv.astype(pool.values.dtype).reshape(len(kv), kv.shape[1], -1)

    def write(t: jax.Array, pool: KVPool) -> KVPool:
        one = _as_stored(lax.dynamic_index_in_dim(kv, t, 0, keepdims=False)[None, None, :, None, :])
        values = lax.dynamic_update_slice(pool.values, one, (blocks[t], layer, 0, offsets[t], 0))
        if pool.scales is None:
            return KVPool(values)
        one = lax.dynamic_index_in_dim(scales, t, 0, keepdims=False)[None, None, :, :, None]
        return KVPool(values, lax.dynamic_update_slice(pool.scales, one, (blocks[t], layer, 0, 0, offsets[t])))

    return lax.fori_loop(0, queries.n_tokens, write, pool)


class _Out(NamedTuple):
    """Results of a tile of tokens, or of all; None: not wanted."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array | None  # [T, N]
    block_mass: jax.Array | None  # [T, M]


def attend(
    q: jax.Array,
    pool: KVPool,
    layer: jax.Array,
    queries: Queries,
    *,
    scale: float,
    window: jax.Array,
    softcap: float | None,
    want: Want,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Causal attention of `q` `[T, N, H]` (normalised and rotated) over a pool that holds the step's tokens."""
    T = len(q)
    padded = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))
    nothing = _Out(
        jnp.zeros(padded.shape, jnp.float32),
        jnp.full(padded.shape[:2], -jnp.inf, jnp.float32) if want.lse else None,
        jnp.zeros((len(padded), queries.tables.shape[1]), jnp.float32) if want.block_mass else None,
    )
    run = _Run(pool, layer, queries, scale, window, softcap)
    out = lax.fori_loop(0, queries.n_groups, lambda g, out: _attend_tiles(run, padded, g, out), nothing)
    return out.out[:T], *(None if x is None else x[:T] for x in out[1:])


class _Run(NamedTuple):
    """What is the same for all groups."""

    pool: KVPool
    layer: jax.Array
    queries: Queries
    scale: float
    window: jax.Array
    softcap: float | None


def _attend_tiles(run: _Run, q: jax.Array, g: jax.Array, out: _Out) -> _Out:
    """`out` with the results of the tokens of group `g`; `q` is `[T + TILE, N, H]`."""
    queries = run.queries
    slot = queries.slots[queries.starts[g]]

    def tile(i: jax.Array, out: _Out) -> _Out:
        start, count = queries.starts[g] + i * TILE, jnp.minimum(queries.counts[g] - i * TILE, TILE)
        tokens = lax.dynamic_slice_in_dim(q, start, TILE)
        result = _attend_group(run, tokens, slot, queries.positions[start], count, out)

        # Rows past `count` belong to later tiles and groups, which overwrite them, or to no token.
        def put(old: jax.Array, new: jax.Array, empty: float) -> jax.Array:
            used = (jnp.arange(TILE) < count).reshape(TILE, *(1,) * (new.ndim - 1))
            return lax.dynamic_update_slice_in_dim(old, jnp.where(used, new, empty), start, 0)

        return _Out(
            put(out.out, result.out, 0.0),
            None if out.lse is None or result.lse is None else put(out.lse, result.lse, -jnp.inf),
            None
            if out.block_mass is None or result.block_mass is None
            else put(out.block_mass, result.block_mass, 0.0),
        )

    return lax.fori_loop(0, (queries.counts[g] + TILE - 1) // TILE, tile, out)


def _attend_group(run: _Run, q: jax.Array, slot: jax.Array, position: jax.Array, count: jax.Array, out: _Out) -> _Out:
    """Results of the tokens `q` `[TILE, N, H]` of a sequence, at positions from `position` on, `count` of them in use.

    `out` says which results are wanted.
    """
    queries, K = run.queries, run.pool.values.shape[2]
    _, N, H = q.shape
    R, M = TILE * N // K, queries.tables.shape[1]
    q = q.reshape(TILE, K, N // K, H).swapaxes(0, 1).reshape(K, R, H) * run.scale
    positions = position + jnp.repeat(jnp.arange(TILE, dtype=jnp.int32), N // K)  # [R]
    last = position + count - 1
    oldest = jnp.where(run.window > 0, jnp.maximum(positions - run.window + 1, 0), 0)  # [R]

    def block(m: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc, *parts = carry
        at = m if queries.blocks_at is None else queries.blocks_at[slot, m]
        keys = at * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        k, v, k_scale, v_scale = _block(run.pool, queries.tables[slot, m], run.layer, keys <= last)
        logits = _dot(q, k, 2)  # [K, R, P]
        if k_scale is not None:
            logits = numerics.product(logits, k_scale)
        if run.softcap is not None:
            logits = numerics.product(run.softcap, numerics.tanh(logits / run.softcap))
        seen = (keys[None] <= positions[:, None]) & (keys[None] >= oldest[:, None])  # [R, P]
        logits = jnp.where(seen, logits, _NEVER)
        new_top = jnp.maximum(top, logits.max(-1))
        weights = jnp.where(seen, numerics.exp(logits - new_top[..., None]), 0.0)
        shrink = numerics.exp(top - new_top)
        here = numerics.ordered_sum(weights)
        total = _shrunk(total, shrink) + here
        if v_scale is not None:
            weights = numerics.product(weights, v_scale)
        acc = _shrunk(acc, shrink[..., None]) + _dot(weights, v, 1)
        parts = [lax.dynamic_update_index_in_dim(a, x, m, 0) for a, x in zip(parts, (here, new_top), strict=False)]
        return new_top, total, acc, *parts

    carry: tuple[jax.Array, ...] = (jnp.full((K, R), _NEVER), jnp.zeros((K, R)), jnp.zeros((K, R, H)))
    if out.block_mass is not None:
        carry += (jnp.zeros((M, K, R)), jnp.full((M, K, R), _NEVER))
    # A token at position -1 sees no block.
    first, end = entries(queries, slot, oldest[0] // BLOCK), entries(queries, slot, last // BLOCK + 1)
    top, total, acc, *parts = lax.fori_loop(first, jnp.where(position < 0, first, end), block, carry)
    divisor = jnp.where(total > 0, total, 1.0)

    def by_token(x: jax.Array) -> jax.Array:
        """`[..., K, R]` as `[..., TILE, N]`."""
        lead = x.shape[:-2]
        return x.reshape(*lead, K, TILE, N // K).swapaxes(-2, -3).reshape(*lead, TILE, N)

    result = by_token(jnp.moveaxis(acc / divisor[..., None], -1, 0))
    lse = jnp.where(total > 0, top + numerics.log(divisor), -jnp.inf)
    mass = None
    if parts:
        here, tops = parts
        share = numerics.product(here, numerics.exp(tops - top)) / divisor
        mass = (numerics.ordered_sum(by_token(share)) / N).T
    return _Out(jnp.moveaxis(result, 0, -1), None if out.lse is None else by_token(lse), mass)


def _block(
    pool: KVPool, block: jax.Array, layer: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Keys and values `[K, P, H]` of a block, float32, and, if there are, their scales `[K, 1, P]`.

    Blocks are not cleared: their unused rest may hold anything and is read as zero.
    """
    K, P, H = pool.values.shape[2], BLOCK, pool.values.shape[4] // 2
    kv = lax.dynamic_slice(pool.values, (block, layer, 0, 0, 0), (1, 1, K, P, 2 * H))
    kv = jnp.where(used[:, None], _as_stored(kv)[0, 0].astype(jnp.float32), 0.0)
    if pool.scales is None:
        return kv[..., :H], kv[..., H:], None, None
    scales = lax.dynamic_slice(pool.scales, (block, layer, 0, 0, 0), (1, 1, K, 2, P))[0, 0]
    scales = jnp.where(used, scales.astype(jnp.float32), 0.0)
    return kv[..., :H], kv[..., H:], scales[:, :1], scales[:, 1:]


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Sums over the last axis of `a` `[K, R, ...]` and one axis of `b` `[K, ..., ...]`."""
    return lax.dot_general(a, b, (((2,), (axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _as_stored(x: jax.Array) -> jax.Array:
    """Part of a pool `[1, 1, K, P, 2H]`, on a TPU in the layout that the pool has there: its longer last axis across
    the 128 lanes. XLA would prefer another one, and copy the whole pool twice in every layer."""

    def pinned(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout((0, 1, 2, 4, 3) if x.shape[-1] < BLOCK else (0, 1, 2, 3, 4)))

    return lax.platform_dependent(x, tpu=pinned, default=lambda x: x)


def _shrunk(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor`, and exactly `x` for a factor of 1: a block in which a query sees nothing must change nothing."""
    return jnp.where(factor == 1.0, x, numerics.product(x, factor))
