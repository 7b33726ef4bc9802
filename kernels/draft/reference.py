"""Drafting in plain JAX: all slots side by side, one place of their chains after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..numerics import MIN_NORMAL
from ..sample import gumbel_of
from .base import (
    CERTAIN,
    LONGEST_MATCH,
    LOOKUP,
    MAX_DRAFTS,
    SHADOW,
    SHADOW_PLACES,
    SHORTEST_MATCH,
    UNKNOWN,
    DraftInput,
    Drafts,
    DraftWeights,
)

NOISE = "noise"
"""Scope, in names of operations, of what only sampled tokens need."""


class _Slots(NamedTuple):
    """What does not change while the chains grow."""

    room: Array  # int32 [B]: 0 for slots that draft nothing
    lookup: Array  # bool [B]: may use the lookup
    shadow: Array  # bool [B]: may use the shadow
    kind: Array  # int32 [B]: temperature class
    context: Array  # float32 [B, r]: z


class _Match(NamedTuple):
    """What a chain follows: an earlier occurrence of its last tokens."""

    length: Array  # int32 [B]: in tokens, 0 for none
    next: Array  # int32 [B]: index of the token to copy first
    place: Array  # int32 [B]: where it was found


class _Chains(NamedTuple):
    place: Array  # int32 []
    alive: Array  # bool [B]: may get a draft at `place`
    follows: Array  # bool [B]: has copied all since it found the match
    match: _Match
    product: Array  # float32 [B]
    state: Array  # float32 [B, r]: s
    drafts: Drafts


class _Guess(NamedTuple):
    """What the shadow says about a place."""

    token: Array  # int32 [B]
    probability: Array  # float32 [B]


def _rows(ids: Array, table: Array) -> Array:
    return table[ids].astype(jnp.float32)


class Ways(NamedTuple):
    """What a backend does in its own way."""

    rows: Callable[[Array, Array], Array] = _rows
    """Rows of a table `[V, r]`, float32, from their ids and the table."""
    cond: Callable[[Array, Callable[[], Any], Callable[[], Any]], Any] = lax.cond
    """The result of the first function where a condition holds, or else of the second."""


def draft(weights: DraftWeights, inputs: DraftInput, ways: Ways = Ways()) -> Drafts:  # noqa: B008
    """See `api.draft`. Tables may have more columns than r: zeros."""
    slots = _slots(weights, inputs)
    n, rank = inputs.hidden.shape[0], weights.start.shape[0]
    chains = _Chains(
        place=jnp.int32(0),
        alive=slots.room > 0,
        follows=jnp.zeros(n, bool),
        match=_Match(*(jnp.zeros(n, jnp.int32) for _ in _Match._fields)),
        product=jnp.ones(n, jnp.float32),
        state=jnp.broadcast_to(weights.start, (n, rank)),
        drafts=Drafts(
            tokens=jnp.full((n, MAX_DRAFTS), -1, jnp.int32),
            source=jnp.zeros((n, MAX_DRAFTS), jnp.int32),
            probability=jnp.zeros((n, MAX_DRAFTS), jnp.float32),
            length=jnp.zeros(n, jnp.int32),
        ),
    )

    def unfinished(chains: _Chains) -> Array:
        return (chains.place < MAX_DRAFTS) & jnp.any(chains.alive)

    return lax.while_loop(unfinished, lambda chains: _extend(weights, inputs, slots, chains, ways), chains).drafts


def _slots(weights: DraftWeights, inputs: DraftInput) -> _Slots:
    room = jnp.where(inputs.active, jnp.clip(inputs.room, 0, MAX_DRAFTS), 0)
    lookup = (room > 0) & (inputs.sources & LOOKUP > 0)
    shadow = (room > 0) & (inputs.sources & SHADOW > 0)
    context = lax.cond(
        jnp.any(shadow),
        lambda: _rms(inputs.hidden, weights.epsilon) @ weights.context,
        lambda: jnp.zeros((room.shape[0], weights.start.shape[0]), jnp.float32),
    )
    return _Slots(
        room=room,
        lookup=lookup,
        shadow=shadow,
        kind=_temperature_class(inputs.temperature, weights.gate_temperatures),
        context=context,
    )


def _is_greedy(temperature: Array) -> Array:
    return ~(temperature >= MIN_NORMAL)


def _temperature_class(temperature: Array, of_classes: Array) -> Array:
    if of_classes.shape[0] == 1:
        return jnp.zeros(temperature.shape, jnp.int32)
    nearest = jnp.argmin(jnp.abs(temperature[:, None] - of_classes[1:]), axis=1) + 1
    return jnp.where(_is_greedy(temperature), 0, nearest).astype(jnp.int32)


def _find_match(inputs: DraftInput, place: Array, tokens: Array) -> _Match:
    """The longest occurrence, in the history, of the tokens before `place`, the most recent of equally long ones."""
    history, size = inputs.history, inputs.history.shape[1]
    last = inputs.position + place
    ends = lax.broadcasted_iota(jnp.int32, history.shape, 1)  # of an occurrence
    begin = _prediction(inputs)[:, None]
    running = (ends <= inputs.position[:, None]) & (ends < last[:, None]) | (ends >= begin)
    length = jnp.zeros_like(history)
    at = last[:, None] - jnp.arange(LONGEST_MATCH)
    wanted = jnp.where(at >= 0, _tokens_at(inputs, tokens, at), -1)  # all gathered at once: a TPU starts few operations
    for back in range(LONGEST_MATCH):
        shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-2)[:, :size]
        running &= (shifted == wanted[:, back, None]) & ((ends < begin) | (ends >= begin + back))
        length += running
    best = jnp.max(jnp.where(length >= SHORTEST_MATCH, length * size + ends, 0), axis=1)
    return _Match(best // size, best % size + 1, jnp.broadcast_to(place, best.shape))


def _prediction(inputs: DraftInput) -> Array:
    """Where the predictions begin in the histories, int32 [B]; behind anything where there is none."""
    size = inputs.history.shape[1]
    begin = size - jnp.clip(inputs.predicted, 0, size)
    there = (begin < size) & (inputs.position + MAX_DRAFTS < begin)
    return jnp.where(there, begin, np.int32(2**30))


def _tokens_at(inputs: DraftInput, tokens: Array, at: Array) -> Array:
    """The tokens at indices `at` [B, n] of the histories, which go on with the drafts `tokens` [B, J]; -1 behind the
    end of a prediction."""
    old = jnp.take_along_axis(inputs.history, jnp.clip(at, 0, inputs.history.shape[1] - 1), axis=1)
    drafted = jnp.clip(at - inputs.position[:, None] - 1, 0, MAX_DRAFTS - 1)
    new = jnp.take_along_axis(tokens, drafted, axis=1)
    known = (at <= inputs.position[:, None]) | (at >= _prediction(inputs)[:, None])
    return jnp.where(known, jnp.where(at < inputs.history.shape[1], old, -1), new)


def _extend(weights: DraftWeights, inputs: DraftInput, slots: _Slots, chains: _Chains, ways: Ways) -> _Chains:
    """One more draft for every chain that is alive."""
    place, drafts, cond = chains.place, chains.drafts, ways.cond
    seeks = chains.alive & slots.lookup & ~chains.follows
    found = cond(
        jnp.any(seeks),
        lambda: _find_match(inputs, place, drafts.tokens),
        lambda: jax.tree.map(jnp.zeros_like, chains.match),
    )
    match = jax.tree.map(lambda new, old: jnp.where(seeks, new, old), found, chains.match)
    follows = chains.follows | (seeks & (match.length > 0))
    copied = _tokens_at(inputs, drafts.tokens, (match.next + place - match.place)[:, None])[:, 0]
    follows &= copied >= 0
    sure = follows & (_lookup_probability(weights, slots, match, UNKNOWN, place) >= CERTAIN)
    can_ask = chains.alive & slots.shadow & (place < SHADOW_PLACES)
    asks = can_ask & ~sure

    # The state rolls over every token, whoever drafted it.
    u = cond(jnp.any(can_ask), lambda: _read(weights, inputs, place, drafts.tokens, ways.rows), lambda: slots.context)
    state = cond(jnp.any(can_ask), lambda: _cell(weights, chains.state, u, slots.context), lambda: chains.state)
    nothing = _Guess(jnp.full_like(slots.room, -1), jnp.zeros_like(chains.product))
    guess = cond(
        jnp.any(asks), lambda: _guess(weights, inputs, slots.kind, place, state, u, asks, cond), lambda: nothing
    )

    says = jnp.where(asks, (guess.token == copied).astype(jnp.int32), UNKNOWN)
    expected = _lookup_probability(weights, slots, match, says, place)
    from_shadow = asks & ~(follows & ~(guess.probability > expected))
    token = jnp.where(from_shadow, guess.token, copied)
    probability = jnp.where(from_shadow, guess.probability, expected)
    product = chains.product * probability
    stands = chains.alive & (follows | asks) & (product >= inputs.floor)

    def put(all_: Array, new: Array) -> Array:
        return all_.at[:, place].set(jnp.where(stands, new, all_[:, place]))

    return _Chains(
        place=place + 1,
        alive=stands & (place + 1 < slots.room),
        follows=follows & (token == copied),
        match=match,
        product=jnp.where(stands, product, chains.product),
        state=state,
        drafts=Drafts(
            tokens=put(drafts.tokens, token),
            source=put(drafts.source, jnp.where(from_shadow, SHADOW, LOOKUP)),
            probability=put(drafts.probability, probability),
            length=drafts.length + stands,
        ),
    )


def _lookup_probability(weights: DraftWeights, slots: _Slots, match: _Match, says: Array | int, place: Array) -> Array:
    return weights.lookup[slots.kind, match.length, says, place - match.place]


def _rms(x: Array, epsilon: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _read(
    weights: DraftWeights, inputs: DraftInput, place: Array, tokens: Array, rows: Callable[[Array, Array], Array]
) -> Array:
    """u of the token before `place`."""
    before = jnp.where(place == 0, inputs.token, tokens[:, jnp.maximum(place - 1, 0)])
    before = jnp.clip(before, 0, weights.read.shape[0] - 1)
    step = weights.step[jnp.minimum(place, SHADOW_PLACES - 1)]
    return rows(before, weights.read)[:, : len(step)] * weights.read_scale[before][:, None] + step


def _cell(weights: DraftWeights, state: Array, u: Array, z: Array) -> Array:
    gate, candidate = jnp.split(state @ weights.recur, 2, axis=1)
    keep = jax.nn.sigmoid(gate + weights.gate_u * u + weights.gate_z * z + weights.bias_g)
    return keep * state + (1 - keep) * jnp.tanh(candidate + u + z + weights.bias_c)


def _guess(
    weights: DraftWeights, inputs: DraftInput, kind: Array, place: Array, state: Array, u: Array, asks: Array, cond: Any
) -> _Guess:
    mlp = jax.nn.silu(_rms(state, weights.epsilon) @ weights.up) @ weights.down
    o = state + u @ weights.markov + mlp
    head = weights.head.astype(jnp.float32)
    wide = jnp.pad(o, ((0, 0), (0, head.shape[1] - o.shape[1])))
    scores = jnp.einsum("br,zr->bz", wide, head) * weights.head_scale
    greedy = _is_greedy(inputs.temperature)
    ids = weights.vocab.astype(jnp.uint32)

    def noisy() -> Array:
        noise = jax.vmap(gumbel_of, (0, 0, None))(inputs.seed, inputs.position + 1 + place, ids)
        divisor = jnp.where(greedy, np.float32(1), inputs.temperature)
        return scores / divisor[:, None] + jnp.where(greedy[:, None], np.float32(0), noise)

    with jax.named_scope(NOISE):
        scores = cond(jnp.any(asks & ~greedy), noisy, lambda: scores)
    best = jnp.argmax(scores, axis=1)
    features = jnp.concatenate([o, u, _confidence_features(scores, best)], axis=1)
    confidence = features @ weights.conf + weights.conf_bias[place]
    slope, offset = weights.gate[kind, place, 0], weights.gate[kind, place, 1]
    return _Guess(weights.vocab[best], jax.nn.sigmoid(slope * confidence + offset))


def _confidence_features(scores: Array, best: Array) -> Array:
    """float32 [B, FEATURES] of scores [B, Z], the largest of which are at `best`."""
    below = scores - jnp.max(scores, axis=1, keepdims=True)
    is_best = lax.broadcasted_iota(jnp.int32, scores.shape, 1) == best[:, None]
    margin = -jnp.max(jnp.where(is_best, -jnp.inf, below), axis=1)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=1)
    log_total = jnp.log(total)
    entropy = log_total - jnp.sum(weights * below, axis=1) / total
    return jnp.stack([-log_total, margin, entropy], axis=1)
