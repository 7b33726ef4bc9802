"""The step: everything between two hand-overs to the host, as pure functions of arrays.

A step embeds its tokens, runs the trunk over them (prompt chunks and decode rows side by side), takes logits where a
token is needed, chooses, keeps the drafted tokens that are what was chosen, updates the slots, and drafts the next
tokens. It runs inside `shard_map`: all arrays are this device's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.trunk import TrunkConfig
from ...kernels import numerics
from ...kernels.attention import KVPool
from ...kernels.draft import Drafts
from ...kernels.passes import Layout, Pace, Sent, Slots, advance, lay_out
from ...kernels.sample import Choice, choose_rows
from ...model.trunk import Execution, Trunk
from .drafting import draft_next, guide
from .state import Guided, Keep, Kept, SlotState, StepInput, StepResult

Params = Mapping[str, Any]
Output = tuple[KVPool, SlotState, StepResult, Kept]
"""Pool and slots, updated; what was chosen; and from what."""


class Fixed(NamedTuple):
    """Arrays that a step reads and never changes."""

    params: Params
    drafter: Any
    """A `Drafter`; None: nothing is ever drafted."""


def run_pass(
    config: TrunkConfig, run: Execution, keep: Keep, rows: int, fixed: Fixed, pool: KVPool, state: SlotState,
    inputs: StepInput, layers: jax.Array, hot: Any = None,
) -> Output:  # fmt: skip
    """One trunk pass, with at most `rows` rows that choose. `layers` int32 `[L + 1]`: how many layers run, then their
    indices, in order. `hot` holds copies of some of the pool's blocks."""
    trunk = Trunk(config, fixed.params)
    backend, drafter = run.kernels.passes, fixed.drafter
    pace = None if drafter is None else Pace(drafter.cost, drafter.length)
    if drafter is not None:
        state = guide(state, inputs.guided)
    place = lay_out(Slots.of(state), Sent.of(inputs), pace, rows, run.tile, backend=backend)
    x, pool = trunk(place.ids, place.queries, pool, layers[1:], layers[0], run, hot)

    hidden = x[place.source]
    choice, logits = _choose(trunk, run, keep.logits, hidden, state, place, inputs.guided)
    advanced, grown = advance(Slots.of(state), place, choice.token, backend=backend)
    state = state._replace(**advanced._asdict())
    if drafter is not None:
        last = hidden[jnp.minimum(place.first + grown.n_tokens - 1, rows - 1)]
        state = draft_next(drafter, run.kernels.draft, state, last, grown.n_tokens > 0)
    result = StepResult(
        tokens=grown.tokens[None],
        sources=grown.sources[None],
        drafted=place.n_drafts[None],
        first=place.first[None],
        logprobs=choice.logprob[grown.rows][None],
        top_ids=choice.top_ids[grown.rows][None],
        top_logprobs=choice.top_logprobs[grown.rows][None],
    )
    drafts = Drafts(state.drafts, state.draft_sources, state.draft_odds, state.n_drafts)
    summed = _summed(trunk, x, inputs) if keep.summed else jnp.zeros((len(inputs.last), 0), jnp.float32)
    return pool, state, result, Kept(logits, hidden if keep.hidden else hidden[:, :0], drafts, summed)


def _summed(trunk: Trunk, x: jax.Array, inputs: StepInput) -> jax.Array:
    """For each slot `[B, D]` the sum of the normalised hidden states of its prompt tokens, which come first in `x`."""
    tokens, slots = len(inputs.ids), len(inputs.last)
    there = jnp.arange(tokens) < inputs.sizes[0, 0]
    normalised = jnp.where(there[:, None], trunk.normalised(x[:tokens]), 0.0)
    mine = (inputs.slots[None] == jnp.arange(slots)[:, None]) & there
    return jnp.matmul(mine.astype(jnp.float32), normalised, precision=lax.Precision.HIGHEST)


