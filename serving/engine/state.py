"""What lives on the device between steps, and what the host sends and reads: plain pytrees.

Letters: B slots, G query groups, M table width, N steps of a device loop, T tokens of a step, V vocabulary. Under a
mesh the leading axis of every array is the data axis times the local size; inside a step only the local part is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import numerics
from ...kernels.sample import RowParams, seed_words
from .request import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams

STOP_COLUMNS = 2 * MAX_STOP_IDS
"""The model's own end ids, and the request's."""

Leaf = Any
"""An array: numpy on the host, traced inside a step, a `jax.ShapeDtypeStruct` where programs are declared."""


class SlotState(NamedTuple):
    """One row per running sequence. Donated to every step; the host only replaces whole rows (`admit`)."""

    token: Leaf  # int32 [B]: last chosen token, input of the next step
    position: Leaf  # int32 [B]: its absolute position
    limit: Leaf  # int32 [B]: last position that may be generated
    active: Leaf  # bool [B]: decoding; cleared on the device at a stop id or the limit
    stop_ids: Leaf  # int32 [B, STOP_COLUMNS], -1 where unused
    counts: Leaf  # int32 [B, V]: twice the times generated, plus one if in the prompt
    temperature: Leaf  # float32 [B]
    top_k: Leaf  # int32 [B], 0: off
    top_p: Leaf  # float32 [B]
    min_p: Leaf  # float32 [B]
    repetition: Leaf  # float32 [B]
    presence: Leaf  # float32 [B]
    frequency: Leaf  # float32 [B]
    seed: Leaf  # uint32 [B, 2]: low and high word
    bias_ids: Leaf  # int32 [B, MAX_LOGIT_BIAS], -1 where unused
    bias_values: Leaf  # float32 [B, MAX_LOGIT_BIAS]
    n_logprobs: Leaf  # int32 [B]: most likely tokens to report, -1: none

    @property
    def plain(self) -> jax.Array:
        """Whether a slot takes the most likely token as the model has it, and nothing but the token; bool [B]."""
        greedy = ~(self.temperature >= numerics.MIN_NORMAL)
        unchanged = (self.repetition == 1) & (self.presence == 0) & (self.frequency == 0)
        return greedy & unchanged & (self.bias_ids < 0).all(-1) & (self.n_logprobs < 0)

    def rows(self, positions: jax.Array) -> RowParams:
        """How the slots choose the tokens at `positions` `[B]`."""
        named = {name: getattr(self, name) for name in RowParams._fields if name != "position"}
        return RowParams(position=positions, **named)


_FIELDS: dict[str, tuple[type, tuple[int, ...]]] = {
    "token": (np.int32, ()),
    "position": (np.int32, ()),
    "limit": (np.int32, ()),
    "active": (np.bool_, ()),
    "stop_ids": (np.int32, (STOP_COLUMNS,)),
    "counts": (np.int32, (-1,)),
    "temperature": (np.float32, ()),
    "top_k": (np.int32, ()),
    "top_p": (np.float32, ()),
    "min_p": (np.float32, ()),
    "repetition": (np.float32, ()),
    "presence": (np.float32, ()),
    "frequency": (np.float32, ()),
    "seed": (np.uint32, (2,)),
    "bias_ids": (np.int32, (MAX_LOGIT_BIAS,)),
    "bias_values": (np.float32, (MAX_LOGIT_BIAS,)),
    "n_logprobs": (np.int32, ()),
}


def state_shapes(slots: int, vocab_size: int) -> SlotState:
    """The abstract state of `slots` rows."""
    return SlotState(
        **{
            name: jax.ShapeDtypeStruct((slots, *(vocab_size if n == -1 else n for n in shape)), dtype)
            for name, (dtype, shape) in _FIELDS.items()
        }
    )


def empty_rows(rows: int, vocab_size: int) -> SlotState:
    """Host rows that choose nothing."""
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), state_shapes(rows, vocab_size))
    return zeros._replace(
        stop_ids=np.full_like(zeros.stop_ids, -1),
        bias_ids=np.full_like(zeros.bias_ids, -1),
        n_logprobs=np.full_like(zeros.n_logprobs, -1),
    )


def fill_row(
    rows: SlotState, at: int, params: SamplingParams, *, seed: int, stop_ids: tuple[int, ...], limit: int,
    prompt: np.ndarray, generated: np.ndarray, position: int, active: bool,
) -> None:  # fmt: skip
    """Write the request into host row `at`. `generated` are its tokens so far (after preemption), the last of which
    is the next input, at `position`."""
    rows.token[at] = generated[-1] if len(generated) else 0
    rows.position[at] = position
    rows.limit[at] = limit
    rows.active[at] = active
    rows.stop_ids[at, : len(stop_ids)] = stop_ids
    counts = 2 * np.bincount(generated, minlength=rows.counts.shape[1])
    counts[prompt] += 1 - counts[prompt] % 2
    rows.counts[at] = counts
    rows.temperature[at] = params.temperature
    rows.top_k[at] = min(params.top_k, 2**31 - 1)
    rows.top_p[at] = params.top_p
    rows.min_p[at] = params.min_p
    rows.repetition[at] = params.repetition_penalty
    rows.presence[at] = params.presence_penalty
    rows.frequency[at] = params.frequency_penalty
    rows.seed[at] = seed_words(seed)
    for i, (token, bias) in enumerate(params.logit_bias):
        rows.bias_ids[at, i] = token
        rows.bias_values[at, i] = bias
    rows.n_logprobs[at] = -1 if params.logprobs is None else params.logprobs


class StepInput(NamedTuple):
    """What the host sends for one step. A token with id -1 is a decode row: its id and position are the slot's."""

    ids: Leaf  # int32 [T]
    slots: Leaf  # int32 [T]
    positions: Leaf  # int32 [T]
    starts: Leaf  # int32 [G]: first token of each query group (kernels/attention/api.py)
    counts: Leaf  # int32 [G]
    sample_at: Leaf  # int32 [B]: token whose logits choose the slot's next token, -1: none
    tables: Leaf  # int32 [B, M]
    sizes: Leaf  # int32 [1, 3]: tokens, groups, one more than the highest slot that chooses


