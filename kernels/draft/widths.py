"""How many drafts go into a pass: the most tokens per unit of time, over all slots together."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

LEAST_GAIN = 1.04
"""Drafts must promise so much more than none: of many odds the best ones tend to be those that are too high."""


def widths(probability: Array, length: Array, active: Array, cost: Array, budget: Array) -> Array:
    """How many of its drafts each slot brings into the next pass, int32 [B].

    `probability` float32 [B, J] of drafts given those before them, of which the first `length` int32 [B] are there, for
    slots that are `active` bool [B]. `cost` float32 [R + 1] is what a pass over n rows takes, in any unit (entry 0 is
    not read). A pass of n rows, one for each active slot and one per draft, is expected to give one token per active
    slot and for each draft the product of the probabilities up to it; the n with the most tokens per cost is taken, the
    smallest of equal ones, n at most `budget` int32 [] and R. No drafts where the active slots alone are that many, or
    the gain is less than `LEAST_GAIN`.

    (One request: algorithm 1 of DSpark, arXiv 2607.05147.) Products only fall along a chain, so the best drafts of all
    slots are always starts of chains.
    """
    n_slots, n_drafts = probability.shape
    most_rows = cost.shape[0] - 1
    there = active[:, None] & (jnp.arange(n_drafts) < length[:, None])
    kept = jnp.where(there, jnp.clip(jnp.nan_to_num(probability), 0, 1), 0)
    value = jnp.cumprod(kept, axis=1).T.reshape(-1)  # place by place: equal products keep their order in the chain
    # Much faster than a sort on a CPU; the lower index comes first on ties there too.
    best, order = lax.top_k(value, min(len(value), most_rows))

    base = jnp.sum(active, dtype=jnp.int32)
    gained = jnp.concatenate([jnp.zeros(1), jnp.cumsum(best)])
    drafts = jnp.arange(gained.shape[0])
    possible = base + drafts <= jnp.minimum(budget, most_rows)
    per_cost = (base + gained) / cost[jnp.minimum(base + drafts, most_rows)]
    n = jnp.argmax(jnp.where(possible, per_cost, -jnp.inf))
    n = jnp.where(per_cost[n] > jnp.float32(LEAST_GAIN) * per_cost[0], n, 0)
    chosen = jnp.zeros(value.shape, bool).at[order].set(drafts[:-1] < n)
    chosen = chosen.reshape(n_drafts, n_slots).T & there
    return jnp.sum(chosen, axis=1, dtype=jnp.int32)
