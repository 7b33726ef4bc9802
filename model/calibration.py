"""Learn then test: bounds on a loss that hold with a stated confidence, from a sample of prompts.

A lossy setting (a margin of relaxed acceptance, a subset of layers) has a *loss* per prompt, between 0 and 1: the share
of its tokens that are not what the trunk would have chosen. Prompts are taken as exchangeable, so the guarantee holds
for prompts like those measured, and the mean loss over such prompts, the *risk*, is what is bounded.

The method is "Learn then Test" (Angelopoulos, Bates, Candes, Jordan, Lei, 2021) with the Hoeffding-Bentkus p-value of
"Distribution-free, risk-controlling prediction sets" (Bates, Angelopoulos, Lei, Malik, Jordan, 2021): for every setting
the hypothesis "its risk exceeds the target" is tested; settings are tested from the most careful on, and the first one
that cannot be rejected ends the testing. Whatever was rejected before keeps within the target, all of it together, with
the stated confidence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
TARGET = 0.05
"""Largest share of differing tokens that the lossy levels may have."""


@dataclasses.dataclass(frozen=True)
class Tested:
    """One setting after the test."""

    loss: float
    """The mean over the prompts measured."""
    bound: float
    """The risk is at most this, with the confidence asked for, if this setting alone is looked at."""
    p_value: float
    """Of "the risk exceeds the target"."""
    passed: bool
    """Whether the risk of this setting, and of all before it, is within the target with the confidence asked for."""


def p_value(loss: float, n: int, target: float) -> float:
    """Hoeffding-Bentkus p-value of "the risk exceeds `target`", for a mean `loss` of `n` losses between 0 and 1."""
    if n < 1:
        raise ValueError("a p-value needs at least one loss")
    if not 0.0 <= loss <= 1.0:
        raise ValueError(f"losses must be between 0 and 1, got a mean of {loss}")
    if loss >= target:
        return 1.0
    if target >= 1.0:
        return 0.0
    hoeffding = math.exp(-n * _divergence(loss, target))
    bentkus = math.e * _binomial_tail(math.ceil(round(n * loss, 9)), n, target)
    return min(1.0, hoeffding, bentkus)


def bound(loss: float, n: int, confidence: float = CONFIDENCE) -> float:
    """The smallest target that a mean `loss` of `n` prompts keeps within, with `confidence`; at most 1."""
    low, high = loss, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(loss, n, middle) <= 1.0 - confidence:
            high = middle
        else:
            low = middle
    return high


def fixed_sequence(
    losses: Sequence[Sequence[float]], *, target: float = TARGET, confidence: float = CONFIDENCE
) -> list[Tested]:
    """Test settings in the order given, the most careful first; `losses` has each one's losses per prompt."""
    result: list[Tested] = []
    rejecting = True
    for one in losses:
        loss = float(np.mean(one))
        p = p_value(loss, len(one), target)
        rejecting = rejecting and p <= 1.0 - confidence
        result.append(Tested(loss, bound(loss, len(one), confidence), p, rejecting))
    return result


def last_passed(tested: Sequence[Tested]) -> int | None:
    """Index of the boldest setting that passed; None when not even the first did."""
    return max((i for i, one in enumerate(tested) if one.passed), default=None)


def _divergence(a: float, b: float) -> float:
    """Kullback-Leibler divergence of a coin that shows heads with probability `b` from one with `a`, in nats."""
    heads = a * math.log(a / b) if a > 0 else 0.0
    return heads + (1 - a) * math.log((1 - a) / (1 - b))


def _binomial_tail(k: int, n: int, p: float) -> float:
    """The probability of at most `k` heads in `n` throws of probability `p`, between 0 and 1, both excluded."""
    i = np.arange(min(k, n) + 1)
    factorials = _log_factorials(n)
    logs = factorials[n] - factorials[i] - factorials[n - i] + i * math.log(p) + (n - i) * math.log1p(-p)
    return min(1.0, math.fsum(np.exp(logs)))


@functools.lru_cache(maxsize=16)
def _log_factorials(n: int) -> np.ndarray:
    """Logarithms of 0!, 1!, ... n!."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
