"""The contract of attention over a paged KV pool.

Letters: B block-table rows, G query groups, H head size, K key/value heads, L layers, M table width, N query heads,
P block length (128), T tokens of the step.

The pool is one array `[blocks, L, 2, K, P, H]`: a block holds keys (index 0) and values (1) of all layers, so that it
can be moved as one piece. Attention reads keys and values only from the pool, after they were written, so that the
stored form is the only form they have.

Exactness: for every query the products are added up over spans of one block at absolute positions, in ascending order,
with an online softmax. Nothing else (table width, neighbours, how a prompt was cut into groups) changes the grouping.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from . import reference


class Queries(NamedTuple):
    """Which sequence and position each token of the step belongs to.

    The tokens of a group are consecutive tokens of one sequence at consecutive positions; groups are listed in
    ascending order of `starts` and hold at most `reference.GROUP` tokens. A token at position -1 is padding: its KV
    goes to the null block and its result is zero.
    """

    slots: jax.Array  # int32 [T]: row of `tables`
    positions: jax.Array  # int32 [T]: absolute position, -1 for padding
    n_tokens: jax.Array  # int32 []: tokens in use; the rest of T is padding
    starts: jax.Array  # int32 [G]: first token of a group
    counts: jax.Array  # int32 [G]: its tokens
    n_groups: jax.Array  # int32 []
    tables: jax.Array  # int32 [B, M]: block that holds positions [128 m, 128 m + 128) of a sequence


def write_kv(
    pool: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, queries: Queries, *, pin: bool = False
) -> jax.Array:
    """The pool with the keys and values `[T, K, H]` of the step's tokens stored at their positions.

    `pin` is for a TPU: it fixes the layout of what is written (and, in `attend`, read) to that of the pool. Without it
    XLA prefers another one there, and copies the whole pool twice in every layer.
    """
    return reference.write_kv(pool, layer, k, v, queries, pin=pin)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    queries: Queries,
    *,
    scale: float,
    window: jax.Array,
    softcap: float | None = None,
    pin: bool = False,
) -> jax.Array:
    """Causal attention of `q` `[T, N, H]` over the pool: `[T, N, H]`.

    `window` (int32 []) is the number of tokens a query sees, itself included; 0 means all. `softcap` bounds the
    logits to +-softcap by a tanh (Gemma 2). For `pin` see `write_kv`.
    """
    return reference.attend(q, pool, layer, queries, scale=scale, window=window, softcap=softcap, pin=pin)