def input_shapes(data: int, slots: int, tokens: int, groups: int, table_width: int) -> StepInput:
    """The abstract input of a step with `tokens` tokens in `groups` groups per data shard."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((data * shape[0], *shape[1:]), np.int32)

    return StepInput(
        ids=ints(tokens), slots=ints(tokens), positions=ints(tokens), starts=ints(groups), counts=ints(groups),
        sample_at=ints(slots), tables=ints(slots, table_width), sizes=ints(1, 3),
    )  # fmt: skip


class Keep(NamedTuple):
    """What steps hand back beside their results; static."""

    logits: bool = False
    hidden: bool = False


class Kept(NamedTuple):
    """What the last pass chose from; arrays without columns where they are not kept."""

    logits: jax.Array  # float32 [B, V]
    hidden: jax.Array  # float32 [B, D]: hidden states before the final norm

    @staticmethod
    def empty(keep: Keep, slots: int, vocab_size: int, d_model: int) -> Kept:
        return Kept(
            jnp.zeros((slots, vocab_size if keep.logits else 0), jnp.float32),
            jnp.zeros((slots, d_model if keep.hidden else 0), jnp.float32),
        )


class StepResult(NamedTuple):
    """What the host reads after a step of N passes. A slot that chose nothing in a pass has token -1."""

    tokens: jax.Array  # int32 [N, B]
    logprobs: jax.Array  # float32 [N, B]
    top_ids: jax.Array  # int32 [N, B, MAX_TOP_LOGPROBS]
    top_logprobs: jax.Array  # float32 [N, B, MAX_TOP_LOGPROBS]

    @staticmethod
    def empty(passes: int, slots: int) -> StepResult:
        return StepResult(
            tokens=jnp.full((passes, slots), -1, jnp.int32),
            logprobs=jnp.zeros((passes, slots), jnp.float32),
            top_ids=jnp.full((passes, slots, MAX_TOP_LOGPROBS), -1, jnp.int32),
            top_logprobs=jnp.zeros((passes, slots, MAX_TOP_LOGPROBS), jnp.float32),
        )
