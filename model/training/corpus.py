"""Answers as arrays: what training, calibration and evaluation read.

Letters: N tokens of all answers together, D model width, Z draft vocabulary, K places of a chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .answers import Answered

TRAIN, CALIBRATION, TEST = 0, 1, 2
PARTS = ("training", "calibration", "test")

HELD_OUT = {False: (0.1, 0.2), True: (0.4, 0.6)}
"""By whether an answer is sampled: up to which draw it is for calibration, and for the test. Few are sampled, and those
are needed most to calibrate the gate for temperatures."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All answers, one behind the other."""

    tokens: np.ndarray
    """int32 [N]"""
    hidden: np.ndarray
    """float16 [N, D]: the trunk's state that chose each token."""
    starts: np.ndarray
    """int64 [answers + 1]: where each answer begins."""
    left: np.ndarray
    """int32 [N]: how many tokens of the same answer follow."""
    part: np.ndarray
    """int8 [answers]: TRAIN, CALIBRATION or TEST, by the prompt alone."""
    temperature: np.ndarray
    """float32 [answers]"""
    seed: np.ndarray
    """uint32 [answers]"""
    categories: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def answer(self) -> np.ndarray:
        """int32 [N]: which answer a token is of."""
        return np.repeat(np.arange(len(self.part), dtype=np.int32), np.diff(self.starts))

    def answers(self, part: int) -> np.ndarray:
        return np.flatnonzero(self.part == part)

    def anchors(self, part: int) -> np.ndarray:
        """int64: the tokens of a part that have a successor to be guessed."""
        return np.flatnonzero((self.part[self.answer] == part) & (self.left > 0))

    def n_tokens(self, part: int) -> int:
        return int(np.diff(self.starts)[self.part == part].sum())


def build_corpus(answered: Sequence[Answered]) -> Corpus:
    lengths = np.array([len(a.row.completion.token_ids) for a in answered])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    hidden = [a.row.completion.features for a in answered]
    temperature = np.array([a.row.job.temperature for a in answered], np.float32)
    return Corpus(
        tokens=np.array([token for a in answered for token in a.row.completion.token_ids], np.int32),
        hidden=np.concatenate([features for features in hidden if features is not None]),
        starts=starts,
        left=np.concatenate([np.arange(n)[::-1] for n in lengths]).astype(np.int32),
        part=np.array([_part(a.key, bool(t > 0)) for a, t in zip(answered, temperature, strict=True)], np.int8),
        temperature=temperature,
        seed=np.array([a.row.job.seed for a in answered], np.uint32),
        categories=tuple(a.category for a in answered),
        prompts=tuple(a.row.job.prompt_ids for a in answered),
    )


def _part(key: str, sampled: bool) -> int:
    draw = int(key[:8], 16) / 2**32
    calibration, test = HELD_OUT[sampled]
    return CALIBRATION if draw < calibration else TEST if draw < test else TRAIN


def rank_vocabulary(corpus: Corpus, vocab_size: int, n: int) -> np.ndarray:
    """The `n` tokens that the training answers use most, the most frequent first; unused ones by id.

    Ranking by the trunk's own output rather than by a corpus is what keeps a small draft vocabulary from costing
    acceptance (Goel et al. 2025, "VocabTrim").
    """
    used = np.concatenate([corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]] for i in corpus.answers(TRAIN)])
    counts = np.bincount(used, minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:n].astype(np.int32)


def coverage(corpus: Corpus, vocab: np.ndarray, part: int) -> float:
    """The share of a part's tokens that are in the draft vocabulary."""
    used = np.concatenate([corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]] for i in corpus.answers(part)])
    return float(np.isin(used, vocab).mean())


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The trunk's likeliest tokens of the draft vocabulary where it chose each token."""

    index: np.ndarray
    """int32 [N, top]: places in the draft vocabulary."""
    weight: np.ndarray
    """float16 [N, top]: their probabilities, which add up to 1."""


def teach(corpus: Corpus, final_norm: np.ndarray, epsilon: float, rows: np.ndarray, top: int = 16) -> Teacher:
    """What the trunk thought, from its hidden states: `final_norm` [D] is its last gain, and `rows` [Z, D] are those of
    its output matrix for the draft vocabulary."""
    top = min(top, len(rows))
    index = np.empty((len(corpus.tokens), top), np.int32)
    weight = np.empty((len(corpus.tokens), top), np.float16)
    temperature = np.where(corpus.temperature > 0, corpus.temperature, 1.0)[corpus.answer]
    for i in range(0, len(index), 8192):
        h = corpus.hidden[i : i + 8192].astype(np.float32)
        y = h / np.sqrt(np.mean(h * h, axis=1, keepdims=True) + epsilon) * final_norm
        logits = y @ rows.T / temperature[i : i + 8192, None]
        best = np.argpartition(-logits, top - 1, axis=1)[:, :top] if top < len(rows) else np.argsort(-logits, axis=1)
        values = np.take_along_axis(logits, best, axis=1)
        exp = np.exp(values - values.max(axis=1, keepdims=True))
        index[i : i + 8192], weight[i : i + 8192] = best, exp / exp.sum(axis=1, keepdims=True)
    return Teacher(index, weight)
