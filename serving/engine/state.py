"""What lives on the device between steps, and what the host sends and reads: plain pytrees.

Letters: B slots, G query groups, J drafted tokens of a slot (at most), M table width, N passes of a device loop, R rows
that choose, S positions, T prompt tokens of a step, V vocabulary, W tokens of a slot in a pass. Under a
mesh the leading axis of every array is the data axis times the local size; inside a step only the local part is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...configs.engine import MAX_DRAFT, MAX_TOP_LOGPROBS
from ...kernels import numerics
from ...kernels.draft import Drafts
from ...kernels.sample import RowParams, seed_words
from .request import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from .thoughts import MAX_CLOSE, MAX_CLOSE_TOKENS, MAX_CONCLUDE_TOKENS, Thinking

STOP_COLUMNS = 2 * MAX_STOP_IDS
"""The model's own end ids, and the request's."""

Leaf = Any
"""An array: numpy on the host, traced inside a step, a `jax.ShapeDtypeStruct` where programs are declared."""


class SlotState(NamedTuple):
    """One row per running sequence. Donated to every step; the host only replaces whole rows (`admit`)."""

    token: Leaf  # int32 [B]: last chosen token, input of the next step
    position: Leaf  # int32 [B]: its absolute position
    limit: Leaf  # int32 [B]: last position that may be generated
    begin: Leaf  # int32 [B]: position of the first generated token
    active: Leaf  # bool [B]: decoding; cleared on the device at a stop id or the limit
    stop_ids: Leaf  # int32 [B, STOP_COLUMNS], -1 where unused
    history: Leaf  # int32 [B, S]: prompt and answer, by position
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
    predicted: Leaf  # int32 [B]: tokens at the end of the history's row that predict the answer
    sources: Leaf  # int32 [B]: where drafts may come from (kernels/draft: LOOKUP, SHADOW), 0: nowhere
    relax: Leaf  # float32 [B]: how far below the best logit a drafted token may be and still stand; 0: exact
    drafts: Leaf  # int32 [B, J]: tokens drafted for the next pass
    draft_sources: Leaf  # int32 [B, J]
    draft_odds: Leaf  # float32 [B, J]: probability of each to stand if those before it do
    n_drafts: Leaf  # int32 [B]
    thinking: Leaf  # bool [B]: what is generated are thoughts
    conclude_at: Leaf  # int32 [B]: position from which `conclude` takes the place of what is chosen, while thinking
    conclude: Leaf  # int32 [B, MAX_CONCLUDE_TOKENS], -1 where unused
    close: Leaf  # int32 [B, MAX_CLOSE, MAX_CLOSE_TOKENS]: what ends thoughts, at the right, -1 before it

    @property
    def plain(self) -> jax.Array:
        """Whether a slot takes the most likely token as the model has it, and nothing but the token; bool [B]."""
        greedy = ~(self.temperature >= numerics.MIN_NORMAL)
        unchanged = (self.repetition == 1) & (self.presence == 0) & (self.frequency == 0)
        relaxed = (self.relax > 0) & (self.n_drafts > 0)
        return greedy & unchanged & ~relaxed & (self.bias_ids < 0).all(-1) & (self.n_logprobs < 0)

    def rows(
        self, slots: jax.Array, positions: jax.Array, drafted: jax.Array, mask: jax.Array, masks: jax.Array
    ) -> RowParams:
        """How rows of the slots `slots` `[R]` choose the tokens at `positions` `[R]`, when the tokens `drafted`
        `[R, J]` (-1: none) are between the slot's last and theirs, among those that `mask` `[R]` of `masks` allows."""
        own = {"position": positions, "slot": slots, "drafted": drafted, "counts": self.counts}
        own |= {"mask": mask, "masks": masks}
        named = {name: getattr(self, name)[slots] for name in RowParams._fields if name not in own}
        return RowParams(**own, **named)