def _choose(
    trunk: Trunk, run: Execution, keep_logits: bool, x: jax.Array, state: SlotState, place: Layout, guided: Guided
) -> tuple[Choice, jax.Array]:
    """What the rows choose, from their hidden states `x` `[R, D]`.

    Logits are in memory only when somebody wants them: to keep, or for more than the most likely token.
    """
    rows = len(x)
    padding = -rows % run.head_tile if run.head_tile else 0
    x = jnp.pad(x, ((0, padding), (0, 0)))
    choosing = place.chosen_at > 0
    first = guided.first[place.slots]
    mask = jnp.where(first >= 0, first + jnp.arange(rows) - place.first[place.slots], -1)

    def from_logits() -> tuple[Choice, jax.Array]:
        logits = trunk.logits(x, place.n_rows, run)[:rows]
        how = state.rows(place.slots, place.chosen_at, place.before, mask, guided.masks)
        choice = choose_rows(logits, how, choosing, backend=run.kernels.sample)
        greedy = ~(how.temperature >= numerics.MIN_NORMAL)
        return _relaxed(choice, logits, jnp.where(greedy, state.relax[place.slots], 0.0), place.draft), logits

    if keep_logits:
        return from_logits()

    def most_likely() -> Choice:
        tokens = trunk.greedy(x, place.n_rows, run)[:rows]
        return Choice.none(rows)._replace(token=jnp.where(choosing, tokens, 0))

    everything = jnp.any(choosing & ((mask >= 0) | ~state.plain[place.slots]))
    choice = lax.cond(everything, lambda: from_logits()[0], most_likely)
    return choice, jnp.zeros((rows, 0), jnp.float32)


def _relaxed(choice: Choice, logits: jax.Array, margin: jax.Array, draft: jax.Array) -> Choice:
    """The choice, or the drafted token `draft` `[R]` (-1: none) where its logit is at most `margin` `[R]` below that
    of the choice: what is not exact, and was asked for."""

    def relaxed() -> Choice:
        rows = jnp.arange(len(draft))
        enough = logits[rows, jnp.maximum(draft, 0)] >= logits[rows, choice.token] - margin
        return choice._replace(token=jnp.where((margin > 0) & (draft >= 0) & enough, draft, choice.token))

    return lax.cond(jnp.any(margin > 0), relaxed, lambda: choice)


def run_passes(
    config: TrunkConfig, run: Execution, keep: Keep, rows: int, passes: int, hot_blocks: int, fixed: Fixed,
    pool: KVPool, state: SlotState, inputs: StepInput, layers: jax.Array,
) -> Output:  # fmt: skip
    """`passes` decode passes in one device loop. Slots that end in between sit out the rest.

    Copies of `hot_blocks` blocks stay on a TPU's chip for all passes. They are full: no pass writes to them.
    """
    slots = len(inputs.last)
    hot = _stage(pool, state, inputs, hot_blocks) if hot_blocks else None

    def body(n: jax.Array, output: Output) -> Output:
        pool, state, results, _ = output
        pool, state, result, kept = run_pass(config, run, keep, rows, fixed, pool, state, inputs, layers, hot)
        results = jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, n, 0), results, result)
        return pool, state, results, kept

    kept = Kept.empty(keep, rows, slots, config.vocab_size, config.d_model)
    return lax.fori_loop(0, passes, body, (pool, state, StepResult.empty(passes, slots), kept))


def _stage(pool: KVPool, state: SlotState, inputs: StepInput, blocks: int) -> Any:
    """Copies of up to `blocks` blocks of the sequences that run, on the chip."""
    from ...kernels.attention import tpu_hot

    runs = state.active & inputs.decodes
    return tpu_hot.stage(pool, inputs.tables, jnp.where(runs, state.position, 0), blocks)


def admit(state: SlotState, slot: jax.Array, row: SlotState) -> SlotState:
    """The slots with row `slot` `[1]` replaced; -1 replaces nothing."""
    at = jnp.maximum(slot[0], 0)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        kept = lax.dynamic_slice_in_dim(old, at, 1)
        return lax.dynamic_update_slice_in_dim(old, jnp.where(slot[0] >= 0, new, kept), at, 0)

    return jax.tree.map(put, state, row)


def save_blocks(pool: KVPool, blocks: jax.Array) -> KVPool:
    """The contents (`[C, ...]` each) of `blocks` `[C]`."""

    def take(part: jax.Array) -> jax.Array:
        return lax.map(lambda b: lax.dynamic_index_in_dim(part, b, 0, keepdims=False), blocks)

    return jax.tree.map(take, pool)


def load_blocks(pool: KVPool, blocks: jax.Array, contents: tuple[KVPool, ...]) -> tuple[KVPool, jax.Array]:
    """The pool with `contents`, one block `[1, ...]` for each of `blocks` `[C]`; the null block takes padding. And
    something small, int32 `[1]`, that is there once `contents` have been read."""
    for i, content in enumerate(contents):
        pool = jax.tree.map(
            lambda part, new, i=i: lax.dynamic_update_slice_in_dim(part, new, blocks[i], 0), pool, content
        )
    return pool, blocks.sum(dtype=jnp.int32)[None]


def copy_block(pool: KVPool, pair: jax.Array) -> KVPool:
    """The pool with block `pair[0]` also in the place of block `pair[1]`."""

    def put(part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(part, lax.dynamic_slice_in_dim(part, pair[0], 1), pair[1], 0)

    return jax.tree.map(put, pool)
