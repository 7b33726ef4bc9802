"""Drafting on a TPU: its kernel for rows of the table, in TPU interpret mode, gives what plain JAX gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from umbra.kernels.draft import LOOKUP, MAX_DRAFTS, SHADOW, DraftInput, draft, laid_out

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.fixture
def interpreted() -> Iterator[None]:
    try:
        with pltpu.force_tpu_interpret_mode(STRICT):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_drafts_of_both_backends(random_shadow: Callable, interpreted: None) -> None:
    slots, context, width = 4, 48, 16
    rng = np.random.default_rng(0)
    history = rng.integers(0, 512, (slots, context)).astype(np.int32)
    history[1, 30:36] = history[1, 10:16]  # one slot repeats itself
    position = np.array([20, 35, 5, 40], np.int32)
    inputs = DraftInput(
        hidden=rng.standard_normal((slots, width)).astype(np.float32),
        token=history[np.arange(slots), position], position=position, history=history,
        active=np.array([True, True, False, True]), sources=np.full(slots, LOOKUP | SHADOW, np.int32),
        temperature=np.array([0, 0, 0, 0.7], np.float32), seed=np.ones((slots, 2), np.uint32),
        room=np.full(slots, MAX_DRAFTS, np.int32), predicted=np.array([0, 8, 0, 4], np.int32), floor=np.float32(1e-3),
    )  # fmt: skip
    weights = random_shadow(512, width)
    run = jax.jit(draft, static_argnames="backend")
    wide = laid_out(weights, "tpu")
    assert wide.read.shape == (512, 128) and wide.head.shape[1] == 128
    expected = run(wide, inputs, backend="xla")
    assert all(a is b for a, b in zip(laid_out(weights, "xla"), weights, strict=True))
    got = run(wide, inputs, backend="tpu")
    assert expected.length[2] == 0 and (expected.length[:2] > 1).all()
    for name in ("tokens", "source", "length"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    np.testing.assert_allclose(got.probability, expected.probability, rtol=1e-5)
