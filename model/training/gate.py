"""The gate: how probable it is that the trunk will choose a drafted token, fitted to held-out answers.

Three things are fitted, in this order, on answers that the shadow was not trained on:

1. the confidence, one logistic regression over all places and temperatures that the shadow's guess is right;
2. per temperature class and place a slope and an offset of the confidence (Platt scaling), and the lookup's table:
   how often its token was right, by the match's length, by what the shadow says about it, and by place. Both on the
   places that live drafting reaches: from the tokens at which a pass would start, along the chain while it is right
   (sequential calibration, as DeepSeek's DSpark does with temperatures). Which places those are depends on the gate
   itself, so this is done a few times over.

Letters: A anchors, J places of the lookup, K places of the shadow (8), C temperature classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...configs.shadow import PLACES, TABLE
from ...kernels.draft import AGREES, CERTAIN, DIFFERS, LOOKUP, MAX_DRAFTS, SHADOW, UNKNOWN
from .chains import Proposals
from .corpus import Corpus

ROUNDS = 3
RIDGE = 8.0
"""How many observations the prior of a place's scaling is worth."""
SHRINK = 12.0
"""How many observations the coarser cell is worth in the lookup's table."""

PASS_COST = tuple(1.0 + 0.045 * rows for rows in range(MAX_DRAFTS + 1))
"""Assumed time of a pass over 1 + n tokens, in passes over one: decides which drafts live drafting would verify."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """The calibrated parameters by the names of `ShadowConfig.shapes`."""

    conf: np.ndarray  # float32 [2r + features]
    conf_bias: np.ndarray  # float32 [K]
    gate: np.ndarray  # float32 [C, K, 2]
    lookup: np.ndarray  # float32 [C, 17, 3, J]

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Chains:
    """What is drafted after every anchor, as the kernel would."""

    source: np.ndarray  # int32 [A, J]: LOOKUP, SHADOW, or 0 behind the end of the chain
    probability: np.ndarray  # float32 [A, J]
    right: np.ndarray  # bool [A, J]
    guessed: np.ndarray  # float32 [A, K]: the shadow's probability, wherever it may be asked
    says: np.ndarray  # int32 [A, J]: what the shadow says about the lookup's token
    follows: np.ndarray  # bool [A, J]

    @property
    def accepted(self) -> np.ndarray:
        """int32 [A]: how many drafts would stand if all were verified."""
        return np.cumprod(self.right & (self.source > 0), axis=1).sum(axis=1).astype(np.int32)

    @property
    def reached(self) -> np.ndarray:
        """bool [A, J]: places with a draft before which all drafts were right."""
        before = np.cumprod(self.right, axis=1).astype(bool)
        return (self.source > 0) & np.concatenate([np.ones((len(before), 1), bool), before[:, :-1]], axis=1)


def draft_all(proposals: Proposals, gate: Gate, sources: int = LOOKUP | SHADOW, certain: float = CERTAIN) -> Chains:
    """The chains of all anchors, with the choice between sources that kernels/draft makes."""
    p, A = proposals, len(proposals.anchors)
    guessed = _scaled(gate, p.kind, p.confidence(gate.conf, gate.conf_bias))
    shape = (A, MAX_DRAFTS)
    source, probability, right = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, bool)
    says, followed = np.full(shape, UNKNOWN, np.int32), np.zeros(shape, bool)
    follows = (p.match > 0) if sources & LOOKUP else np.zeros(A, bool)
    alive = p.inside > 0
    for place in range(MAX_DRAFTS):
        unknown = gate.lookup[p.kind, p.match, UNKNOWN, place]
        asked = np.zeros(A, bool)
        own = np.zeros(A, np.float32)
        own_right = np.zeros(A, bool)
        if place < PLACES and sources & SHADOW:
            asked = alive & ~(follows & (unknown >= certain))
            own, own_right = guessed[:, place], p.guess_right[:, place]
            says[:, place] = np.where(asked, np.where(p.agrees[:, place], AGREES, DIFFERS), UNKNOWN)
        expected = gate.lookup[p.kind, p.match, says[:, place], place]
        shadows = asked & ~(follows & ~(own > expected))
        stands = alive & (follows | asked)
        source[:, place] = np.where(stands, np.where(shadows, SHADOW, LOOKUP), 0)
        probability[:, place] = np.where(stands, np.where(shadows, own, expected), 0)
        right[:, place] = stands & np.where(shadows, own_right, p.copied_right[:, place])
        followed[:, place] = follows & stands
        # The chain goes on as if its draft were right; where the lookup's differs from a right one, the match is left.
        follows = follows & np.where(shadows, p.agrees[:, min(place, PLACES - 1)], True)
        alive = stands & (place + 1 < p.inside)
    return Chains(source, probability, right, guessed, says, followed)


def _scaled(gate: Gate, kind: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    slope, offset = gate.gate[kind, :, 0], gate.gate[kind, :, 1]
    return _sigmoid(slope * confidence + offset)


def lengths(chains: Chains, cost: Sequence[float] = PASS_COST) -> np.ndarray:
    """int32 [A]: how many drafts of each chain are worth a place in the pass: those up to which expected tokens over
    the pass's time are highest."""
    products = np.cumprod(np.where(chains.source > 0, chains.probability, 0), axis=1)
    tokens = np.concatenate([np.ones((len(products), 1)), 1 + np.cumsum(products, axis=1)], axis=1)
    return np.argmax(tokens / np.asarray(cost), axis=1).astype(np.int32)


