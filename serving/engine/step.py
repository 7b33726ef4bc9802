"""The step: everything between two hand-overs to the host, as pure functions of arrays.

A step embeds its tokens, runs the trunk over them (prompt chunks and decode rows side by side), takes logits where a
token is needed, chooses, and updates the slots. It runs inside `shard_map`: all arrays are this device's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...configs.trunk import TrunkConfig
from ...kernels.attention import KVPool, Queries
from ...kernels.sample import Choice, choose_rows
from ...model.trunk import Execution, Trunk
from .state import Keep, Kept, SlotState, StepInput, StepResult

Params = Mapping[str, Any]
Output = tuple[KVPool, SlotState, StepResult, Kept]
"""Pool and slots, updated; what was chosen; and from what."""


def run_pass(
    config: TrunkConfig, run: Execution, keep: Keep, params: Params, pool: KVPool, state: SlotState,
    inputs: StepInput, layers: jax.Array, hot: Any = None,
) -> Output:  # fmt: skip
    """One trunk pass. `layers` int32 `[L + 1]`: how many layers run, then their indices, in order. `hot` holds copies
    of some of the pool's blocks."""
    trunk = Trunk(config, params)
    from_slot = inputs.ids < 0
    at_slot = jnp.where(state.active, state.position, -1)
    ids = jnp.where(from_slot, state.token[inputs.slots], inputs.ids)
    positions = jnp.where(from_slot, at_slot[inputs.slots], inputs.positions)
    n_tokens, n_groups, n_rows = inputs.sizes[0]
    queries = Queries(inputs.slots, positions, n_tokens, inputs.starts, inputs.counts, n_groups, inputs.tables)
    x, pool = trunk(ids, queries, pool, layers[1:], layers[0], run, hot)

    source = jnp.maximum(inputs.sample_at, 0)
    chosen_at = jnp.where(inputs.sample_at >= 0, positions[source] + 1, 0)  # 0: chooses nothing
    hidden = x[source]
    choice, logits = _choose(trunk, run, keep.logits, hidden, n_rows, state, chosen_at)
    state = _advance(state, choice, chosen_at)
    result = StepResult(
        tokens=jnp.where(chosen_at > 0, choice.token, -1)[None],
        logprobs=choice.logprob[None],
        top_ids=choice.top_ids[None],
        top_logprobs=choice.top_logprobs[None],
    )
    return pool, state, result, Kept(logits, hidden if keep.hidden else hidden[:, :0])


def _choose(
    trunk: Trunk, run: Execution, keep_logits: bool, x: jax.Array, n_rows: jax.Array, state: SlotState,
    chosen_at: jax.Array,
) -> tuple[Choice, jax.Array]:  # fmt: skip
    """What the slots choose, from their hidden states `x` `[B, D]`, of which the first `n_rows` count.

    Logits are in memory only when somebody wants them: to keep, or for more than the most likely token.
    """
    slots = len(chosen_at)
    padding = -slots % run.head_tile if run.head_tile else 0
    x = jnp.pad(x, ((0, padding), (0, 0)))
    choosing = chosen_at > 0

    def from_logits() -> tuple[Choice, jax.Array]:
        logits = trunk.logits(x, n_rows, run)[:slots]
        return choose_rows(logits, state.rows(chosen_at), choosing, backend=run.kernels.sample), logits

    if keep_logits:
        return from_logits()

    def most_likely() -> Choice:
        tokens = trunk.greedy(x, n_rows, run)[:slots]
        return Choice.none(slots)._replace(token=jnp.where(choosing, tokens, 0))

    choice = lax.cond(jnp.any(choosing & ~state.plain), lambda: from_logits()[0], most_likely)
    return choice, jnp.zeros((slots, 0), jnp.float32)


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
    config: TrunkConfig, run: Execution, keep: Keep, passes: int, hot_blocks: int, params: Params, pool: KVPool,
    state: SlotState, inputs: StepInput, layers: jax.Array,
) -> Output:  # fmt: skip
    """`passes` decode passes in one device loop. Slots that end in between sit out the rest.

    Copies of `hot_blocks` blocks stay on a TPU's chip for all passes. They are full: no pass writes to them.
    """
    slots = len(inputs.sample_at)
    hot = _stage(pool, state, inputs, hot_blocks) if hot_blocks else None

    def body(n: jax.Array, output: Output) -> Output:
        pool, state, results, _ = output
        pool, state, result, kept = run_pass(config, run, keep, params, pool, state, inputs, layers, hot)
        results = jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, n, 0), results, result)
        return pool, state, results, kept

    kept = Kept.empty(keep, slots, config.vocab_size, config.d_model)
    return lax.fori_loop(0, passes, body, (pool, state, StepResult.empty(passes, slots), kept))


def _stage(pool: KVPool, state: SlotState, inputs: StepInput, blocks: int) -> Any:
    """Copies of up to `blocks` blocks of the sequences that run, on the chip."""
    from ...kernels.attention import tpu_hot

    runs = state.active & (inputs.sample_at >= 0)
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


def load_blocks(pool: KVPool, blocks: jax.Array, contents: KVPool) -> KVPool:
    """The pool with `contents` (`[C, ...]` each) in `blocks` `[C]`; the null block takes padding."""

    def put(part: jax.Array, new: jax.Array) -> jax.Array:
        def one(i: jax.Array, part: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(part, lax.dynamic_slice_in_dim(new, i, 1), blocks[i], 0)

        return lax.fori_loop(0, len(blocks), one, part)

    return jax.tree.map(put, pool, contents)
