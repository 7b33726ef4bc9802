"""What drafting would propose at every place of held-out answers, without running the trunk again.

A draft only stands when all drafts before it stood, and then the tokens before it are the trunk's own. So along a
recorded answer the shadow's and the lookup's proposals at place j after an anchor follow from the true tokens, and a
live chain is the sequence of proposals up to the first wrong one. That holds for sampled answers too: noise belongs to
positions.

Letters: A anchors, J places of the lookup, K places of the shadow (8), r rank, Z draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels.draft import FEATURES, LONGEST_MATCH, MAX_DRAFTS, SHADOW_PLACES, SHORTEST_MATCH, DraftWeights
from ...kernels.sample import gumbel_of
from ..shadow import Cell, rms, step
from .corpus import Corpus

CHUNK = 512
"""Anchors that are computed at once."""


@dataclasses.dataclass(frozen=True)
class Proposals:
    """Both sources' proposals after every anchor."""

    anchors: np.ndarray  # int64 [A]: tokens of the corpus
    kind: np.ndarray  # int32 [A]: temperature class
    inside: np.ndarray  # int32 [A]: places inside the answer, J at most
    match: np.ndarray  # int32 [A]: length of the lookup's match; 0: none
    copied_right: np.ndarray  # bool [A, J]: the lookup's token is the trunk's (False without a match)
    guess: np.ndarray  # int32 [A, K]: the shadow's token
    guess_right: np.ndarray  # bool [A, K]
    agrees: np.ndarray  # bool [A, K]: both propose the same
    features: np.ndarray  # float16 [A, K, 2r + FEATURES]: what the confidence looks at

    @property
    def follows(self) -> np.ndarray:
        """bool [A, J]: the chain has followed the match up to each place, all before having been right."""
        before = np.cumprod(self.copied_right, axis=1).astype(bool)
        return np.concatenate([(self.match > 0)[:, None], before[:, :-1]], axis=1) & (self.match > 0)[:, None]

    def confidence(self, conf: np.ndarray, conf_bias: np.ndarray) -> np.ndarray:
        """float32 [A, K]"""
        return self.features.astype(np.float32) @ conf + conf_bias


def propose(
    corpus: Corpus, answers: Sequence[int], weights: DraftWeights, report: Callable[[int, int], None]
) -> Proposals:
    """Proposals after all tokens of `answers` that have a successor; `report` is called with anchors done and all."""
    spans = [np.arange(corpus.starts[i], corpus.starts[i + 1] - 1) for i in answers]
    anchors = np.concatenate([*spans, np.zeros(0, np.int64)]).astype(np.int64)
    owner = corpus.answer[anchors]
    match, copied = find_matches(corpus, answers)
    ahead = anchors[:, None] + np.arange(1, MAX_DRAFTS + 1)
    inside = np.minimum(corpus.left[anchors], MAX_DRAFTS)
    truth = np.where(
        np.arange(MAX_DRAFTS) < inside[:, None], corpus.tokens[np.minimum(ahead, len(corpus.tokens) - 1)], -1
    )
    guess, features = _shadow(corpus, anchors, weights, report)
    K = SHADOW_PLACES
    return Proposals(
        anchors=anchors,
        kind=temperature_class(corpus.temperature[owner], np.asarray(weights.gate_temperatures)),
        inside=inside,
        match=match,
        copied_right=(copied == truth) & (copied >= 0),
        guess=guess,
        guess_right=guess == truth[:, :K],
        agrees=guess == copied[:, :K],
        features=features,
    )


