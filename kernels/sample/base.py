"""The contract of the sampling kernel: what a row brings and what it gets back. Shape letter: V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ...configs.engine import MAX_TOP_LOGPROBS


class RowParams(NamedTuple):
    """How one row chooses its token: array values, so that any mix of requests runs the same program.

    Shapes are those of one row; `choose_rows` takes all rows at once, with a leading axis.
    """

    temperature: Array
    """float32 []; 0 is greedy (as is anything that is not a normal number)."""
    top_k: Array
    """int32 []; 0 or less: off."""
    top_p: Array
    """float32 []; 1 or more: off."""
    min_p: Array
    """float32 []; 0 or less: off."""
    repetition: Array
    """float32 []; 1: off. Over prompt and answer: positive logits are divided by it, the others multiplied."""
    presence: Array
    """float32 []; subtracted from tokens generated at least once."""
    frequency: Array
    """float32 []; subtracted once per time a token was generated."""
    seed: Array
    """uint32 [2]: low and high word."""
    position: Array
    """int32 []; absolute position of the token being chosen."""
    counts: Array
    """int32 [V]; twice the times the token was generated, plus one if it is in the prompt."""
    bias_ids: Array
    """int32 [any]; distinct token ids, -1 where unused."""
    bias_values: Array
    """float32, as long as `bias_ids`; added to the logits of those tokens."""
    n_logprobs: Array
    """int32 []; -1: no log-probabilities, 0: the chosen token's, more: also the most likely tokens'."""


class Choice(NamedTuple):
    """The token chosen for one row."""

    token: Array
    """int32 []; always in [0, V)."""
    logprob: Array
    """float32 []; of the token under the raw logits, 0 unless `n_logprobs` >= 0. -inf if the model excludes it."""
    top_ids: Array
    """int32 [MAX_TOP_LOGPROBS]; most likely first, the lower id on ties; -1 where there is none or none was asked
    for."""
    top_logprobs: Array
    """float32 [MAX_TOP_LOGPROBS]; 0 where `top_ids` is -1."""

    @classmethod
    def none(cls, rows: int) -> Choice:
        """For `rows` rows that choose nothing, with a leading axis: token 0 and no log-probabilities."""
        shape = (rows, MAX_TOP_LOGPROBS)
        zeros = jnp.zeros(rows, jnp.float32)
        return cls(jnp.zeros(rows, jnp.int32), zeros, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
