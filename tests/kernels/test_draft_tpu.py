"""Drafting on a TPU: its kernel for rows of the table, in TPU interpret mode, gives what plain JAX gives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from umbra.kernels.draft import LOOKUP, MAX_DRAFTS, SHADOW, DraftInput, draft, laid_out
from umbra.scripts.tpu import chips

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


def test_the_shadow_stays_on_the_chip_for_a_chain(random_shadow: Callable) -> None:
    """Every place of the chains needs the whole head: it is read from HBM once."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    mesh = jax.sharding.Mesh(np.asarray(chips.devices("v5e:2x2")[:1]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    slots, context, vocab, width, head = 16, 8192, 49152, 576, 4096

    def of(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = jax.eval_shape(lambda: laid_out(random_shadow(vocab, width, rank=192, mlp=160, draft_vocab=head), "tpu"))
    integers, floats = of(np.int32, slots), of(np.float32, slots)
    inputs = DraftInput(
        hidden=of(np.float32, slots, width), token=integers, position=integers, history=of(np.int32, slots, context),
        active=of(np.bool_, slots), sources=integers, temperature=floats, seed=of(np.uint32, slots, 2), room=integers,
        predicted=integers, floor=of(np.float32),
    )  # fmt: skip
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), (weights, inputs))
    whole = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        functools.partial(draft, backend="tpu"), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    text = jax.jit(sharded).lower(*arguments).compile().as_text()
    loops = [line for line in text.splitlines() if re.search(r"=.*\bwhile\(", line)]
    carried = [layout for line in loops for layout in re.findall(rf"s8\[{head},256\](\{{[^}}]*\}})", line)]
    assert carried and all("S(1)" in layout for layout in carried)
