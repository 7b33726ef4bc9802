"""The sampling kernel in plain JAX: one row of logits in, one token out, no sort over the vocabulary.

The order is: penalties and bias, the mask, temperature, top-k, top-p, min-p, then the largest sum of log-probability
and Gumbel noise.

Top-k and top-p keep {x >= t} for a threshold t found by bisection on the int32 keys of the float32 values, so it is
exact: the largest t whose set has k members, or the mass asked for. Values equal to t all stay, so a tie at the
threshold keeps more than k. Top-p measures mass within what top-k left; min-p keeps what has at least `min_p` times
the probability of the most likely token.

Odd logits: NaN counts as -inf, +inf as the largest finite number. A row without any finite logit gives token 0.
The bits of the result depend on the row alone (see `numerics`), provided the parameters are run-time values: a
compiler may turn division by a constant into a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ...configs.engine import MAX_TOP_LOGPROBS
from ..numerics import MIN_NORMAL, exp, key_bits, log, ordered_sum, product
from .base import Choice, RowParams
from .noise import gumbel

_LARGEST = np.float32(np.finfo(np.float32).max)
_NEG_INF = np.float32(-np.inf)
_NEG_INF_KEY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)


def choose_rows(logits: Array, rows: RowParams, active: Array) -> Choice:
    """`choose` for the rows of `logits` [R, V] that are `active` [R]; `Choice.none` for the others.

    A loop on every target: `vmap` would turn the conditions inside `choose` into selections, and every row would pay
    for the threshold searches that few ask for.
    """

    def row(r: Array, choices: Choice) -> Choice:
        def store() -> Choice:
            own = jax.tree.map(lambda field: field[r], rows._replace(counts=rows.slot, masks=rows.slot))
            mask = rows.masks[jnp.clip(own.mask, 0, len(rows.masks) - 1)]
            one = choose(logits[r], own._replace(counts=rows.counts[own.slot], masks=mask))
            return jax.tree.map(lambda all_, new: lax.dynamic_update_index_in_dim(all_, new, r, 0), choices, one)

        return lax.cond(active[r], store, lambda: choices)

    return lax.fori_loop(0, logits.shape[0], row, Choice.none(logits.shape[0]))


def choose(logits: Array, row: RowParams) -> Choice:
    """The token of one row: `logits` float32 [V] -> `Choice`."""
    raw = _clean(logits)
    changed = _allowed(_clean(_with_bias(_with_penalties(raw, row), row)), row)
    greedy = ~(row.temperature >= MIN_NORMAL)
    # A branch's result is an array in memory: the noise is not computed inside the (scalar) search for the maximum.
    scores = lax.cond(greedy, lambda: changed, lambda: _noisy_scores(changed, row))
    token = _argmax(scores)
    logprob, top_ids, top_logprobs = lax.cond(
        row.n_logprobs >= 0, lambda: _logprobs(raw, token, row.n_logprobs), _no_logprobs
    )
    return Choice(token, logprob, top_ids, top_logprobs)


def _clean(x: Array) -> Array:
    """Without NaN and +inf, so that everything below is ordered and has a finite or -inf maximum."""
    return jnp.where(x > _NEG_INF, jnp.minimum(x, _LARGEST), _NEG_INF)


def _argmax(x: Array) -> Array:
    """The lowest index of the maximum, int32."""
    return jnp.argmax(x).astype(jnp.int32)


def _with_penalties(x: Array, row: RowParams) -> Array:
    def penalised() -> Array:
        ids = jnp.where(row.drafted >= 0, row.drafted, x.shape[0])
        counts = row.counts.at[ids].add(2, mode="drop")
        generated = counts >> 1
        # One division serves both signs; a multiplication could be contracted with the subtraction.
        divisor = jnp.where(x > 0, row.repetition, np.float32(1) / row.repetition)
        repeated = jnp.where(counts > 0, x / divisor, x)
        per_use = product(row.frequency, generated.astype(jnp.float32))
        return repeated - (per_use + jnp.where(generated > 0, row.presence, np.float32(0)))

    used = (row.repetition != 1) | (row.presence != 0) | (row.frequency != 0)
    return lax.cond(used, penalised, lambda: x)


def _with_bias(x: Array, row: RowParams) -> Array:
    def biased() -> Array:
        # Negative indices would count from the end; out of range ones are dropped.
        ids = jnp.where(row.bias_ids >= 0, row.bias_ids, x.shape[0])
        return x.at[ids].add(row.bias_values, mode="drop")

    return lax.cond(jnp.any(row.bias_ids >= 0), biased, lambda: x)


def _allowed(x: Array, row: RowParams) -> Array:
    """`x` with -inf for the tokens that the row's mask excludes."""

    def masked() -> Array:
        bits = row.masks[:, None] >> jnp.arange(32, dtype=jnp.uint32) & np.uint32(1)
        return jnp.where(bits.reshape(-1)[: x.shape[0]] > 0, x, _NEG_INF)

    return lax.cond(row.mask >= 0, masked, lambda: x)


