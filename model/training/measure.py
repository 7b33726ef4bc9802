"""How good a shadow and its gate are, on answers that neither was fitted to.

Tokens per pass are those of live drafting: passes start where the one before ended, a pass emits its accepted drafts
and one token of the trunk's own, and the first token of an answer comes from the prompt's pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ...kernels.draft import LOOKUP, SHADOW
from .chains import Proposals
from .corpus import TRAIN, Corpus
from .gate import Chains, Gate, draft_all, lengths, live

SOURCES: Mapping[str, int] = {"shadow": SHADOW, "lookup": LOOKUP, "both": LOOKUP | SHADOW}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How probabilities of drafts compare with what happened."""

    n: int
    ece: float  # expected calibration error: 15 bins of equal size
    brier: float
    auroc: float
    coverage: dict[str, tuple[float, float, float]]  # wanted precision: threshold, share of drafts above, precision
    bins: list[tuple[float, float, int]]  # mean probability, share of right ones, drafts


def calibration(
    probability: np.ndarray, right: np.ndarray, thresholds: Mapping[str, float], bins: int = 15
) -> Calibration:
    """Of drafts with these probabilities. `thresholds` were chosen elsewhere for a wanted precision."""
    order = np.argsort(probability, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    rows = [(float(probability[part].mean()), float(right[part].mean()), len(part)) for part in parts]
    n = max(len(order), 1)
    coverage = {}
    for name, threshold in thresholds.items():
        above = probability >= threshold
        precision = float(right[above].mean()) if above.any() else float("nan")
        coverage[name] = (threshold, float(above.mean()) if len(above) else 0.0, precision)
    return Calibration(
        n=len(order),
        ece=sum(count * abs(mean - share) for mean, share, count in rows) / n,
        brier=float(np.mean((probability - right) ** 2)) if len(order) else float("nan"),
        auroc=_auroc(probability[order], right[order]),
        coverage=coverage,
        bins=rows,
    )


def _auroc(ascending: np.ndarray, right: np.ndarray) -> float:
    """Probability that a right draft has the higher value than a wrong one; ties count half."""
    _, inverse, counts = np.unique(ascending, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive, negative = int(right.sum()), int((~right).sum())
    if not positive or not negative:
        return float("nan")
    return float((ranks[right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def threshold_for(probability: np.ndarray, right: np.ndarray, precision: float) -> float:
    """The lowest threshold above which at least this share of drafts is right; 1 if there is none."""
    order = np.argsort(-probability, kind="stable")
    share = np.cumsum(right[order]) / np.arange(1, len(order) + 1)
    share[:-1][np.diff(probability[order]) == 0] = 0  # equal probabilities are above a threshold together
    enough = np.flatnonzero(share >= precision)
    return float(probability[order[enough[-1]]]) if len(enough) else 1.0


def live_drafts(proposals: Proposals, corpus: Corpus, chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """Probability and outcome of the drafts that live drafting with the gate would verify and reach."""
    wanted = lengths(chains)
    starts = live(proposals, corpus, np.minimum(chains.accepted, wanted))
    reached = chains.reached & starts[:, None] & (np.arange(chains.source.shape[1]) < wanted[:, None])
    return chains.probability[reached], chains.right[reached]


def tokens_per_pass(
    proposals: Proposals, corpus: Corpus, accepted: np.ndarray, answers: np.ndarray | None = None
) -> float:
    """Tokens over passes of all answers (or only `answers`), when the pass after each anchor accepts so many."""
    starts = live(proposals, corpus, accepted)
    owner = corpus.answer[proposals.anchors]
    mine = np.ones(len(owner), bool) if answers is None else np.isin(owner, answers)
    n_answers = len(np.unique(owner[mine]))
    return float((mine.sum() + n_answers) / max(int((starts & mine).sum()) + n_answers, 1))


def repetitive(corpus: Corpus, answer: int, share: float = 0.25) -> bool:
    """Whether an answer goes round in circles: at least this share of its runs of four tokens occurred before in it."""
    tokens = corpus.tokens[corpus.starts[answer] : corpus.starts[answer + 1]].tolist()
    fours = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return bool(fours) and 1 - len(set(fours)) / len(fours) >= share


def bigram_table(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """The most frequent successor of each token in the training answers; -1 for tokens that have none. int64 [V]"""
    counts: dict[int, dict[int, int]] = {}
    for i in corpus.answers(TRAIN):
        tokens = corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]].tolist()
        for first, second in zip(tokens, tokens[1:], strict=False):
            row = counts.setdefault(first, {})
            row[second] = row.get(second, 0) + 1
    best = np.full(vocab_size, -1, np.int64)
    for first, row in counts.items():
        best[first] = max(row, key=lambda token: (row[token], -token))
    return best


def bigram_accepted(best: np.ndarray, corpus: Corpus, proposals: Proposals) -> np.ndarray:
    """How many drafts of the table `best` would stand after each anchor: int32 [A], in as many places as the shadow
    has."""
    K = proposals.guess.shape[1]
    at = np.minimum(proposals.anchors[:, None] + np.arange(K + 1), len(corpus.tokens) - 1)
    tokens = corpus.tokens[at]
    right = (best[tokens[:, :-1]] == tokens[:, 1:]) & (np.arange(K) < proposals.inside[:, None])
    return np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)


def acceptance(proposals: Proposals, answers: np.ndarray, corpus: Corpus) -> list[float]:
    """The share of the shadow's guesses at each place that are right when all before were."""
    mine = np.isin(corpus.answer[proposals.anchors], answers)
    right = proposals.guess_right[mine]
    inside = np.arange(right.shape[1]) < proposals.inside[mine][:, None]
    before = np.concatenate([np.ones((len(right), 1), bool), np.cumprod(right, axis=1)[:, :-1].astype(bool)], axis=1)
    reached = before & inside
    return [
        float(right[reached[:, k], k].mean()) if reached[:, k].any() else float("nan") for k in range(right.shape[1])
    ]


@dataclasses.dataclass(frozen=True)
class Measured:
    """All figures of a report, on test answers."""

    acceptance: dict[str, list[float]]  # by category (and "all"), per place
    answers: dict[str, int]
    per_length: dict[str, list[float]]  # tokens per pass by source, drafting 1 to 8
    gated: dict[str, dict[str, float]]  # by category: tokens per pass of shadow, lookup, both; the gate chooses lengths
    not_repetitive: dict[str, float]
    bigram: float
    calibration: dict[str, Calibration]  # by temperature class


def measure(
    corpus: Corpus, test: Proposals, gate: Gate, thresholds: Sequence[Mapping[str, float]], bigrams: np.ndarray,
    temperatures: Sequence[float],
) -> Measured:  # fmt: skip
    """Everything about greedy test answers, and the calibration of every temperature class."""
    owner = corpus.answer[test.anchors]
    greedy = np.unique(owner[test.kind == 0])
    names = ("all", *sorted({corpus.categories[i] for i in greedy}))
    groups = {n: greedy if n == "all" else np.array([i for i in greedy if corpus.categories[i] == n]) for n in names}
    plain = np.array([i for i in greedy if not repetitive(corpus, i)])
    chains = {name: draft_all(test, gate, bits) for name, bits in SOURCES.items()}
    chosen = {name: np.minimum(each.accepted, lengths(each)) for name, each in chains.items()}

    def rate(accepted: np.ndarray, answers: np.ndarray) -> float:
        return tokens_per_pass(test, corpus, accepted, answers)

    reliability = {}
    for kind, temperature in enumerate(temperatures):
        mine = _subset(test, test.kind == kind)
        probability, right = live_drafts(mine, corpus, draft_all(mine, gate))
        if len(right):
            reliability[f"temperature {temperature:g}"] = calibration(probability, right, thresholds[kind])
    return Measured(
        acceptance={name: acceptance(test, group, corpus) for name, group in groups.items()},
        answers={name: len(group) for name, group in groups.items()},
        per_length={
            name: [rate(np.minimum(each.accepted, n), greedy) for n in range(1, 9)] for name, each in chains.items()
        },
        gated={name: {s: rate(a, group) for s, a in chosen.items()} for name, group in groups.items()},
        not_repetitive={s: rate(a, plain) for s, a in chosen.items()} if len(plain) else {},
        bigram=rate(bigram_accepted(bigrams, corpus, test), greedy),
        calibration=reliability,
    )


def _subset(proposals: Proposals, mine: np.ndarray) -> Proposals:
    return Proposals(*(getattr(proposals, field.name)[mine] for field in dataclasses.fields(proposals)))


def gate_thresholds(corpus: Corpus, proposals: Proposals, gate: Gate, classes: int) -> list[dict[str, float]]:
    """For each temperature class the thresholds of the gate for a precision of 95 and 99 %, on calibration answers."""
    found = []
    for kind in range(classes):
        mine = _subset(proposals, proposals.kind == kind)
        probability, right = live_drafts(mine, corpus, draft_all(mine, gate))
        found.append({f"{p:.0%}": threshold_for(probability, right, p) for p in (0.95, 0.99)})
    return found
