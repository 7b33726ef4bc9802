"""The table of what a pass costs, from noisy measurements."""

from __future__ import annotations

import numpy as np
import pytest

from umbra.serving.engine.profile import fitted

SIZES = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16])


def test_measurements_on_the_line_are_met():
    line = np.interp(SIZES, (1, 2, 5, 8, 16), (3.3, 3.7, 4.6, 5.9, 10.0))
    table = fitted(SIZES, line, 20)
    assert np.allclose(table[SIZES], line)
    assert table[0] == pytest.approx(3.3) and np.allclose(table[16:], 10.0)


def test_noise_makes_no_drafts_free():
    line = np.interp(SIZES, (1, 2, 5, 8, 16), (3.3, 3.7, 4.6, 5.9, 10.0))
    noise = 1 + 0.04 * np.random.default_rng(0).normal(size=(50, len(SIZES)))
    steps = np.array([np.diff(fitted(SIZES, line * row, 17))[2:5] for row in noise])
    assert np.abs(steps.mean() - 0.3) < 0.03
    assert steps.std() < 0.6 * np.diff(line * noise, axis=1)[:, 1:4].std()


def test_the_table_never_falls():
    table = fitted(SIZES, np.array([3.0, 9.0, 3.2, 3.3, 3.5, 3.6, 4.0, 4.4, 5.0, 4.9]), 17)
    assert (np.diff(table) >= 0).all() and (table > 0).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 130])
def test_any_number_of_rows(rows):
    sizes = np.array([*(n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128) if n < rows), rows])
    assert np.allclose(fitted(sizes, 2.0 + 0.1 * sizes, rows + 4)[sizes], 2.0 + 0.1 * sizes)