_FIELDS: dict[str, tuple[type, tuple[int | str, ...], int]] = {
    "token": (np.int32, (), 0),
    "position": (np.int32, (), 0),
    "limit": (np.int32, (), 0),
    "begin": (np.int32, (), 0),
    "active": (np.bool_, (), 0),
    "stop_ids": (np.int32, (STOP_COLUMNS,), -1),
    "history": (np.int32, ("S",), 0),
    "counts": (np.int32, ("V",), 0),
    "temperature": (np.float32, (), 0),
    "top_k": (np.int32, (), 0),
    "top_p": (np.float32, (), 0),
    "min_p": (np.float32, (), 0),
    "repetition": (np.float32, (), 0),
    "presence": (np.float32, (), 0),
    "frequency": (np.float32, (), 0),
    "seed": (np.uint32, (2,), 0),
    "bias_ids": (np.int32, (MAX_LOGIT_BIAS,), -1),
    "bias_values": (np.float32, (MAX_LOGIT_BIAS,), 0),
    "n_logprobs": (np.int32, (), -1),
    "predicted": (np.int32, (), 0),
    "sources": (np.int32, (), 0),
    "relax": (np.float32, (), 0),
    "drafts": (np.int32, (MAX_DRAFT,), -1),
    "draft_sources": (np.int32, (MAX_DRAFT,), 0),
    "draft_odds": (np.float32, (MAX_DRAFT,), 0),
    "n_drafts": (np.int32, (), 0),
    "thinking": (np.bool_, (), 0),
    "conclude_at": (np.int32, (), 0),
    "conclude": (np.int32, (MAX_CONCLUDE_TOKENS,), -1),
    "close": (np.int32, (MAX_CLOSE, MAX_CLOSE_TOKENS), -1),
}
"""Type, axes after B and empty value of each field."""


def state_shapes(slots: int, context: int, vocab_size: int) -> SlotState:
    """The abstract state of `slots` rows."""
    sizes = {"S": context, "V": vocab_size}
    return SlotState(
        **{
            name: jax.ShapeDtypeStruct((slots, *(sizes[n] if isinstance(n, str) else n for n in axes)), dtype)
            for name, (dtype, axes, _) in _FIELDS.items()
        }
    )


def empty_rows(rows: int, context: int, vocab_size: int) -> SlotState:
    """Host rows that choose nothing."""
    sizes = {"S": context, "V": vocab_size}
    return SlotState(
        **{
            name: np.full((rows, *(sizes[n] if isinstance(n, str) else n for n in axes)), empty, dtype)
            for name, (dtype, axes, empty) in _FIELDS.items()
        }
    )


def fill_row(
    rows: SlotState, at: int, params: SamplingParams, *, seed: int, stop_ids: tuple[int, ...], limit: int,
    prompt: np.ndarray, generated: np.ndarray, position: int, active: bool, sources: int = 0, thinking: bool = False,
    conclude_at: int | None = None,
) -> None:  # fmt: skip
    """Write the request into host row `at`. `generated` are its tokens so far (after preemption), the last of which
    is the next input, at `position`; `thinking`: these are thoughts that have not ended, whose conclusion begins at
    `conclude_at` (None: at the budget)."""
    rows.token[at] = generated[-1] if len(generated) else 0
    rows.position[at] = position
    rows.limit[at] = limit
    rows.begin[at] = len(prompt)
    rows.active[at] = active
    rows.stop_ids[at, : len(stop_ids)] = stop_ids
    rows.history[at, : len(prompt)] = prompt
    rows.history[at, len(prompt) : len(prompt) + len(generated)] = generated
    _fill_prediction(rows, at, params.prediction, len(prompt) + len(generated))
    rows.counts[at] = 0
    np.add.at(rows.counts[at], generated, 2)
    rows.counts[at, prompt] |= 1
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
    rows.sources[at] = sources
    rows.relax[at] = params.relax
    if params.thinking is not None:
        _fill_thinking(rows, at, params.thinking, thinking)
        rows.conclude_at[at] = len(prompt) + params.thinking.budget if conclude_at is None else conclude_at


def _fill_prediction(rows: SlotState, at: int, prediction: tuple[int, ...], used: int) -> None:
    """The end of the history's row, as far as it is free; the answer may grow into it, which ends the use of it."""
    size = rows.history.shape[1]
    ids = prediction[: max(0, size - used - MAX_DRAFT - 1)]
    if ids:
        rows.history[at, size - len(ids) :] = ids
        rows.predicted[at] = len(ids)


def _fill_thinking(rows: SlotState, at: int, how: Thinking, thinking: bool) -> None:
    rows.thinking[at] = thinking
    rows.conclude[at, : len(how.conclude)] = how.conclude
    for i, ids in enumerate(how.close):
        rows.close[at, i, MAX_CLOSE_TOKENS - len(ids) :] = ids