def temperature_class(temperature: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """int32: 0 for greedy, else the nearest of the other classes (as in kernels/draft)."""
    if len(classes) == 1:
        return np.zeros(len(temperature), np.int32)
    nearest = np.argmin(np.abs(temperature[:, None] - classes[None, 1:]), axis=1) + 1
    return np.where(temperature > 0, nearest, 0).astype(np.int32)


def find_matches(corpus: Corpus, answers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every anchor of `answers` the length of the longest suffix match (int32 [A]; the most recent of the longest)
    and the tokens that the lookup proposes at each place (int32 [A, J]; -1: none)."""
    lengths, copies = [np.zeros(0, np.int32)], [np.zeros((0, MAX_DRAFTS), np.int32)]
    for i in answers:
        prompt = np.asarray(corpus.prompts[i], np.int32)
        history = np.concatenate([prompt, corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]]])
        length, following = _suffix_matches(history, len(prompt))
        at = following[:, None] + np.arange(MAX_DRAFTS)
        copied = history[np.minimum(at, len(history) - 1)]
        lengths.append(length)
        copies.append(np.where((length[:, None] > 0) & (at < len(history)), copied, -1))
    return np.concatenate(lengths), np.concatenate(copies)


def _suffix_matches(history: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position from `first` to the last but one: the length of the longest earlier occurrence of the tokens up
    to it, and the index of what followed that."""
    n = len(history)
    run = np.zeros(n, np.int32)  # run[e]: tokens that end at e and are those that end at the position
    length, following = np.zeros(n - 1 - first, np.int32), np.zeros(n - 1 - first, np.int64)
    for position in range(n - 1):
        longer = np.concatenate([[0], run[:-1]]) + 1
        run = np.where(history == history[position], np.minimum(longer, LONGEST_MATCH), 0).astype(np.int32)
        if position < first:
            continue
        earlier = run[:position]
        best = int(earlier.max(initial=0))
        if best >= SHORTEST_MATCH:
            length[position - first] = best
            following[position - first] = np.flatnonzero(earlier == best)[-1] + 1
    return length, following


def _shadow(
    corpus: Corpus, anchors: np.ndarray, weights: DraftWeights, report: Callable[[int, int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """The shadow's tokens int32 [A, K] and the confidence's inputs float16 [A, K, 2r + FEATURES]."""
    owner = corpus.answer[anchors]
    prompt_lengths = np.array([len(prompt) for prompt in corpus.prompts])
    position = prompt_lengths[owner] + anchors - corpus.starts[owner]
    guess = np.zeros((len(anchors), SHADOW_PLACES), np.int32)
    features = np.zeros((len(anchors), SHADOW_PLACES, 2 * weights.start.shape[0] + FEATURES), np.float16)
    head = np.asarray(weights.head, np.float32) * np.asarray(weights.head_scale)[:, None]
    for sampled in (False, True):
        chosen = np.flatnonzero((corpus.temperature[owner] > 0) == sampled)
        for i in range(0, len(chosen), CHUNK):
            mine = chosen[i : i + CHUNK]
            padded = np.pad(mine, (0, CHUNK - len(mine)), mode="edge")
            at = anchors[padded]
            ahead = np.minimum(at[:, None] + np.arange(SHADOW_PLACES), len(corpus.tokens) - 1)
            tokens, inputs = _chunk(
                weights, head, corpus.hidden[at], corpus.tokens[ahead], position[padded].astype(np.int32),
                corpus.seed[owner[padded]], corpus.temperature[owner[padded]], sampled,
            )  # fmt: skip
            guess[mine], features[mine] = tokens[: len(mine)], inputs[: len(mine)]
            report(i + len(mine) + (0 if not sampled else len(anchors) - len(chosen)), len(anchors))
    return guess, features


@functools.partial(jax.jit, static_argnames="sampled")
def _chunk(
    weights: DraftWeights, head: jax.Array, hidden: jax.Array, tokens: jax.Array, position: jax.Array, seed: jax.Array,
    temperature: jax.Array, sampled: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    cell = Cell(*(getattr(weights, name) for name in Cell._fields))
    read = weights.read[tokens].astype(jnp.float32) * weights.read_scale[tokens][..., None] + weights.step
    z = rms(hidden.astype(jnp.float32), weights.epsilon) @ cell.context
    ids = weights.vocab.astype(jnp.uint32)
    seeds = jnp.stack([seed, jnp.zeros_like(seed)], axis=1)

    def one(state: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        u, place = inputs
        state, o = step(cell, state, u, z, weights.epsilon)
        scores = o @ head.T
        if sampled:
            noise = jax.vmap(gumbel_of, (0, 0, None))(seeds, position + 1 + place, ids)
            scores = scores / temperature[:, None] + noise
        best, log_best, margin, entropy = _summary(scores)
        features = jnp.concatenate([o, u, jnp.stack([log_best, margin, entropy], axis=1)], axis=1)
        return state, (weights.vocab[best], features.astype(jnp.float16))

    start = jnp.broadcast_to(cell.start, z.shape)
    _, (guesses, features) = jax.lax.scan(one, start, (jnp.swapaxes(read, 0, 1), jnp.arange(SHADOW_PLACES)))
    return guesses.T, jnp.swapaxes(features, 0, 1)


def _summary(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The best index of each row, its log-probability, its margin to the second, and the entropy in nats."""
    best = jnp.argmax(scores, axis=1)
    below = scores - jnp.max(scores, axis=1, keepdims=True)
    is_best = jnp.arange(scores.shape[1]) == best[:, None]
    margin = -jnp.max(jnp.where(is_best, -jnp.inf, below), axis=1)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=1)
    return best, -jnp.log(total), margin, jnp.log(total) - jnp.sum(weights * below, axis=1) / total
