"""The contract of a pass's bookkeeping: integers before and after the trunk.

Letters: B slots, C sequences that end thoughts, G query groups of prompts, J drafted tokens of a slot (at most),
K tokens of a conclusion, M table width, R rows that choose, S positions, T prompt tokens, V vocabulary, W = 1 + J.

A pass runs prompt chunks as the host sent them, then every decoding slot's last token with the drafted ones behind it.
How many those are is known only on the device. A slot's rows choose one token each: a prompt's last token the first of
the answer, a decoding slot's tokens those that follow them. The slot then grows by what was chosen up to the first
drafted token that is not what was chosen in its place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ..attention import Queries


class Slots(NamedTuple):
    """What a pass asks about the running sequences: fields of `SlotState` (serving/engine/state.py)."""

    token: jax.Array  # int32 [B]: last chosen token
    position: jax.Array  # int32 [B]: its absolute position
    active: jax.Array  # bool [B]
    n_drafts: jax.Array  # int32 [B]: how many of `drafts` there are
    thinking: jax.Array  # bool [B]: what is generated are thoughts
    conclude_at: (
        jax.Array
    )  # int32 [B]: position from which `conclude` takes the place of what is chosen, while thinking
    counts: jax.Array  # int32 [B, V]: twice the times generated, plus one if in the prompt
    history: jax.Array  # int32 [B, S]: prompt and answer, by position
    limit: jax.Array  # int32 [B]: last position that may be generated
    begin: jax.Array  # int32 [B]: position of the first generated token
    stop_ids: jax.Array  # int32 [B, .], -1 where unused
    drafts: jax.Array  # int32 [B, J]: tokens drafted for the next pass
    draft_sources: jax.Array  # int32 [B, J]
    draft_odds: jax.Array  # float32 [B, J]: probability of each to stand if those before it do
    conclude: jax.Array  # int32 [B, K], -1 where unused
    close: jax.Array  # int32 [B, C, .]: what ends thoughts, at the right, -1 before it

    @classmethod
    def of(cls, state: Any) -> Slots:
        return cls(*(getattr(state, name) for name in cls._fields))


class Advanced(NamedTuple):
    """The fields of the slots that a pass changes, the first of `Slots`."""

    token: jax.Array
    position: jax.Array
    active: jax.Array
    n_drafts: jax.Array
    thinking: jax.Array
    conclude_at: jax.Array
    counts: jax.Array
    history: jax.Array

    @classmethod
    def of(cls, slots: Slots) -> Advanced:
        return cls(*slots[: len(cls._fields)])


class Sent(NamedTuple):
    """What the host sends for a pass: the fields of `StepInput` (serving/engine/state.py)."""

    ids: jax.Array  # int32 [T]: prompt tokens
    slots: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T]
    starts: jax.Array  # int32 [G]: first token of each of their query groups
    counts: jax.Array  # int32 [G]
    last: jax.Array  # int32 [B]: last token of a prompt, whose logits choose the first of the answer; -1: none
    decodes: jax.Array  # bool [B]: whether the slot decodes; not while it has a last token of a prompt
    capacity: jax.Array  # int32 [B]: positions whose blocks the slot has
    tables: jax.Array  # int32 [B, M]
    sizes: jax.Array  # int32 [1, 2]: prompt tokens, their groups

    @classmethod
    def of(cls, inputs: Any) -> Sent:
        return cls(*(getattr(inputs, name) for name in cls._fields))


class Pace(NamedTuple):
    """How many drafts go into a pass: the most tokens for the time (kernels/draft/widths.py), or a fixed number."""

    cost: jax.Array  # float32 [.]: time of a pass by its number of rows that choose, above 0
    length: jax.Array  # int32 []: exactly this many drafts of a slot; 0: as many as pay


class Layout(NamedTuple):
    """The tokens of a pass, and the rows that choose: a slot's rows follow one another, slots in their order."""

    ids: jax.Array  # int32 [tokens]
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


class Grown(NamedTuple):
    """What the slots' answers grew by: the first `n_tokens` `[B]` of `tokens` `[B, W]`."""

    tokens: jax.Array  # int32 [B, W], -1 after them
    sources: jax.Array  # int32 [B, W]: who drafted them; 0: the trunk
    rows: jax.Array  # int32 [B, W]: the row that chose each
    n_tokens: jax.Array  # int32 [B]
