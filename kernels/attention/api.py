"""The contract of attention over a paged KV pool.

Letters: B block-table rows, G query groups, H head size, K key/value heads, L layers, M table width, N query heads,
P block length (128), T tokens of the step.

One call prepares the queries and keys of a step's tokens (norm, rotation), stores keys and values in the pool, and
attends. Attention reads keys and values only from the pool, after they were written, so that the stored form (`pool`)
is the only form they have.

Exactness: for every query the products are added up over spans of one block at absolute positions, in ascending order,
with an online softmax. Nothing else (table width, neighbours, how a prompt was cut into groups, threads) changes the
grouping.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...configs.engine import BLOCK
from .. import numerics
from .pool import KVPool

_MODULES = {"xla": ".reference", "cpu": ".cpu", "tpu": ".tpu"}

SPAN = 32
"""Tokens of one pair of key bounds."""

Norm = tuple[jax.Array, float]
"""Weight `[L, H]` and epsilon of a root-mean-square norm over each head."""


class Queries(NamedTuple):
    """Which sequence and position each token of the step belongs to.

    The tokens of a group are consecutive tokens of one sequence at consecutive positions; groups are listed in
    ascending order of `starts` and hold at most `reference.GROUP` tokens. A token at position -1 is padding: its KV
    goes to the null block and its result is zero.

    A table may list some blocks of its sequence only (sparse attention: what is not listed is not seen). `blocks_at`
    then says which block of the sequence each entry holds, in ascending order, for the first `n_blocks` entries of a
    row; the block that a token is written to has to be listed.
    """

    slots: jax.Array  # int32 [T]: row of `tables`
    positions: jax.Array  # int32 [T]: absolute position, -1 for padding
    n_tokens: jax.Array  # int32 []: tokens in use; the rest of T is padding, whose result is unspecified
    starts: jax.Array  # int32 [G]: first token of a group
    counts: jax.Array  # int32 [G]: its tokens
    n_groups: jax.Array  # int32 []
    tables: jax.Array  # int32 [B, M]: entry m: block that holds positions [128 j, 128 j + 128), j = m or blocks_at[m]
    blocks_at: jax.Array | None = None  # int32 [B, M]; None: entry m is the sequence's block m
    n_blocks: jax.Array | None = None  # int32 [B]; given exactly when blocks_at is


class Want(NamedTuple):
    """Results beside the output, chosen at compile time."""

    lse: bool = False
    block_mass: bool = False


class AttentionResult(NamedTuple):
    out: jax.Array  # float32 [T, N, H]
    pool: KVPool
    lse: jax.Array | None = None  # float32 [T, N]: log of the sum of exp(logit); -inf where nothing is seen
    block_mass: jax.Array | None = None  # float32 [T, M]: share of the softmax per table entry, mean over the heads


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    layer: jax.Array,
    queries: Queries,
    *,
    angles: jax.Array | None,
    scale: float,
    window: jax.Array,
    backend: str,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    softcap: float | None = None,
    want: Want = Want(),  # noqa: B008 (immutable)
    hot: Any = None,
    work: Any = None,
) -> AttentionResult:
    """Causal attention of the step's tokens over their sequences, their own keys and values included.

    `q` is `[T, N, H]`, `k` and `v` `[T, K, H]`, as projected. `q_norm` and `k_norm` normalise each head; `angles`
    (cosine and sine `[T, 2, H/2]`; None: no rotation) turns queries and keys. `layer` (int32 []) selects norm weights
    and the part of the pool. `window` (int32 []) is the number of tokens a query sees, itself included; 0 means all.
    `softcap` bounds the logits, already multiplied by `scale`, to +-softcap by a tanh (Gemma 2). The pool should be
    donated: it is updated in place. `hot` holds copies of some blocks in the on-chip memory of a TPU
    (`tpu_hot.stage`). `work` is what `plan` made of the same queries, for all layers.

    A `ValueError` says what a backend cannot do.
    """
    N, K, H = q.shape[1], k.shape[1], q.shape[2]
    if N % K:
        raise ValueError(f"{N} query heads cannot share {K} key/value heads evenly")
    if pool.values.shape[2:] != (K, BLOCK, 2 * H):
        raise ValueError(f"{K} heads of size {H} do not fit a pool of {pool.values.shape}: [blocks, L, K, 128, 2H]")
    if (queries.blocks_at is None) != (queries.n_blocks is None):
        raise ValueError("blocks_at and n_blocks of a sparse table go together: one of them is missing")
    obstacle = unsupported(backend, N, K, H, str(pool.values.dtype))
    if obstacle:
        raise ValueError(f"attention cannot run on the backend {backend!r}: {obstacle}; the backend 'xla' can")
    if hot is not None and backend != "tpu":
        raise ValueError(f"the backend {backend!r} has no on-chip memory for hot blocks; the backend 'tpu' has")
    return _module(backend).attention(
        q, k, v, pool, layer, queries,
        angles=angles, q_norm=q_norm, k_norm=k_norm, scale=scale, window=window, softcap=softcap, want=want,
        **{name: value for name, value in (("hot", hot), ("work", work)) if value is not None},
    )  # fmt: skip


def plan(
    queries: Queries,
    pool: KVPool,
    n_heads: int,
    *,
    backend: str,
    want: Want = Want(),  # noqa: B008 (immutable)
    hot: Any = None,
) -> Any | None:
    """What calls of `attention` with these arguments have in common, whatever the layer: made once, it is handed to
    each of them as `work`. None where a backend has nothing of the kind."""
    if backend != "tpu":
        return None
    return _module(backend).plan(queries, pool, n_heads, want=want, hot=hot)


def unsupported(backend: str, n_heads: int, n_kv_heads: int, head_dim: int, dtype: str) -> str | None:
    """Why `backend` cannot attend with these heads over a pool of type `dtype`; None when it can."""
    return _module(backend).unsupported(n_heads, n_kv_heads, head_dim, dtype)


def _module(backend: str) -> ModuleType:
    if backend not in _MODULES:
        raise ValueError(f"there is no attention backend {backend!r}; supported: {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[backend], __package__)


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys from its two parts: outputs `[..., H]` and log-sum-exps `[...]`."""
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    a, b = numerics.exp(lse_a - top), numerics.exp(lse_b - top)
    total = a + b
    divisor = jnp.where(total > 0, total, 1.0)
    out = numerics.product(out_a, (a / divisor)[..., None]) + numerics.product(out_b, (b / divisor)[..., None])
    return out, jnp.where(total > 0, top + numerics.log(divisor), -jnp.inf)


def key_bounds(pool: KVPool, blocks: jax.Array) -> jax.Array:
    """Least and greatest value of every key entry over spans of 32 tokens, of full blocks `[n]`, all layers.

    float32 `[n, L, K, P/32, 2, H]`, least first. No key of the span lies outside: the bounds are of the keys as
    attention reads them, so that q . k is at most the sum of max(q * least, q * greatest) (Quest, Tang et al. 2024).
    """
    H = pool.values.shape[-1] // 2

    def of_block(block: jax.Array) -> jax.Array:
        keys = jax.lax.dynamic_index_in_dim(pool.values, block, 0, keepdims=False)[..., :H].astype(jnp.float32)
        if pool.scales is not None:
            scales = jax.lax.dynamic_index_in_dim(pool.scales, block, 0, keepdims=False)[:, :, 0]
            keys = keys * scales.astype(jnp.float32)[..., None]
        keys = keys.reshape(*keys.shape[:2], BLOCK // SPAN, SPAN, H)
        return jnp.stack([keys.min(3), keys.max(3)], axis=3)

    return jax.lax.map(of_block, jnp.asarray(blocks, np.int32))
