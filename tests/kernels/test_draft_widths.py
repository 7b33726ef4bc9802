"""How many drafts go into a pass, against trying every possibility."""

import itertools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.kernels.draft import widths
from umbra.kernels.draft.widths import LEAST_GAIN

program = jax.jit(widths)


def choose(probability, length, active, cost, budget=None):
    cost = np.asarray(cost, np.float32)
    budget = np.int32(len(cost) - 1 if budget is None else budget)
    return np.asarray(
        program(
            np.asarray(probability, np.float32), np.asarray(length, np.int32), np.asarray(active, bool), cost, budget
        )
    )


def per_cost(n, probability, active, cost):
    """Expected tokens per cost of a pass with n[b] drafts of slot b."""
    products = np.cumprod(np.asarray(probability, np.float64), axis=1)
    tokens = sum(active) + sum(products[b, : n[b]].sum() for b in range(len(n)))
    return tokens / cost[sum(active) + sum(n)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_choice_is_better(data):
    slots, drafts, rows = 3, 3, 9
    chances = st.sampled_from([0, 0.05, 0.3, 0.5, 0.5, 0.8, 1, 1])
    probability = np.array([[data.draw(chances) for _ in range(drafts)] for _ in range(slots)])
    length = [data.draw(st.integers(0, drafts)) for _ in range(slots)]
    active = [data.draw(st.booleans()) for _ in range(slots)]
    cost = np.cumsum([1.0] + [data.draw(st.sampled_from([0.01, 0.1, 0.3, 1])) for _ in range(rows)])
    budget = data.draw(st.integers(0, rows + 2))
    got = choose(probability, length, active, cost, budget)
    most = [n if a else 0 for n, a in zip(length, active, strict=True)]
    assert (got >= 0).all() and (got <= most).all()
    if not any(active) or sum(active) >= min(budget, rows):
        assert (got == 0).all()
        return
    assert sum(active) + got.sum() <= min(budget, rows)
    possible = [
        n
        for n in itertools.product(*(range(m + 1) for m in most))
        if sum(active) + sum(n) <= min(budget, rows)
    ]  # fmt: skip
    best = max(per_cost(n, probability, active, cost) for n in possible)
    if not got.sum():
        assert best <= LEAST_GAIN * per_cost([0] * slots, probability, active, cost) + 1e-5
        return
    assert per_cost(got, probability, active, cost) >= best - 1e-5
    fewest = min(sum(n) for n in possible if per_cost(n, probability, active, cost) >= best - 1e-9)
    assert got.sum() <= fewest or per_cost(got, probability, active, cost) > best - 1e-5


def test_by_hand():
    flat = [1, 1, 1, 1, 1, 1, 1]
    steep = [0, 1, 2, 3, 4, 5, 6]
    sure = [[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]]
    assert choose(sure, [3, 3], [1, 1], flat).tolist() == [3, 1]  # .9 .81 .73 .5
    assert choose(sure, [3, 3], [1, 1], flat, 3).tolist() == [1, 0]
    assert choose(sure, [1, 3], [1, 1], flat).tolist() == [1, 3]
    assert choose(sure, [3, 3], [0, 1], flat).tolist() == [0, 3]
    assert choose(sure, [3, 3], [1, 1], steep).tolist() == [0, 0]
    assert choose([[1, 1, 0]], [3], [1], flat).tolist() == [2]  # what surely fails is not worth a row
    assert choose([[1, 1, 1]], [3], [1], [0, 1, 1.9, 2.9, 3]).tolist() == [3]  # across a step of the cost
    assert choose([[1]], [1], [1], [0, 1, 1.95]).tolist() == [0]  # 2.6 % more
    assert choose([[1]], [1], [1], [0, 1, 1.9]).tolist() == [1]  # 5.3 % more


def test_what_is_not_there_does_not_count():
    """Probabilities behind the length, of slots that are not active, or that are no numbers."""
    odd = [[0.9, np.nan, 0.9], [np.nan] * 3, [2.0, 1.0, 0.0]]
    assert choose(odd, [3, 3, 1], [1, 0, 1], [1] * 9).tolist() == [1, 0, 1]
    assert choose(odd, [0, 0, 0], [1, 1, 1], [1] * 9).tolist() == [0, 0, 0]
    assert choose(odd, [3, 3, 3], [0, 0, 0], [0] + [1] * 8).tolist() == [0, 0, 0]
