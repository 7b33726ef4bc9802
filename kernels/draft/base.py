"""The contract of the drafting kernel: what a shadow is made of when it drafts, and what goes in and comes out.

Letters: B slots, D model width, V vocabulary, S context, r shadow rank, m width of its MLP, Z draft vocabulary,
C temperature classes, J drafts at most.

A slot's drafts are one chain of guesses at the tokens that follow its last one. Two sources propose the token of each
place j = 0, 1, ...

The *lookup* copies what followed an earlier occurrence, in the history, of the last tokens (history and drafts): the
longest one, the most recent of equally long ones. A chain follows its match as long as it copies the same; where it
follows none, one is looked for again. A copy that reaches the end of the history goes on with the chain's drafts.
A prediction of the text is looked through like a history that is more recent; a copy ends with it.

The *shadow* is a small recurrent network on the trunk's last hidden state h. Its step at place j, with x the token
before that place (`rms(v)` is v / sqrt(mean v^2 + epsilon)):

    z = rms(h) @ context                                         once
    u = read[x] * read_scale[x] + step[j]
    g = s @ recur[:, :r] + gate_u * u + gate_z * z + bias_g      s is `start` at first
    c = s @ recur[:, r:] + u + z + bias_c
    s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
    o = s + u @ markov + silu(rms(s) @ up) @ down
    x[i] = (head[i] . o) * head_scale[i]                         logits of the tokens `vocab`
    x[i] = x[i] / temperature + noise[i]                         only where the slot's temperature is above 0

The shadow's token is that of the largest x, the lowest index on ties. Its probability of being what the trunk chooses:

    p = softmax(x), largest first
    confidence = conf . [o, u, log p0, log p0 - log p1, entropy of p] + conf_bias[j]
    probability = sigmoid(gate[c, j, 0] * confidence + gate[c, j, 1])

The noise is the sampler's own (kernels/sample/noise.py) for the position being drafted and the vocabulary id, so a good
shadow guesses sampled tokens too. The lookup's probability comes from a table of what was accepted before.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ...configs.engine import MAX_DRAFT

MAX_DRAFTS = MAX_DRAFT
"""J: most drafts of a slot; with the token before them a pass over 16 rows."""
SHADOW_PLACES = 8
"""Places of a chain that the shadow drafts; the lookup goes on behind them."""
FEATURES = 3
"""Confidence features beside o and u: log-probability of the best token, its margin to the second, entropy (nats)."""
LONGEST_MATCH = 16
"""Tokens that the lookup compares; longer matches count as this long."""
SHORTEST_MATCH = 2
CERTAIN = 0.95
"""From this probability on the lookup's token is taken without asking the shadow."""

LOOKUP, SHADOW = 1, 2
"""Bits of `DraftInput.sources` and values of `Drafts.source`."""

DIFFERS, AGREES, UNKNOWN = 0, 1, 2
"""What the shadow says about the lookup's token: third index of `DraftWeights.lookup`."""


class DraftWeights(NamedTuple):
    """What one step of drafting needs, derived from a trained shadow and its trunk when they are loaded."""

    read: Array
    """int8 [V, r]: every token's embedding as the shadow reads it, times `read_scale`."""
    read_scale: Array
    """float32 [V]"""
    context: Array
    """float32 [D, r]"""
    epsilon: Array
    """float32 []: of both norms."""
    recur: Array
    """float32 [r, 2r]: update gate, candidate."""
    gate_u: Array
    """float32 [r]"""
    gate_z: Array
    """float32 [r]"""
    bias_g: Array
    """float32 [r]"""
    bias_c: Array
    """float32 [r]"""
    start: Array
    """float32 [r]: the state before the first step."""
    step: Array
    """float32 [SHADOW_PLACES, r]"""
    markov: Array
    """float32 [r, r]"""
    up: Array
    """float32 [r, m]"""
    down: Array
    """float32 [m, r]"""
    head: Array
    """int8 [Z, r]"""
    head_scale: Array
    """float32 [Z]"""
    vocab: Array
    """int32 [Z]: the tokens that the shadow can draft, distinct."""
    conf: Array
    """float32 [2r + FEATURES]"""
    conf_bias: Array
    """float32 [SHADOW_PLACES]"""
    gate: Array
    """float32 [C, SHADOW_PLACES, 2]: slope and offset of the calibrated logit."""
    gate_temperatures: Array
    """float32 [C]: the temperature of each class, 0 first. A greedy slot is of the first class, any other one of the
    class with the nearest temperature behind the first, the lower one on ties; of the first if there is no other."""
    lookup: Array
    """float32 [C, LONGEST_MATCH + 1, 3, J]: probability that the lookup's token is accepted, by the length of the match
    when it was found (in tokens; 0 and 1 are not used), what the shadow says (DIFFERS, AGREES, UNKNOWN), and how many
    tokens were copied from this match before."""

    @property
    def chain_bytes(self) -> int:
        """Bytes of what every place of a chain reads whole: not the table of all tokens, nor what the context needs."""
        once = ("read", "read_scale", "context")
        return sum(x.size * x.dtype.itemsize for name, x in self._asdict().items() if name not in once)


class DraftInput(NamedTuple):
    """Where every slot stands. Nothing is read of slots that are not active or may draft nothing."""

    hidden: Array
    """float32 [B, D]: the trunk's hidden state, before its final norm, that chose `token`."""
    token: Array
    """int32 [B]: the last chosen token."""
    position: Array
    """int32 [B]: its absolute position."""
    history: Array
    """int32 [B, S]: prompt and answer; entries [0, position] count, the last one is `token`, and those of
    `predicted`."""
    active: Array
    """bool [B]"""
    sources: Array
    """int32 [B]: LOOKUP and SHADOW, either, both or none."""
    temperature: Array
    """float32 [B]; 0 is greedy (as is anything that is not a normal number)."""
    seed: Array
    """uint32 [B, 2]: low and high word."""
    room: Array
    """int32 [B]: most drafts of the slot; J at most, whatever is given."""
    predicted: Array
    """int32 [B]: tokens at the end of the history row that are not history, but what somebody expects of it; the lookup
    copies from them as well. 0: none; none either where the history comes so close that drafts might reach them."""
    floor: Array
    """float32 []: a draft with which the product of its chain's probabilities is below this is left out, and its chain
    ends."""


class Drafts(NamedTuple):
    """One chain per slot; the first `length` entries count."""

    tokens: Array
    """int32 [B, J]; -1 where there is none."""
    source: Array
    """int32 [B, J]: LOOKUP or SHADOW, whichever was the more certain (the lookup on ties); 0 where there is none."""
    probability: Array
    """float32 [B, J]: that the trunk chooses this token, given that it chose all before it; 0 where there is none."""
    length: Array
    """int32 [B]"""

    @classmethod
    def none(cls, slots: int) -> Drafts:
        """Nothing drafted for any of the slots."""
        shape = (slots, MAX_DRAFTS)
        return cls(
            jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32),
            jnp.zeros(slots, jnp.int32),
        )  # fmt: skip