def live(proposals: Proposals, corpus: Corpus, accepted: np.ndarray) -> np.ndarray:
    """bool [A]: the anchors at which a pass starts, when the pass after each anchor accepts so many drafts."""
    starts = np.zeros(len(accepted), bool)
    first = np.flatnonzero(np.diff(corpus.answer[proposals.anchors], prepend=-1))
    for begin, end in zip(first, np.append(first[1:], len(accepted))[: len(first)], strict=True):
        at = int(begin)
        while at < end:
            starts[at] = True
            at += int(accepted[at]) + 1
    return starts


def fit_gate(proposals: Proposals, corpus: Corpus, classes: int) -> Gate:
    """The gate of a shadow from its proposals on calibration answers."""
    conf, conf_bias = fit_confidence(proposals)
    scaling = np.zeros((classes, PLACES, 2), np.float32)
    scaling[..., 0] = 1.0
    gate = Gate(conf, conf_bias, scaling, np.full((classes, *TABLE), 0.5, np.float32))
    confidence = proposals.confidence(conf, conf_bias)
    for _ in range(ROUNDS):
        chains = draft_all(proposals, gate)
        starts = live(proposals, corpus, np.minimum(chains.accepted, lengths(chains)))
        # A place is reached by all chains that are right so far, whether or not the gate would stop before it.
        reached = chains.reached & starts[:, None]
        gate = Gate(conf, conf_bias, _fit_scaling(proposals, confidence, chains, reached, classes), gate.lookup)
        gate = dataclasses.replace(gate, lookup=_fit_lookup(proposals, chains, starts, classes))
    return gate