class Guided(NamedTuple):
    """What the host decides of the next pass of slots that follow a grammar: which tokens each row may choose, and the
    drafts that these masks were made for. Rows of a slot follow one another in `masks` as they do in the pass."""

    masks: Leaf  # uint32 [R, ceil(V / 32)]: tokens that may be chosen (kernels/sample/base.py)
    first: Leaf  # int32 [B]: mask of the slot's first row; -1: it chooses, and drafts, as it likes
    drafts: Leaf  # int32 [B, J]
    sources: Leaf  # int32 [B, J]
    odds: Leaf  # float32 [B, J]
    length: Leaf  # int32 [B]

    @staticmethod
    def nothing(data: int, slots: int, rows: int, vocab_size: int) -> Guided:
        """Host arrays that guide no slot; `slots` and `rows` per data shard."""
        drafts = np.zeros((data * slots, MAX_DRAFT), np.int32)
        return Guided(
            masks=np.zeros((data * rows, -(-vocab_size // 32)), np.uint32),
            first=np.full(data * slots, -1, np.int32),
            drafts=drafts - 1,
            sources=drafts,
            odds=drafts.astype(np.float32),
            length=np.zeros(data * slots, np.int32),
        )


class StepInput(NamedTuple):
    """What the host sends for one step: prompt tokens, and which slots decode. Decode rows are laid out on the device,
    since how many tokens are drafted for a slot is known only there."""

    ids: Leaf  # int32 [T]: prompt tokens
    slots: Leaf  # int32 [T]
    positions: Leaf  # int32 [T]
    starts: Leaf  # int32 [G]: first token of each of their query groups (kernels/attention/api.py)
    counts: Leaf  # int32 [G]
    last: Leaf  # int32 [B]: the last token of a slot's prompt, whose logits choose the first of the answer; -1: none
    decodes: Leaf  # bool [B]: whether the slot decodes
    capacity: Leaf  # int32 [B]: positions whose blocks the slot has
    tables: Leaf  # int32 [B, M]
    sizes: Leaf  # int32 [1, 2]: prompt tokens, their groups
    guided: Any  # `Guided`


def input_shapes(
    data: int, slots: int, tokens: int, groups: int, table_width: int, rows: int, vocab_size: int
) -> StepInput:
    """The abstract input of a step with at most `tokens` prompt tokens in `groups` groups, and at most `rows` rows that
    choose, per data shard."""

    def ints(*shape: int, dtype: type = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((data * shape[0], *shape[1:]), dtype)

    return StepInput(
        ids=ints(tokens), slots=ints(tokens), positions=ints(tokens), starts=ints(groups), counts=ints(groups),
        last=ints(slots), decodes=ints(slots, dtype=np.bool_), capacity=ints(slots), tables=ints(slots, table_width),
        sizes=ints(1, 2), guided=jax.eval_shape(lambda: Guided.nothing(data, slots, rows, vocab_size)),
    )  # fmt: skip


class Keep(NamedTuple):
    """What steps hand back beside their results; static."""

    logits: bool = False
    hidden: bool = False
    summed: bool = False


class Kept(NamedTuple):
    """What the last pass chose from, in its `R` rows (`StepResult.first`), without columns what is not kept; what is
    drafted behind it; and what the prompts gave."""

    logits: Leaf  # float32 [R, V]
    hidden: Leaf  # float32 [R, D]: hidden states before the final norm
    drafts: Any  # `Drafts` (kernels/draft) for the next pass of each slot
    summed: Leaf  # float32 [B, D]: over the slot's prompt tokens of this step, hidden states after the final norm

    @staticmethod
    def empty(keep: Keep, rows: int, slots: int, vocab_size: int, d_model: int) -> Kept:
        return Kept(
            jnp.zeros((rows, vocab_size if keep.logits else 0), jnp.float32),
            jnp.zeros((rows, d_model if keep.hidden else 0), jnp.float32),
            Drafts.none(slots),
            jnp.zeros((slots, d_model if keep.summed else 0), jnp.float32),
        )


class StepResult(NamedTuple):
    """What the host reads after a step of N passes; W = 1 + J tokens of a slot in a pass, -1 where there is none."""

    tokens: Leaf  # int32 [N, B, W]: what the slot's answer grew by
    sources: Leaf  # int32 [N, B, W]: who drafted them; 0: the trunk
    drafted: Leaf  # int32 [N, B]: drafted tokens in the pass
    first: Leaf  # int32 [N, B]: the slot's first row of `Kept`
    logprobs: Leaf  # float32 [N, B, W]
    top_ids: Leaf  # int32 [N, B, W, MAX_TOP_LOGPROBS]
    top_logprobs: Leaf  # float32 [N, B, W, MAX_TOP_LOGPROBS]

    @staticmethod
    def empty(passes: int, slots: int) -> StepResult:
        shape = (passes, slots, 1 + MAX_DRAFT)
        return StepResult(
            tokens=jnp.full(shape, -1, jnp.int32),
            sources=jnp.zeros(shape, jnp.int32),
            drafted=jnp.zeros(shape[:2], jnp.int32),
            first=jnp.zeros(shape[:2], jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            top_ids=jnp.full((*shape, MAX_TOP_LOGPROBS), -1, jnp.int32),
            top_logprobs=jnp.zeros((*shape, MAX_TOP_LOGPROBS), jnp.float32),
        )
