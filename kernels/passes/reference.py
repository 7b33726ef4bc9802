"""A pass's bookkeeping in plain JAX: the definition of what the native code does, and what other platforms run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.engine import MAX_DRAFT
from ..attention import Queries
from ..draft import widths
from ..sample import accept
from .base import Advanced, Grown, Layout, Pace, Sent, Slots


def total_tokens(prompt: int, rows: int, tile: int | None) -> int:
    """Tokens of a pass over `prompt` prompt tokens and `rows` rows, padding included."""
    return prompt + rows + (-(prompt + rows) % tile if tile else 0)


def lay_out(state: Slots, inputs: Sent, pace: Pace | None, rows: int, tile: int | None) -> Layout:
    """See `api.lay_out`."""
    n_prompt, n_groups = inputs.sizes[0, 0], inputs.sizes[0, 1]
    decodes = inputs.decodes & state.active
    n_drafts = _drafted(state, inputs, pace, decodes, rows)
    width = jnp.where(decodes, 1 + n_drafts, 0)
    ends = jnp.cumsum(width)
    starts = ends - width

    r = jnp.arange(rows)
    slot = _owner(ends, r)  # of a decode row
    nth = r - starts[slot]
    drafts = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
    tokens = len(inputs.ids)
    total = total_tokens(tokens, rows, tile)
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


def _drafted(state: Slots, inputs: Sent, pace: Pace | None, decodes: jax.Array, rows: int) -> jax.Array:
    """How many of its drafted tokens each slot takes into the pass, int32 [B]."""
    if pace is None:
        return jnp.zeros_like(state.n_drafts)
    room = jnp.minimum(inputs.capacity, state.limit) - state.position - 1
    length = jnp.where(decodes, jnp.clip(state.n_drafts, 0, jnp.maximum(room, 0)), 0)
    # Rows that end prompts are not in the way of drafts: there are as many rows as slots besides.
    budget = rows - (inputs.last >= 0).sum(dtype=jnp.int32)
    # What prompts add is left out: a row more takes as long beside one, and would seem cheap against the whole pass.
    cost = pace.cost[: rows + 1]

    def asked() -> jax.Array:
        wanted = jnp.minimum(length, pace.length)
        before = jnp.cumsum(wanted) - wanted
        return jnp.clip(budget - decodes.sum(dtype=jnp.int32) - before, 0, wanted)

    def gated() -> jax.Array:
        return widths(state.draft_odds, length, decodes, cost, budget)

    some = jnp.any(length > 0)
    return lax.cond(some, lambda: lax.cond(pace.length > 0, asked, gated), lambda: jnp.zeros_like(length))


def _owner(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """The slot of each of `rows`, when those of slot b end at `ends[b]`; slot 0 past the last."""
    return (ends[None, :] > rows[:, None]).argmax(1).astype(jnp.int32)


def _groups(
    inputs: Sent, n_prompt: jax.Array, n_groups: jax.Array, starts: jax.Array, width: jax.Array
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


def advance(state: Slots, place: Layout, chosen: jax.Array) -> tuple[Advanced, Grown]:
    """See `api.advance`."""
    places = jnp.arange(1 + MAX_DRAFT)
    rows = jnp.minimum(place.first[:, None] + places, len(place.source) - 1)  # [B, W]
    at = place.begin[:, None] + places
    state, tokens, n_accepted, closed = _conclude(state, place, chosen[rows], at)

    stops = (state.stop_ids[:, None] == tokens[..., None]).any(-1) & ~state.thinking[:, None]
    ends = stops | (at >= state.limit[:, None])
    chose = place.n_chosen > 0
    count = jnp.where(chose, jnp.minimum(n_accepted, _first(ends | closed)) + 1, 0)
    new = places < count[:, None]
    last = jnp.maximum(count - 1, 0)
    ended = jnp.take_along_axis(ends, last[:, None], 1)[:, 0]
    done = jnp.take_along_axis(closed, last[:, None], 1)[:, 0]
    token = jnp.take_along_axis(tokens, last[:, None], 1)[:, 0]
    drafted = jnp.pad(state.draft_sources, ((0, 0), (0, 1)))
    grown = Grown(
        tokens=jnp.where(new, tokens, -1),
        sources=jnp.where(new & (places < n_accepted[:, None]), drafted, 0),
        rows=rows,
        n_tokens=count,
    )
    slots = jnp.broadcast_to(jnp.arange(len(count))[:, None], new.shape)
    positions = jnp.where(new, at, state.history.shape[1])  # out of bounds: dropped
    return Advanced(
        token=jnp.where(chose, token, state.token),
        position=jnp.where(chose, place.begin + last, state.position),
        active=jnp.where(chose, ~ended, state.active),
        counts=state.counts.at[slots, jnp.maximum(tokens, 0)].add(jnp.where(new, 2, 0)),
        history=state.history.at[slots, positions].set(tokens, mode="drop"),
        n_drafts=jnp.where(chose, 0, state.n_drafts),
        thinking=state.thinking & ~(chose & done),
        conclude_at=state.conclude_at,
    ), grown


def _conclude(
    state: Slots, place: Layout, tokens: jax.Array, at: jax.Array
) -> tuple[Slots, jax.Array, jax.Array, jax.Array]:
    """Ends thoughts: the slots, the tokens `[B, W]` chosen at positions `at` with those of a conclusion in their
    places, how many drafts stand `[B]`, and after which tokens thoughts are over `[B, W]`.

    At its end id a model that thinks goes over to the conclusion, as it does at the budget.
    """

    def accepted(tokens: jax.Array) -> jax.Array:
        return accept(state.drafts, place.n_drafts, tokens)

    def thinking() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        written = _written(state, tokens, at)
        stops = (state.stop_ids[:, None] == written[..., None]).any(-1) & state.thinking[:, None]
        first = _first(stops)
        real = (first <= accepted(written)) & (place.n_chosen > 0)
        conclude_at = jnp.where(real, jnp.minimum(state.conclude_at, place.begin + first), state.conclude_at)
        written = _written(state._replace(conclude_at=conclude_at), tokens, at)
        return conclude_at, written, accepted(written), _closed(state, written, at)

    def plain() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return state.conclude_at, tokens, accepted(tokens), jnp.zeros(tokens.shape, bool)

    conclude_at, tokens, n, closed = lax.cond(jnp.any(state.thinking), thinking, plain)
    return state._replace(conclude_at=conclude_at), tokens, n, closed


def _written(state: Slots, tokens: jax.Array, at: jax.Array) -> jax.Array:
    """`tokens` `[B, W]` at positions `at`, with the conclusion in the place of those it covers."""
    index = at - state.conclude_at[:, None]
    concluded = jnp.take_along_axis(state.conclude, jnp.clip(index, 0, state.conclude.shape[1] - 1), 1)
    inside = state.thinking[:, None] & (index >= 0) & (index < state.conclude.shape[1]) & (concluded >= 0)
    return jnp.where(inside, concluded, tokens)


def _closed(state: Slots, tokens: jax.Array, at: jax.Array) -> jax.Array:
    """Whether a sequence that ends thoughts is the end of the generated ids with each of `tokens`; bool [B, W]."""
    n = state.close.shape[-1] - 1
    before = at[:, :1] - n + jnp.arange(n)
    known = jnp.take_along_axis(state.history, jnp.clip(before, 0, state.history.shape[1] - 1), 1)
    text = jnp.concatenate([jnp.where(before >= state.begin[:, None], known, -2), tokens], axis=1)
    ends = jnp.stack([text[:, w : w + n + 1] for w in range(tokens.shape[1])], axis=1)  # [B, W, n + 1]
    close = state.close[:, None]  # [B, 1, C, n + 1]
    same = ((close == ends[:, :, None]) | (close < 0)).all(-1) & (close[..., -1] >= 0)
    return same.any(-1) & state.thinking[:, None]


def _first(marks: jax.Array) -> jax.Array:
    """Index of the first mark of each row `[B, W]`, W if there is none; int32 [B]."""
    return jnp.where(marks.any(-1), marks.argmax(-1), marks.shape[-1]).astype(jnp.int32)
