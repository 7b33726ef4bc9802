"""The step: everything between two hand-overs to the host, as pure functions of arrays.

A step embeds its tokens, runs the trunk over them (prompt chunks and decode rows side by side), takes logits where a
token is needed, chooses, and updates the slots. It runs inside `shard_map`: all arrays are this device's part.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.trunk import TrunkConfig
from ...kernels.attention import Queries
from ...kernels.sample import Choice, choose
from ...kernels.tiles import map_rows
from ...model.trunk import Execution, Trunk
from .state import SlotState, StepInput, StepResult

Params = Mapping[str, jax.Array]
Output = tuple[jax.Array, SlotState, StepResult, jax.Array]
"""Pool and slots, updated; what was chosen; the last pass's logits `[B, V]`."""


def run_pass(
    config: TrunkConfig, run: Execution, params: Params, pool: jax.Array, state: SlotState, inputs: StepInput,
    layers: jax.Array,
) -> Output:  # fmt: skip
    """One trunk pass. `layers` int32 `[L + 1]`: how many layers run, then their indices, in order."""
    trunk = Trunk(config, params)
    from_slot = inputs.ids < 0
    at_slot = jnp.where(state.active, state.position, -1)
    ids = jnp.where(from_slot, state.token[inputs.slots], inputs.ids)
    positions = jnp.where(from_slot, at_slot[inputs.slots], inputs.positions)
    n_tokens, n_groups, n_rows = inputs.sizes[0]
    queries = Queries(inputs.slots, positions, n_tokens, inputs.starts, inputs.counts, n_groups, inputs.tables)
    x, pool = trunk(ids, queries, pool, layers[1:], layers[0], run)

    source = jnp.maximum(inputs.sample_at, 0)
    chosen_at = jnp.where(inputs.sample_at >= 0, positions[source] + 1, 0)  # 0: chooses nothing
    logits = _head(trunk, x[source], n_rows, run)
    choice = _choose_rows(state, logits, chosen_at)
    state = _advance(state, choice, chosen_at)
    result = StepResult(
        tokens=jnp.where(chosen_at > 0, choice.token, -1)[None],
        logprobs=choice.logprob[None],
        top_ids=choice.top_ids[None],
        top_logprobs=choice.top_logprobs[None],
    )
    return pool, state, result, logits


def _head(trunk: Trunk, x: jax.Array, n_rows: jax.Array, run: Execution) -> jax.Array:
    """Logits `[B, V]` of the first `n_rows` rows of `x` `[B, D]`; the others may be anything."""
    slots = len(x)
    padding = -slots % run.head_tile if run.head_tile else 0
    x = jnp.pad(x, ((0, padding), (0, 0)))
    return map_rows(lambda rows: trunk.logits(rows, run), run.head_tile, n_rows, x)[:slots]


def _choose_rows(state: SlotState, logits: jax.Array, chosen_at: jax.Array) -> Choice:
    """The choice of every slot that has a position to choose for; fields `[B, ...]`."""
    slots = len(chosen_at)

    def one(b: jax.Array) -> Choice:
        return choose(logits[b], state.row(b, chosen_at[b]))

    # A loop on every target: `vmap` would turn the conditions inside `choose` into selections, and every row would
    # pay for the threshold searches that few ask for.
    empty = jax.tree.map(
        lambda s: jnp.zeros((slots, *s.shape), s.dtype), jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
    )

    def row(b: jax.Array, choices: Choice) -> Choice:
        def store() -> Choice:
            return jax.tree.map(lambda all_, new: lax.dynamic_update_index_in_dim(all_, new, b, 0), choices, one(b))

        return lax.cond(chosen_at[b] > 0, store, lambda: choices)

    return lax.fori_loop(0, slots, row, empty)


def _advance(state: SlotState, choice: Choice, chosen_at: jax.Array) -> SlotState:
    """The slots after their choices; a slot ends at a stop id or at its limit."""
    chose = chosen_at > 0
    stopped = (state.stop_ids == choice.token[:, None]).any(-1) | (chosen_at >= state.limit)
    slots = jnp.arange(len(chosen_at))
    return state._replace(
        token=jnp.where(chose, choice.token, state.token),
        position=jnp.where(chose, chosen_at, state.position),
        active=jnp.where(chose, ~stopped, state.active),
        counts=state.counts.at[slots, choice.token].add(jnp.where(chose, 2, 0)),
    )


def run_passes(
    config: TrunkConfig, run: Execution, passes: int, params: Params, pool: jax.Array, state: SlotState,
    inputs: StepInput, layers: jax.Array,
) -> Output:  # fmt: skip
    """`passes` decode passes in one device loop. Slots that end in between sit out the rest."""
    slots = len(inputs.sample_at)

    def body(n: jax.Array, output: Output) -> Output:
        pool, state, results, _ = output
        pool, state, result, logits = run_pass(config, run, params, pool, state, inputs, layers)
        results = jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, n, 0), results, result)
        return pool, state, results, logits

    logits = jnp.zeros((slots, config.vocab_size), jnp.float32)
    return lax.fori_loop(0, passes, body, (pool, state, StepResult.empty(passes, slots), logits))


def admit(state: SlotState, slot: jax.Array, row: SlotState) -> SlotState:
    """The slots with row `slot` `[1]` replaced; -1 replaces nothing."""
    at = jnp.maximum(slot[0], 0)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        kept = lax.dynamic_slice_in_dim(old, at, 1)
        return lax.dynamic_update_slice_in_dim(old, jnp.where(slot[0] >= 0, new, kept), at, 0)

    return jax.tree.map(put, state, row)


def save_blocks(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """The contents `[C, L, 2, K, P, H]` of `blocks` `[C]`."""
    return lax.map(lambda b: lax.dynamic_index_in_dim(pool, b, 0, keepdims=False), blocks)


def load_blocks(pool: jax.Array, blocks: jax.Array, contents: jax.Array) -> jax.Array:
    """The pool with `contents` `[C, ...]` in `blocks` `[C]`; the null block takes padding."""

    def put(i: jax.Array, pool: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(pool, lax.dynamic_slice_in_dim(contents, i, 1), blocks[i], 0)

    return lax.fori_loop(0, len(blocks), put, pool)
