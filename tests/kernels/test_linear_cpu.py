"""What only the native linear layers promise: the same bits for any number of rows, threads and instruction set, one
rule of arithmetic for all of them, and packed weights that keep every bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.kernels import native
from umbra.kernels.linear import Quantised, packing
from umbra.kernels.linear.groups import GROUP, Groups

if native.unavailable():
    pytest.skip("no native kernels here", allow_module_level=True)

from umbra.kernels.linear import cpu  # noqa: E402

FORMS = (*packing.FORMS, "float32", "bfloat16")
ISAS = native.isas()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    native.set_isa(None)
    native.set_threads(None)


def groups_of(form: str, out: int, inputs: int, seed: int = 0) -> Groups:
    rng = np.random.default_rng([seed, out, inputs])
    G = inputs // GROUP

    def half(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float16)

    nibbles = rng.integers(0, 256, (out, G, 16), np.uint8)
    if form == "w4":
        return Groups(form, nibbles, half(out, G), half(out, G))
    if form == "w4k":
        scale, minimum = rng.integers(0, 64, (2, out, G), np.uint8)
        return Groups(form, nibbles, scale, minimum, half(out, G // 8), half(out, G // 8))
    if form == "w6k":
        q, scale = rng.integers(-32, 32, (out, inputs), np.int8), rng.integers(-128, 128, (out, 2 * G), np.int8)
        return Groups(form, q, scale, super_scale=half(out, G // 8))
    q = rng.integers(-128, 128, (out, inputs), np.int8)
    return Groups(form, q, half(out, G), half(out, G) if form == "w8m" else None)


def weight_of(form: str, out: int, inputs: int, seed: int = 0) -> Any:
    """One matrix as the native kernels take it."""
    if form in packing.FORMS:
        parts = packing.pack(groups_of(form, out, inputs, seed))
        return Quantised(jax.tree.map(jnp.asarray, parts), form, "cpu", (out, inputs), inputs, False)
    values = (np.random.default_rng([seed, out, inputs]).standard_normal((out, inputs)) * 0.1).astype(np.float32)
    return jnp.asarray(values if form == "float32" else values.astype(ml_dtypes.bfloat16))


def inputs_of(form: str) -> int:
    return 256 if form in ("w4k", "w6k") else 96 if form in packing.FORMS else 77


@functools.partial(jax.jit, static_argnames=("activation", "epsilon"))
def _linear(x: Any, weights: Any, n_rows: Any, more: Any, *, activation: Any, epsilon: float) -> Any:
    empty = dict.fromkeys(("norm", "up", "bias", "post_norm", "residual"))
    norms = {name: (more[name], epsilon) for name in ("norm", "post_norm") if name in more}
    return cpu.linear(x, weights, None, n_rows=n_rows, activation=activation, **(empty | more | norms))


def linear(x: np.ndarray, *weights: Any, n_rows: int | None = None, **more: Any) -> list[np.ndarray]:
    activation = more.pop("activation", None)
    rows = jnp.int32(len(x) if n_rows is None else n_rows)
    return [np.asarray(y) for y in _linear(x, list(weights), rows, more, activation=activation, epsilon=1e-5)]


@jax.jit
def head(x: Any, table: Any, n_rows: Any) -> Any:
    return cpu.greedy_head(x, table, norm=None, n_rows=n_rows, softcap=None)


def rows(n: int, inputs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n, inputs])
    return (rng.standard_normal((n, inputs)) * 10.0 ** rng.uniform(-2, 2, (n, 1))).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_gives_the_same_bits(form: str) -> None:
    """Every size of register tile, every way to cut rows into tiles, and more rows than one pass takes."""
    inputs = inputs_of(form)
    weight = weight_of(form, 70, inputs)
    x = rows(140, inputs)
    (want,) = linear(x, weight)
    for isa in ISAS[1:] or ISAS:  # the plain one has no tiles
        native.set_isa(isa)
        garbage = np.full_like(x, np.nan)
        for n in (*range(1, 34), 63, 64, 65, 130):
            garbage[:n] = x[:n]
            (got,) = linear(garbage, weight, n_rows=n)
            assert np.array_equal(got[:n], want[:n]), (isa, n)


@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_and_threads_give_the_same_bits(form: str) -> None:
    inputs, out = inputs_of(form), 120
    weight = weight_of(form, out, inputs)
    x, up, residual = rows(13, inputs), rows(13, inputs, 1), rows(13, out, 2)
    vectors = {
        "norm": np.linspace(0.5, 2, inputs, dtype=np.float32),
        "post_norm": np.linspace(2, 1, out, dtype=np.float32),
    }
    results = []
    for isa in ISAS:
        native.set_isa(isa)
        for threads in (1, 2, 4):
            native.set_threads(threads)
            made = linear(x, weight, residual=residual, bias=[residual[0]], **vectors)
            for activation in ("silu", "gelu_tanh"):
                made += linear(x, weight, weight, up=up, activation=activation)
            made += [np.asarray(y) for y in head(x, weight, jnp.int32(13))]
            results.append(made)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert np.array_equal(got, want)


@functools.partial(jax.jit, static_argnames="own")
def gated(x: Any, weights: Any, n_rows: Any, residual: Any, own: bool = False) -> Any:
    return cpu.gated(
        x, *weights, None, n_rows=n_rows, activation="silu", norm=None, post_norm=None,
        residual=x if own else residual,
    )  # fmt: skip


GATED = [
    ("w4", "w4", "w4"), ("w4", "w8m", "w8"), ("w4k", "w4k", "w6k"), ("float32", "w8", "w4"), ("w4", "w4", "float32"),
    ("float32", "bfloat16", "bfloat16"),
]  # fmt: skip
"""Forms of gate, up and down."""


@pytest.mark.parametrize("forms", GATED, ids="-".join)
def test_gated_networks_of_any_forms_and_rows(forms: tuple[str, str, str]) -> None:
    """The bits of two calls with the plain instruction set, whoever computes them and however many rows there are."""
    special = "w6k" in forms
    D, inner = 256 if special else 96, 512 if special else 77 if forms[2] in ("float32", "bfloat16") else 352
    shapes = [(inner, D), (inner, D), (D, inner)]
    gate, up, down = (
        weight_of(form, *shape, seed=i) for i, (form, shape) in enumerate(zip(forms, shapes, strict=True))
    )
    x, other = rows(140, D) * 0.1, rows(140, D, seed=1)
    native.set_isa(ISAS[0])
    a, b = linear(x, gate, up)
    want = {own: linear(a, down, up=b, activation="silu", residual=x if own else other)[0] for own in (True, False)}
    for isa in ISAS:
        native.set_isa(isa)
        for threads in (1, 2, 3):
            native.set_threads(threads)
            garbage = np.full_like(x, np.nan)
            for n in (1, 2, 5, 13, 17, 64, 65, 140):
                garbage[:n] = x[:n]
                for own, whole in want.items():
                    got = gated(garbage, (gate, up, down), jnp.int32(n), other, own=own)
                    assert np.array_equal(np.asarray(got)[:n], whole[:n]), (isa, threads, n, own)


def test_gated_networks_that_fit_nothing_are_refused() -> None:
    gate, down, x = weight_of("w8", 64, 96), weight_of("w8", 96, 64), jnp.zeros((2, 96))

    def run(up: Any, activation: str = "silu", **more: Any) -> None:
        none = dict.fromkeys(("norm", "post_norm", "residual"))
        more = {**none, **more}
        jax.block_until_ready(cpu.gated(x, gate, up, down, None, n_rows=jnp.int32(2), activation=activation, **more))

    run(gate)
    with pytest.raises(ValueError, match="supported: silu, gelu_tanh"):
        run(gate, "relu")
    with pytest.raises(Exception, match=r"blocks must be \[4, 3, 544\]"):
        run(weight_of("w8", 32, 96))
    with pytest.raises(Exception, match=r"norm must be float32 \[96\]"):
        run(gate, norm=(jnp.zeros(95), 1e-5))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a b + c. The product is exact in float64; so is the sum here, but for numbers of very different sizes."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("form", packing.FORMS)
def test_products_follow_the_rule(form: str) -> None:
    """That of native/src/linear.h, in numpy: integers inside a group, then fused steps in ascending order."""
    inputs, out, R = inputs_of(form), 24, 5
    groups, x = groups_of(form, out, inputs), rows(R, inputs)
    (got,) = linear(x, weight_of(form, out, inputs))
    parts = x.reshape(R, -1, GROUP)
    largest = np.abs(parts).max(-1)
    q = np.rint(parts * (np.float32(127) / largest)[..., None]).astype(np.int64)
    own = largest / np.float32(127)
    scale, minimum = groups.scales()
    width = inputs // scale.shape[1]
    products = q.reshape(R, 1, -1, width) * groups.integers().astype(np.int64).reshape(1, out, -1, width)
    sums = products.sum(-1).astype(np.float32)
    y = np.zeros((R, out), np.float32)
    for g in range(scale.shape[1]):
        at = g * width // GROUP
        y = _fma(sums[:, :, g] * own[:, at, None], np.broadcast_to(scale[:, g], y.shape), y)
        if minimum is not None:
            total = own[:, at] * q[:, at].sum(-1).astype(np.float32)
            y = _fma(np.broadcast_to(minimum[:, g], y.shape), np.broadcast_to(total[:, None], y.shape), y)
    different = np.mean(got != y)
    assert different < 0.02  # rounded twice above where float64 is not exact
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_float_products_add_sixteen_partial_sums() -> None:
    """Exact where every partial sum is: small integers, and one that float32 can only hold in this order."""
    out, inputs = 17, 50
    values = np.random.default_rng(0).integers(-8, 9, (out, inputs)).astype(np.float32)
    x = np.random.default_rng(1).integers(-8, 9, (6, inputs)).astype(np.float32)
    for weight in (jnp.asarray(values), jnp.asarray(values, jnp.bfloat16)):
        assert np.array_equal(linear(x, weight)[0], x @ values.T)
    big = np.zeros((1, 33), np.float32)
    big[0, [0, 16, 32, 1]] = [2.0**24, 1, -(2.0**24), 1]  # the first three share a partial sum, where the 1 is lost
    assert linear(np.ones((1, 33), np.float32), jnp.asarray(big))[0] == 1


@settings(max_examples=10, deadline=None)
@given(out=st.integers(1, 60), blocks=st.integers(1, 3), form=st.sampled_from(packing.FORMS), seed=st.integers(0, 99))
def test_packing_keeps_every_bit_wherever_it_is_cut(out: int, blocks: int, form: str, seed: int) -> None:
    inputs = blocks * (256 if form in ("w4k", "w6k") else 32)
    groups = groups_of(form, out, inputs, seed)
    parts = packing.pack(groups)
    assert {name: (p.shape, p.dtype) for name, p in parts.items()} == packing.shapes(form, out, inputs)
    again = packing.unpack(parts, form, out, inputs)
    for name in ("q", "scale", "min", "super_scale", "super_min"):
        kept, was = getattr(again, name), getattr(groups, name)
        assert (kept is None and was is None) or np.array_equal(kept, was)
    pieces = {name: np.full_like(part, 0xA5) for name, part in parts.items()}
    for first in range(0, out, 32):
        packing.pack_into(groups.rows(slice(first, first + 32)), pieces, first // 16)
    for name, part in parts.items():
        assert np.array_equal(pieces[name], part)


def test_calls_that_fit_nothing_are_refused() -> None:
    weight, x = weight_of("w8", 32, 96), jnp.zeros((2, 96))
    with pytest.raises(ValueError, match="multiple of 256 inputs, got 96"):
        packing.shapes("w4k", 32, 96)
    with pytest.raises(ValueError, match="supported: w4, w8"):
        packing.shapes("c8", 32, 96)
    with pytest.raises(ValueError, match="supported: silu, gelu_tanh"):
        linear(x, weight, up=x, activation="relu")
    with pytest.raises(ValueError, match="takes 1 to 8 weights, got 9"):
        linear(x, *[weight] * 9)
    with pytest.raises(Exception, match=r"blocks must be \[2, 2, 544\]"):
        linear(x[:, :64], weight)
    with pytest.raises(Exception, match=r"norm must be float32 \[96\]"):
        linear(x, weight, norm=jnp.zeros(95))
    assert "supported: float32, bfloat16" in (cpu.unsupported(jnp.zeros((2, 2), jnp.float16)) or "")
    assert cpu.unsupported(weight) is None


def test_a_layer_that_is_not_there_is_an_error() -> None:
    stack = Quantised(
        {k: jnp.stack([v, v]) for k, v in weight_of("w8", 32, 96).parts.items()}, "w8", "cpu", (2, 32, 96), 96, True
    )
    none = dict.fromkeys(("norm", "up", "activation", "bias", "post_norm", "residual"))
    x = jnp.ones((1, 96))
    with pytest.raises(Exception, match="there is no layer 2 in blocks of 2"):
        jax.block_until_ready(cpu.linear(x, [stack], jnp.int32(2), n_rows=jnp.int32(1), **none))
    got = cpu.linear(x, [stack], jnp.int32(1), n_rows=jnp.int32(1), **none)[0]
    assert np.array_equal(got, linear(np.ones((1, 96), np.float32), weight_of("w8", 32, 96))[0])


def test_embed_takes_ids_from_inside_the_table() -> None:
    table = weight_of("w4", 40, 64)
    values = groups_of("w4", 40, 64).values()
    ids = jnp.array([0, 39, 17, -5, 99, 3], jnp.int32)
    got = np.asarray(jax.jit(lambda ids, n: cpu.embed(ids, table, n_rows=n))(ids, jnp.int32(6)))
    assert np.array_equal(got, values[[0, 39, 17, 0, 39, 3]])
