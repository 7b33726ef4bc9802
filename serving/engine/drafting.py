"""Drafting inside the step: what the next pass will try, and what rows cost."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.engine import MAX_DRAFT
from ...kernels.backend import Backend
from ...kernels.draft import LOOKUP, DraftInput, Drafts, DraftWeights, draft
from .request import FORCED
from .state import Guided, Leaf, SlotState

HARDLY_PAYS = 0.75
"""Odds that a draft needs to pay, from which the shadow is not asked: so few of its guesses are better that they bring
less than it takes to make them all (16 slots: a thirtieth of a pass)."""


class Drafter(NamedTuple):
    """What drafting reads: arrays, the same in every step."""

    weights: DraftWeights
    cost: Leaf  # float32 [.]: time of a pass by its number of rows
    length: Leaf  # int32 []: draft exactly this many tokens; 0: as many as pay


def guide(state: SlotState, guided: Guided) -> SlotState:
    """The slots with the drafts that the host has for those it guides."""
    own = guided.first < 0

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(own.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return state._replace(
        drafts=put(state.drafts, guided.drafts),
        draft_sources=put(state.draft_sources, guided.sources),
        draft_odds=put(state.draft_odds, guided.odds),
        n_drafts=put(state.n_drafts, guided.length),
    )


def draft_next(drafter: Drafter, backend: Backend, state: SlotState, hidden: jax.Array, grown: jax.Array) -> SlotState:
    """The slots that have `grown` (bool [B]) with drafts for their next pass. `hidden` `[B, D]` are the trunk's hidden
    states that chose their last tokens."""
    needed = jnp.where(drafter.length > 0, 0.0, _needed(drafter, state))
    sources = jnp.where(needed < HARDLY_PAYS, state.sources, state.sources & LOOKUP)
    drafts = grown & state.active & (sources > 0)
    inputs = DraftInput(
        hidden=hidden, token=state.token, position=state.position, history=state.history, active=drafts,
        sources=sources, temperature=state.temperature, seed=state.seed,
        room=jnp.clip(state.limit - state.position - 1, 0, MAX_DRAFT), predicted=state.predicted,
        floor=0.8 * needed,  # what the other slots draft may change the balance a little
    )  # fmt: skip

    def none() -> Drafts:
        return Drafts.none(len(grown))

    new = lax.cond(jnp.any(drafts), lambda: draft(drafter.weights, inputs, backend=backend), none)
    new = _with_conclusion(state, new)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(grown.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return state._replace(
        drafts=put(state.drafts, new.tokens),
        draft_sources=put(state.draft_sources, new.source),
        draft_odds=put(state.draft_odds, new.probability),
        n_drafts=put(state.n_drafts, new.length),
    )


def _needed(drafter: Drafter, state: SlotState) -> jax.Array:
    """The odds below which a drafted token cannot pay, float32 []: a row more costs a pass part of its time, and the
    pass brings at least a token for each slot."""
    n = jnp.sum(state.active)
    slope = (drafter.cost[n + 1] - drafter.cost[n]) / drafter.cost[n]
    return jnp.maximum(slope * n.astype(jnp.float32), 0.0)


def _with_conclusion(state: SlotState, drafts: Drafts) -> Drafts:
    """`drafts` with the conclusion of thoughts where it will be written, and nothing behind it."""

    def concluded() -> Drafts:
        index = state.position[:, None] + 1 + jnp.arange(MAX_DRAFT) - state.conclude_at[:, None]
        last = state.conclude.shape[1] - 1
        tokens = jnp.take_along_axis(state.conclude, jnp.clip(index, 0, last), 1)
        inside = state.thinking[:, None] & (index >= 0) & (index <= last) & (tokens >= 0)
        start = jnp.where(inside.any(-1), inside.argmax(-1), MAX_DRAFT)
        inside &= (state.active & (drafts.length >= start))[:, None]  # a chain without a gap
        end = jnp.where(inside, 1 + jnp.arange(MAX_DRAFT), 0).max(-1)
        room = jnp.clip(state.limit - state.position - 1, 0, MAX_DRAFT)
        return Drafts(
            tokens=jnp.where(inside, tokens, drafts.tokens),
            source=jnp.where(inside, FORCED, drafts.source),
            probability=jnp.where(inside, 1.0, drafts.probability),
            length=jnp.where(inside.any(-1), jnp.minimum(end, room), drafts.length),
        )

    return lax.cond(jnp.any(state.thinking), concluded, lambda: drafts)