def _below_max(x: Array) -> Array:
    """x - max(x), with the maximum at +0 and nothing denormal; -inf everywhere if x is."""
    below = x - jnp.maximum(jnp.max(x), -_LARGEST)
    return _flushed(below)


def _flushed(x: Array) -> Array:
    """Non-positive x with -0 and denormals replaced by +0, whatever the processor's mode is."""
    return jnp.where(x > -MIN_NORMAL, np.float32(0), x)


def _noisy_scores(x: Array, row: RowParams) -> Array:
    scaled = _flushed(_below_max(x) / row.temperature)
    keys = key_bits(scaled)
    threshold = _top_k_threshold(keys, row.top_k)
    filters = (row.top_p < 1) | (row.min_p > 0)
    kept = lax.cond(
        filters,
        lambda: _top_p_and_min_p(scaled, keys, threshold, row),
        lambda: keys >= threshold,
    )
    noisy = scaled + gumbel(row.seed, row.position, x.shape[0])
    return jnp.where(kept, noisy, _NEG_INF)


def _top_k_threshold(keys: Array, top_k: Array) -> Array:
    """The largest key that at least k of `keys` [V] reach; the key of -inf when top-k is off."""

    def search() -> Array:
        return _largest_key(lambda t: _count(keys >= t) >= top_k, _NEG_INF_KEY)

    return lax.cond((top_k > 0) & (top_k < keys.shape[0]), search, lambda: _NEG_INF_KEY)


def _top_p_and_min_p(scaled: Array, keys: Array, threshold: Array, row: RowParams) -> Array:
    weights = jnp.where(keys >= threshold, exp(scaled), np.float32(0))  # relative to the most likely token

    def search() -> Array:
        target = row.top_p * ordered_sum(weights)
        return _largest_key(lambda t: ordered_sum(jnp.where(keys >= t, weights, np.float32(0))) >= target, threshold)

    threshold = lax.cond(row.top_p < 1, search, lambda: threshold)
    return (keys >= threshold) & ((weights >= row.min_p) | (scaled == 0))


def _count(mask: Array) -> Array:
    return ordered_sum(mask.astype(jnp.int32))


def _largest_key(reaches: Callable[[Array], Array], low: ArrayLike) -> Array:
    """The largest key t in [low, key of 0] that `reaches`, given that it does so at `low` and never again once not."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2  # at most 2^31 - 2^23 apart: no overflow
        reached = reaches(middle)
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    bounds = (jnp.asarray(low, jnp.int32), jnp.int32(1))
    return lax.while_loop(lambda b: b[1] - b[0] > 1, halve, bounds)[0]


def _logprobs(raw: Array, token: Array, n: Array) -> tuple[Array, Array, Array]:
    below = _below_max(raw)
    # At least 1 if anything is finite; otherwise every log-probability is -inf.
    log_total = log(jnp.maximum(ordered_sum(exp(below)), np.float32(1)))

    def top() -> tuple[Array, Array]:
        # Not `lax.top_k`: on a TPU it takes longer to compile than the whole step.
        def pick(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            keys, ids = state
            best = _argmax(keys)
            return keys.at[best].set(np.int32(-(2**31))), ids.at[i].set(best)

        n_top = min(MAX_TOP_LOGPROBS, raw.shape[0])
        start = key_bits(below), jnp.full(MAX_TOP_LOGPROBS, -1, jnp.int32)
        ids = lax.fori_loop(0, n_top, pick, start)[1]
        return ids, jnp.where(ids >= 0, below[jnp.maximum(ids, 0)] - log_total, np.float32(0))

    top_ids, top_logprobs = lax.cond(n > 0, top, lambda: _no_logprobs()[1:])
    return below[token] - log_total, top_ids, top_logprobs


def _no_logprobs() -> tuple[Array, Array, Array]:
    return jnp.float32(0), jnp.full(MAX_TOP_LOGPROBS, -1, jnp.int32), jnp.zeros(MAX_TOP_LOGPROBS, jnp.float32)
