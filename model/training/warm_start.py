"""A shadow's first values in closed form, so that it begins as a linear guess of the trunk's next state.

With y the trunk's normalised last state (its logits are E y) and e the normalised embedding of the token that it chose,
ridge regression gives y[t+1] = A y[t] + B e[t+1]. The r leading directions Q of the frequent rows of E, weighted by
frequency, keep most of the logits: E y is about (E Q)(Q^T y). So `project` is Q, `context` is A Q, and `markov` is Q^T
B Q. The candidate state passes small vectors almost unchanged through its tanh, and an open gate lets half of it in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...configs.shadow import ShadowConfig
from .corpus import TRAIN, Corpus

LINEAR = 0.5
"""Root mean square of what goes into the tanh."""


def warm_start(
    config: ShadowConfig, values: Mapping[str, np.ndarray], corpus: Corpus, table: np.ndarray, final_norm: np.ndarray,
    rows: np.ndarray, vocab: np.ndarray, limit: int = 60_000,
) -> dict[str, np.ndarray]:  # fmt: skip
    """`values` (those of `shadow.initial`) with the closed form put in. `table` is the trunk's embedding `[V, D]`,
    `rows` its output matrix's `[Z, D]` for the tokens `vocab`."""
    epsilon, r = config.norm_eps, config.rank
    anchors = corpus.anchors(TRAIN)[:limit]
    normal = _rms(corpus.hidden[anchors].astype(np.float32), epsilon)
    following = _rms(corpus.hidden[anchors + 1].astype(np.float32), epsilon) * final_norm
    embedded = _rms(table[corpus.tokens[anchors]], epsilon)
    both = _ridge(np.concatenate([normal, embedded], axis=1), following)
    of_state, of_token = both[: config.d_model], both[config.d_model :]

    counts = np.bincount(corpus.tokens, minlength=len(table))[vocab].astype(np.float64)
    weighted = rows * np.sqrt(counts / counts.sum() + 1e-6)[:, None]
    _, directions = np.linalg.eigh(weighted.T @ weighted)
    Q = directions[:, ::-1][:, :r].astype(np.float32)

    state, token = of_state @ Q, Q.T @ of_token @ Q
    size = LINEAR / (np.sqrt(np.mean((normal[:4096] @ state) ** 2)) + 1e-6)
    read = LINEAR / np.sqrt(np.mean((embedded[:4096] @ Q) ** 2))
    return {
        **values,
        "project": Q,
        "context": (size * state).astype(np.float32),
        "gain_embedding": np.full(config.d_model, read, np.float32),
        "markov": (0.5 * size / read * token - 0.5 * np.eye(r)).astype(np.float32),
        "recur": (0.1 * values["recur"]).astype(np.float32),
        "scale": np.float32(2.0 / size),
    }


def _rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + epsilon)


def _ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """W that minimises |x W - y|^2 plus a little of |W|^2."""
    gram = x.T.astype(np.float64) @ x
    gram[np.diag_indices_from(gram)] += 0.01 * len(x)
    return np.linalg.solve(gram, x.T.astype(np.float64) @ y).astype(np.float32)