def fit_confidence(proposals: Proposals, iterations: int = 12, ridge: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regression (Newton's method) of whether the shadow's guess is right, on all places that a chain of right
    drafts of either source reaches: weights float32 [2r + features] and one bias per place float32 [K]."""
    p, K = proposals, PLACES
    right_so_far = np.cumprod(p.guess_right | (p.follows & p.copied_right)[:, :K], axis=1).astype(bool)
    reached = np.concatenate([np.ones((len(right_so_far), 1), bool), right_so_far[:, :-1]], axis=1)
    reached &= np.arange(K) < p.inside[:, None]
    row, place = np.nonzero(reached)
    mean, spread = _moments(p.features, row, place)
    y = p.guess_right[row, place].astype(np.float64)
    width = p.features.shape[2]
    w = np.zeros(width + K)
    for _ in range(iterations):
        gradient, hessian = ridge * w, np.diag(np.full(width + K, ridge, np.float64))
        gradient[width:], hessian[width:, width:] = 0.0, 1e-3 * np.eye(K)
        for i in range(0, len(row), 16384):
            x = np.zeros((len(row[i : i + 16384]), width + K), np.float32)
            x[:, :width] = (p.features[row[i : i + 16384], place[i : i + 16384]] - mean) / spread
            x[np.arange(len(x)), width + place[i : i + 16384]] = 1
            q = _sigmoid(x @ w.astype(np.float32)).astype(np.float64)
            gradient += x.T @ (q - y[i : i + 16384])
            hessian += (x * (q * (1 - q))[:, None].astype(np.float32)).T @ x
        change = np.linalg.solve(hessian, gradient)
        w -= change
        if np.abs(change).max() < 1e-4:
            break
    conf = w[:width] / spread
    return conf.astype(np.float32), (w[width:] - conf @ mean).astype(np.float32)


def _moments(features: np.ndarray, row: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sample = features[row[:65536], place[:65536]].astype(np.float64)
    return sample.mean(axis=0), sample.std(axis=0) + 1e-3


def _fit_scaling(p: Proposals, confidence: np.ndarray, chains: Chains, reached: np.ndarray, classes: int) -> np.ndarray:
    """Slope and offset per class and place, where the shadow's token was drafted."""
    drafted = reached[:, :PLACES] & (chains.source[:, :PLACES] == SHADOW)
    scaling = np.zeros((classes, PLACES, 2), np.float32)
    common = _platt(confidence[drafted], p.guess_right[drafted], (1.0, 0.0), RIDGE)
    for kind in range(classes):
        mine = drafted & (p.kind == kind)[:, None]
        of_class = _platt(confidence[mine], p.guess_right[mine], common, RIDGE)
        for place in range(PLACES):
            here = mine[:, place]
            scaling[kind, place] = _platt(confidence[here, place], p.guess_right[here, place], of_class, RIDGE)
    return scaling


def _platt(x: np.ndarray, y: np.ndarray, prior: tuple[float, float], strength: float) -> tuple[float, float]:
    """Slope and offset of a logistic regression of y on x, pulled towards `prior` as if by `strength` observations."""
    w, centre = np.array(prior, np.float64), np.array(prior, np.float64)
    x = x.astype(np.float64)
    for _ in range(30):
        q = _sigmoid(w[0] * x + w[1])
        d = q - y
        v = q * (1 - q)
        gradient = np.array([d @ x, d.sum()]) + strength * (w - centre)
        hessian = np.array([[v @ (x * x), v @ x], [v @ x, v.sum()]]) + strength * np.eye(2)
        change = np.linalg.solve(hessian, gradient)
        w -= np.clip(change, -1.0, 1.0)
        if np.abs(change).max() < 1e-6:
            break
    return float(w[0]), float(w[1])


def _fit_lookup(p: Proposals, chains: Chains, starts: np.ndarray, classes: int) -> np.ndarray:
    """The table of how often the lookup's token is right: each cell is shrunk towards a coarser one, from all classes
    and places together down to the cell itself."""
    J = MAX_DRAFTS
    here = chains.follows & chains.reached & starts[:, None]
    row, place = np.nonzero(here)
    kind, match, right = p.kind[row], p.match[row], p.copied_right[row, place]
    agrees = np.zeros(here.shape, bool)
    agrees[:, :PLACES] = p.agrees
    says = np.where(place < PLACES, np.where(agrees[row, place], AGREES, DIFFERS), UNKNOWN)
    table = np.empty((classes, *TABLE), np.float32)
    for answer in (DIFFERS, AGREES, UNKNOWN):
        mine = np.ones(len(row), bool) if answer == UNKNOWN else says == answer
        overall = _shrunk(mine, right, 0.2 if answer == DIFFERS else 0.6)
        of_length = np.array([_shrunk(mine & (match == n), right, overall) for n in range(TABLE[0])])
        for n in range(TABLE[0]):
            for j in range(J):
                at = mine & (match == n) & (place == j)
                common = _shrunk(at, right, of_length[n])
                for c in range(classes):
                    table[c, n, answer, j] = _shrunk(at & (kind == c), right, common)
    return table


def _shrunk(mine: np.ndarray, right: np.ndarray, prior: float) -> float:
    return float((right[mine].sum() + SHRINK * prior) / (mine.sum() + SHRINK))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
