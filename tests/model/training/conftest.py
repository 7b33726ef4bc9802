"""A small corpus with something to learn: answers that walk through the vocabulary by a fixed rule, with some noise."""

from __future__ import annotations

import numpy as np
import pytest

from umbra.configs.shadow import ShadowConfig
from umbra.model.training.answers import Answered
from umbra.model.training.corpus import Corpus, build_corpus
from umbra.model.training.jobs import Completion, Job
from umbra.model.training.store import Row

V, D = 64, 32


@pytest.fixture(scope="session")
def table() -> np.ndarray:
    return np.random.default_rng(7).normal(0, 1, (V, D)).astype(np.float32)


@pytest.fixture(scope="session")
def shape() -> ShadowConfig:
    return ShadowConfig(D, 32, 16, 48, (0.0, 1.0))


@pytest.fixture(scope="session")
def corpus(table: np.ndarray) -> Corpus:
    """60 answers; a quarter of them is sampled. The state that chose a token is near that token's embedding."""
    rng = np.random.default_rng(0)
    answered = []
    for i in range(60):
        n = int(rng.integers(20, 60))
        tokens = [int(rng.integers(V))]
        while len(tokens) < n:
            follows = (3 * tokens[-1] + 1) % 40
            tokens.append(follows if rng.random() < 0.8 else int(rng.integers(V)))
        hidden = (table[tokens] + rng.normal(0, 0.1, (n, D))).astype(np.float16)
        sampled = i % 4 == 0
        job = Job(tuple(int(t) for t in rng.integers(0, V, 9)), 99, 1.0 if sampled else 0.0, i if sampled else 0)
        row = Row(job, Completion(tuple(tokens), hidden, True))
        key = f"{int(rng.integers(2**32)):08x}"
        answered.append(Answered("answers", i, "even" if i % 2 == 0 else "odd", key, row))
    return build_corpus(answered)
