"""Where the tokens of a pass stand: prompt chunks as the host sent them, then every decoding slot's last token with the
drafted ones behind it. How many those are is known only on the device.

Letters: B slots, G query groups, J drafted tokens of a slot (at most), R rows that choose, T tokens of the pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.engine import MAX_DRAFT
from ...kernels.attention import Queries
from ...kernels.draft import widths
from .drafting import Drafter
from .state import SlotState, StepInput


class Layout(NamedTuple):
    """The tokens of a pass, and the rows that choose: a slot's rows follow one another, slots in their order."""

    ids: jax.Array  # int32 [T]
    queries: Queries
    n_drafts: jax.Array  # int32 [B]: drafted tokens in the pass
    n_chosen: jax.Array  # int32 [B]: rows of the slot
    first: jax.Array  # int32 [B]: the first of them
    begin: jax.Array  # int32 [B]: position of the token that it chooses
    source: jax.Array  # int32 [R]: token whose hidden state chooses
    slots: jax.Array  # int32 [R]
    chosen_at: jax.Array  # int32 [R]: position of the chosen token, 0: chooses nothing
    n_rows: jax.Array  # int32 []: rows in use; the rest of R is padding
    draft: jax.Array  # int32 [R]: the token drafted for that position, -1: none
    before: jax.Array  # int32 [R, J]: tokens drafted before it, -1: none


def lay_out(state: SlotState, inputs: StepInput, drafter: Drafter | None, rows: int, tile: int | None) -> Layout:
    """The layout of the next pass, with at most `rows` rows that choose. Its tokens are the prompt's and as many as
    there are rows, filled up to whole tiles of `tile` tokens."""
    n_prompt, n_groups = inputs.sizes[0, 0], inputs.sizes[0, 1]
    decodes = inputs.decodes & state.active
    n_drafts = _drafted(state, inputs, drafter, decodes, rows)
    width = jnp.where(decodes, 1 + n_drafts, 0)
    ends = jnp.cumsum(width)
    starts = ends - width

    r = jnp.arange(rows)
    slot = _owner(ends, r)  # of a decode row
    nth = r - starts[slot]
    drafts = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
    tokens = len(inputs.ids)
    total = tokens + rows + (-(tokens + rows) % tile if tile else 0)
    used = n_prompt + ends[-1]
    t = jnp.arange(total)

    def placed(prompt: jax.Array, decoded: jax.Array, past: int) -> jax.Array:
        """`[T]`: the prompt's tokens, then the decode rows, then padding."""
        line = jnp.full(total, past, jnp.int32)
        line = lax.dynamic_update_slice_in_dim(line, decoded.astype(jnp.int32), n_prompt, 0)
        if tokens:
            line = jnp.where(t < n_prompt, jnp.pad(prompt, (0, total - tokens)), line)
        return jnp.where(t < used, line, past)

    positions = placed(inputs.positions, state.position[slot] + nth, -1)
    queries = Queries(
        slots=placed(inputs.slots, slot, 0),
        positions=positions,
        n_tokens=used,
        tables=inputs.tables,
        **_groups(inputs, n_prompt, n_groups, starts, width),
    )

    finishes = inputs.last >= 0
    n_chosen = jnp.where(finishes, 1, width)
    choose_ends = jnp.cumsum(n_chosen)
    first = choose_ends - n_chosen
    slots = _owner(choose_ends, r)
    w = r - first[slots]
    chooses = r < choose_ends[-1]
    source = jnp.where(finishes[slots], inputs.last[slots], n_prompt + starts[slots] + w)
    source = jnp.where(chooses, source, 0)
    begin = jnp.where(finishes, positions[jnp.maximum(inputs.last, 0)], state.position) + 1
    places = jnp.arange(MAX_DRAFT)
    return Layout(
        ids=placed(inputs.ids, drafts[slot, jnp.minimum(nth, MAX_DRAFT)], 0),
        queries=queries,
        n_drafts=n_drafts,
        n_chosen=n_chosen,
        first=first,
        begin=begin,
        source=source,
        slots=slots,
        chosen_at=jnp.where(chooses, begin[slots] + w, 0),
        n_rows=choose_ends[-1],
        draft=jnp.where(w < n_drafts[slots], state.drafts[slots, jnp.clip(w, 0, MAX_DRAFT - 1)], -1),
        before=jnp.where(places < w[:, None], state.drafts[slots], -1),
    )


def _drafted(state: SlotState, inputs: StepInput, drafter: Drafter | None, decodes: jax.Array, rows: int) -> jax.Array:
    """How many of its drafted tokens each slot takes into the pass, int32 [B]."""
    if drafter is None:
        return jnp.zeros_like(state.n_drafts)
    room = jnp.minimum(inputs.capacity, state.limit) - state.position - 1
    length = jnp.where(decodes, jnp.clip(state.n_drafts, 0, jnp.maximum(room, 0)), 0)
    # Rows that end prompts are not in the way of drafts: there are as many rows as slots besides.
    budget = rows - (inputs.last >= 0).sum(dtype=jnp.int32)
    cost = lax.dynamic_slice_in_dim(drafter.cost, inputs.sizes[0, 0], rows + 1)

    def asked() -> jax.Array:
        wanted = jnp.minimum(length, drafter.length)
        before = jnp.cumsum(wanted) - wanted
        return jnp.clip(budget - decodes.sum(dtype=jnp.int32) - before, 0, wanted)

    def gated() -> jax.Array:
        return widths(state.draft_odds, length, decodes, cost, budget)

    some = jnp.any(length > 0)
    return lax.cond(some, lambda: lax.cond(drafter.length > 0, asked, gated), lambda: jnp.zeros_like(length))


def _owner(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """The slot of each of `rows`, when those of slot b end at `ends[b]`; slot 0 past the last."""
    return (ends[None, :] > rows[:, None]).argmax(1).astype(jnp.int32)


def _groups(
    inputs: StepInput, n_prompt: jax.Array, n_groups: jax.Array, starts: jax.Array, width: jax.Array
) -> dict[str, jax.Array]:
    """The query groups: those of the prompt, then one for each slot with decode rows."""
    runs = width > 0
    group = jnp.arange(len(width))
    slot = _owner(jnp.cumsum(runs), group)
    known = group < runs.sum()
    prompt = len(inputs.starts)

    def placed(prompt_groups: jax.Array, decoded: jax.Array) -> jax.Array:
        line = jnp.pad(prompt_groups, (0, len(width)))
        return lax.dynamic_update_slice_in_dim(line, decoded.astype(jnp.int32), n_groups if prompt else 0, 0)

    return {
        "starts": placed(inputs.starts, jnp.where(known, n_prompt + starts[slot], 0)),
        "counts": placed(inputs.counts, jnp.where(known, width[slot], 0)),
        "n_groups": n_groups + runs.sum(dtype=jnp.int32),
    }
