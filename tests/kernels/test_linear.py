"""The contract of linear layers, held against every backend: plain JAX, the native kernels on each instruction set of
this machine, and the Pallas kernels in TPU interpret mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.kernels import native
from umbra.kernels.linear import Mixed, Quantised, Split, embed, gated, greedy_head, linear, packing
from umbra.kernels.linear.groups import GROUP, Groups, packed, quantise
from umbra.kernels.linear.layouts import FLOAT_FORMS, part_shapes, write_rows

TILE = 8
GROUPED = ("w4", "w8", "w8m", "w4k", "w6k")


class Target(NamedTuple):
    """Where a test runs."""

    backend: str
    layout: str
    isa: str | None = None

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms that differ here: in plain JAX w8m and w4k are w4 in the same arrays."""
        grouped = {"xla": ("w4", "w8", "w6k"), "cpu": GROUPED, "tpu": FLOAT_FORMS}
        return ("float32", "bfloat16", *grouped[self.backend])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self.backend == "tpu":
            from jax.experimental.pallas import tpu as pltpu

            with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
                yield
        elif self.isa is not None:
            native.set_isa(self.isa)
            try:
                yield
            finally:
                native.set_isa(None)
        else:
            yield

    def __str__(self) -> str:
        return self.isa or self.backend


XLA = Target("xla", "plain")
NATIVE = [] if native.unavailable() else [Target("cpu", "cpu", isa) for isa in native.isas()]
TARGETS = [XLA, *NATIVE, Target("tpu", "tpu")]
FAST = [XLA, *NATIVE]


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with request.param.active():
        yield request.param


@pytest.fixture(params=FAST, ids=str)
def fast(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Without the interpreter, which takes seconds a call."""
    with request.param.active():
        yield request.param


def random_groups(form: str, out: int, inputs: int, rng: np.random.Generator) -> Groups:
    """Any bits that a file may hold, at ordinary magnitudes."""
    G, supers = inputs // GROUP, max(1, inputs // 256)

    def half(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float16)

    def integers(low: int, high: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return rng.integers(low, high, shape).astype(dtype)

    nibbles = functools.partial(integers, 0, 256, (out, G, 16), np.uint8)
    if form == "w4":
        return Groups("w4", nibbles(), half(out, G), half(out, G))
    if form == "w4k":
        scale, minimum = (integers(0, 64, (out, G), np.uint8) for _ in "ab")
        return Groups("w4k", nibbles(), scale, minimum, half(out, supers), half(out, supers))
    if form == "w6k":
        scale = integers(-128, 128, (out, 2 * G), np.int8)
        q = integers(-32, 32, (out, inputs), np.int8)
        return Groups("w6k", q, scale, super_scale=half(out, supers))
    q = integers(-128, 128, (out, inputs), np.int8)
    return Groups(form, q, half(out, G), half(out, G) if form == "w8m" else None)


def make(target: Target, form: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Any, np.ndarray]:
    """A weight of `shape` `[L, out, in]` or `[out, in]` and its float32 values."""
    rng = np.random.default_rng([seed, *shape])
    lead, (out, inputs) = shape[:-2], shape[-2:]
    if form in ("float32", "bfloat16"):
        dtype = np.dtype(np.float32 if form == "float32" else ml_dtypes.bfloat16)
        values = (rng.standard_normal(shape) * 0.1).astype(dtype)
        return jnp.asarray(values), values.astype(np.float32)
    parts = {
        name: np.zeros((*lead, *part), dtype)
        for name, (part, dtype) in part_shapes(form, target.layout, out, inputs).items()
    }
    dense = np.zeros(shape, np.float32)
    for at in np.ndindex(*lead):
        if form in FLOAT_FORMS:
            rows: Any = (rng.standard_normal((out, inputs)) * 0.1).astype(np.float32)
            dense[at] = rows
        else:
            rows = random_groups(form, out, inputs, rng)
            dense[at] = rows.values()
        write_rows({name: part[at] for name, part in parts.items()}, form, target.layout, 0, rows)
    if form == "c8":
        dense = parts["q"].astype(np.float32) * parts["scale"][..., None]
    if form == "s4":
        scale = np.repeat(parts["scale"].astype(np.float32), GROUP, axis=-2)
        values = (parts["q"].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
        dense = np.swapaxes(values.astype(np.float32), -1, -2)
    weight = Quantised(jax.tree.map(jnp.asarray, parts), form, target.layout, shape, inputs, bool(lead))
    return weight, dense


def inputs_of(form: str) -> int:
    return 512 if form in ("w4k", "w6k") else 96


class Static(NamedTuple):
    """What a compiled call depends on, apart from its arrays."""

    backend: str
    activation: str | None = None
    norm: float | None = None
    post_norm: float | None = None
    softcap: float | None = None

    @property
    def tile(self) -> int | None:
        return TILE if self.backend == "xla" else None


@functools.partial(jax.jit, static_argnums=0)
def _linear(how: Static, x: Any, weights: Any, layer: Any, n_rows: Any, more: dict[str, Any]) -> Any:
    for name in ("norm", "post_norm"):
        if name in more:
            more = {**more, name: (more[name], getattr(how, name))}
    return linear(
        x, weights, layer, n_rows=n_rows, backend=how.backend, tile=how.tile, activation=how.activation, **more
    )


def apply(target: Target, x: Any, weights: Any, layer: int | None = None, **more: Any) -> list[np.ndarray]:
    """`linear`, compiled, on all rows or the first `n_rows`."""
    n_rows = jnp.int32(more.pop("n_rows", len(x)))
    eps = {name: more[name][1] for name in ("norm", "post_norm") if name in more}
    how = Static(target.backend, more.pop("activation", None), **eps)
    arrays = {name: value[0] if name in eps else value for name, value in more.items()}
    at = None if layer is None else jnp.int32(layer)
    return [np.asarray(y) for y in _linear(how, jnp.asarray(x), weights, at, n_rows, arrays)]


def rows(n: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes."""
    rng = np.random.default_rng([seed, n, inputs])
    return (rng.standard_normal((n, inputs)) * 10.0 ** rng.uniform(-3, 3, (n, 1))).astype(np.float32)


def rounded(target: Target, form: str, x: np.ndarray) -> np.ndarray:
    """float64 activations as a product of the form sees them."""
    if form in GROUPED:
        groups = x.reshape(len(x), -1, GROUP)
        largest = np.abs(groups).max(-1, keepdims=True)
        with np.errstate(all="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, 0)
        q = np.rint((groups * inverse).astype(np.float32)).astype(np.float64)
        return (q * (largest / np.float32(127))).reshape(x.shape)
    if form == "float32" or (form == "bfloat16" and target.backend == "cpu"):  # native code widens the weights
        return x.astype(np.float64)
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def assert_close(got: np.ndarray, want: np.ndarray, size: np.ndarray, tolerance: float) -> None:
    """Errors relative to the sum of the magnitudes that were added up."""
    assert got.shape == want.shape and got.dtype == np.float32
    assert np.all(np.isfinite(got))
    worst = np.max(np.abs(got - want) / np.maximum(size, 1e-30))
    assert worst <= tolerance, worst


CASES = [(target, form) for target in TARGETS for form in target.forms]
"""Every form on every backend that has it."""

each_form = pytest.mark.parametrize(("target", "form"), CASES, ids=lambda value: str(value), indirect=["target"])


@each_form
def test_products_are_those_of_an_oracle(target: Target, form: str) -> None:
    inputs = inputs_of(form)
    for R, out in [(9, 100)] if target.backend == "tpu" else [(1, 16), (9, 100)]:
        weight, dense = make(target, form, (3, out, inputs))
        x = rows(R, inputs)
        seen = rounded(target, form, x)
        for layer in (0, 2):
            (got,) = apply(target, x, [weight], layer)
            assert_close(got, seen @ dense[layer].T.astype(np.float64), np.abs(seen) @ np.abs(dense[layer].T), 2e-6)


@each_form
def test_a_row_is_the_same_alone_in_a_crowd_and_beside_garbage(target: Target, form: str) -> None:
    """Nor does it matter which rows come before it, or with which other weights it is multiplied."""
    inputs = inputs_of(form)
    weights = [make(target, form, (2, out, inputs), seed=out)[0] for out in (24, 40)]
    norm = (np.random.default_rng(1).uniform(0.5, 2, (2, inputs)).astype(np.float32), 1e-6)
    x = rows(33, inputs)
    crowd = apply(target, x, weights, 1, norm=norm)
    assert np.array_equal(apply(target, x, weights[1:], 1, norm=norm)[0], crowd[1])
    # On a TPU an engine stays in one family of shapes.
    widths = {33} if target.backend == "tpu" else {33, 1}
    for width in widths:
        for start, stop in [(3, 4), (20, 30)]:
            some = np.full((width, inputs), np.nan, np.float32)
            n = min(width, stop - start)
            some[:n] = x[start : start + n]
            for got, whole in zip(apply(target, some, weights, 1, norm=norm, n_rows=n), crowd, strict=True):
                assert np.array_equal(got[:n], whole[start : start + n])


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("stacked", [True, False])
def test_what_comes_before_and_after_a_product(target: Target, stacked: bool) -> None:
    R, inputs, out, layer = 6, 64, 48, 1 if stacked else None
    lead = (2,) if stacked else ()
    rng = np.random.default_rng(7)
    weight, dense = make(target, "float32", (*lead, out, inputs))
    before, after = (rng.uniform(0.5, 2, (*lead, n)).astype(np.float32) for n in (inputs, out))
    bias = rng.standard_normal((*lead, 3, out // 3) if stacked else (out,)).astype(np.float32)
    x, up = (rng.standard_normal((R, inputs)).astype(np.float32) * 3 for _ in "ab")
    residual = rng.standard_normal((R, out)).astype(np.float32)

    def at(value: np.ndarray) -> np.ndarray:
        return (value[layer] if stacked else value).astype(np.float64)

    def check(want: np.ndarray, **more: Any) -> None:
        (got,) = apply(target, x, [weight], layer, **more)
        # The matrix unit of a TPU takes bfloat16; in interpret mode float32 products are exact enough.
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)

    matrix, wide = at(dense).T, x.astype(np.float64)
    check(normed(wide, at(before), 1e-5) @ matrix, norm=(before, 1e-5))
    for name, function in (("silu", silu), ("gelu_tanh", gelu)):
        check((function(wide) * up) @ matrix, up=up, activation=name)
    check(wide @ matrix + at(bias).reshape(-1) + residual, bias=[bias], residual=residual)
    want = residual + normed(normed(wide, at(before), 1e-6) @ matrix, at(after), 1e-6)
    check(want, norm=(before, 1e-6), post_norm=(after, 1e-6), residual=residual)


def test_quantised_products_after_norm_and_gate(fast: Target) -> None:
    """Only as close as 8-bit activations allow: a rounding may fall to either side."""
    weight, dense = make(fast, "w8", (2, 48, 128))
    rng = np.random.default_rng(3)
    x, up = (rng.standard_normal((6, 128)).astype(np.float32) for _ in "ab")
    norm = rng.uniform(0.5, 2, (2, 128)).astype(np.float32)
    for want, more in (
        (normed(x.astype(np.float64), norm[1], 1e-6), dict(norm=(norm, 1e-6))),
        (silu(x.astype(np.float64)) * up, dict(activation="silu", up=up)),
    ):
        (got,) = apply(fast, x, [weight], 1, **more)
        size = np.linalg.norm(want, axis=1)[:, None] * np.linalg.norm(dense[1], axis=1)
        assert np.max(np.abs(got - want @ dense[1].T.astype(np.float64)) / size) < 0.01


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gated(how: Static, own: bool, x: Any, weights: Any, layer: Any, n_rows: Any, norms: Any, residual: Any) -> Any:
    norm, post_norm = norms[0] and (*norms[0], how.norm), norms[1] and (*norms[1], how.post_norm)
    return gated(
        x, *weights, layer, n_rows=n_rows, activation=how.activation, norm=norm, post_norm=post_norm,
        residual=x if own else residual, backend=how.backend, tile=how.tile,
    )  # fmt: skip


@each_form
def test_a_gated_network_has_the_bits_of_its_two_products(target: Target, form: str) -> None:
    D, inner = (512, 256) if form in ("w4k", "w6k") else (96, 160)
    gate, up, down = (
        make(target, form, (2, *shape), seed=i)[0] for i, shape in enumerate([(inner, D)] * 2 + [(D, inner)])
    )
    rng = np.random.default_rng(5)
    before, after = (rng.uniform(0.5, 2, (2, D)).astype(np.float32) for _ in "ab")
    x, other = (rng.standard_normal((9, D)).astype(np.float32) for _ in "ab")
    n, eps = 7, (1e-5, 1e-6)

    def check(activation: str, norm: Any, post_norm: Any, residual: Any) -> None:
        first = {} if norm is None else dict(norm=(norm, eps[0]))
        second = {} if post_norm is None else dict(post_norm=(post_norm, eps[1]))
        if residual is not None:
            second["residual"] = residual
        a, b = apply(target, x, [gate, up], 1, n_rows=n, **first)
        (want,) = apply(target, a, [down], 1, n_rows=n, up=b, activation=activation, **second)
        how = Static(target.backend, activation, *eps)
        norms = [norm if norm is None else (norm,) for norm in (norm, post_norm)]
        got = _gated(how, residual is x, x, [gate, up, down], jnp.int32(1), jnp.int32(n), norms, residual)
        assert np.array_equal(np.asarray(got)[:n], want[:n])

    check("silu", before, None, x)
    check("gelu_tanh", None, after, other)
    check("silu", None, None, None)


@pytest.mark.parametrize("form", ["float32", *GROUPED])
def test_extreme_rows(fast: Target, form: str) -> None:
    """Zeros, denormals and huge values; a row without numbers spoils no other."""
    if form not in fast.forms:
        pytest.skip("the same arrays as w4 here")
    inputs = inputs_of(form)
    weight, dense = make(fast, form, (40, inputs))
    x = rows(6, inputs)
    x[0] = 0
    x[1] = 1e-41
    x[2] *= np.float32(1e30) / np.abs(x[2]).max()
    x[3, 5] = np.nan
    x[4, :GROUP] = 0
    norm = (np.ones(inputs, np.float32), 1e-5)
    (got,) = apply(fast, x, [weight])
    assert not np.any(got[0]) and np.all(np.abs(got[1]) < 1e-30)
    seen = rounded(fast, form, x)
    for row in (2, 4, 5):
        assert_close(got[row], seen[row] @ dense.T.astype(np.float64), np.abs(seen[row]) @ np.abs(dense.T), 2e-6)
    assert not np.any(np.isfinite(got[3]))
    (got,) = apply(fast, x, [weight], norm=norm)
    assert not np.any(got[0]) and np.all(np.isfinite(got[[0, 1, 2, 4, 5]]))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ragged_sizes(fast: Target, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(fast.forms))
    R, out = data.draw(st.sampled_from((2, 7, 40))), data.draw(st.integers(1, 70))
    inputs = data.draw(st.sampled_from((256, 512) if form in ("w4k", "w6k") else (32, 64, 160)))
    weight, dense = make(fast, form, (out, inputs), seed=data.draw(st.integers(0, 99)))
    x = rows(R, inputs, seed=data.draw(st.integers(0, 99)))
    seen = rounded(fast, form, x)
    (got,) = apply(fast, x, [weight])
    assert_close(got, seen @ dense.T.astype(np.float64), np.abs(seen) @ np.abs(dense.T), 2e-6)
    assert np.array_equal(got, apply(fast, x, [weight])[0])


@pytest.mark.parametrize("form", ["float32", "bfloat16", *GROUPED])
@pytest.mark.skipif(len(NATIVE) < 2, reason="one instruction set only")
def test_instruction_sets_give_the_same_bits(form: str) -> None:
    inputs = inputs_of(form)
    results = []
    for target in NATIVE:
        with target.active():
            weight, _ = make(target, form, (2, 72, inputs))
            x, up = rows(7, inputs), rows(7, inputs, seed=1)
            norm = (np.linspace(0.5, 2, inputs, dtype=np.float32), 1e-6)
            post = (np.linspace(0.5, 2, 72, dtype=np.float32), 1e-6)
            made = apply(target, x, [weight], 1, norm=norm, post_norm=post, residual=rows(7, 72))
            for name in ("silu", "gelu_tanh"):
                made += apply(target, x, [weight], 1, activation=name, up=up)
            results.append(made)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.array_equal(a, b)


@functools.partial(jax.jit, static_argnums=0)
def _head(how: Static, x: Any, table: Any, norm: Any, n_rows: Any) -> Any:
    norm = None if norm is None else (norm, how.norm)
    return greedy_head(x, table, norm=norm, n_rows=n_rows, softcap=how.softcap, backend=how.backend, tile=how.tile)


def head(target: Target, x: np.ndarray, table: Any, norm: Any = None, softcap: float | None = None, **more: Any) -> Any:
    weight, eps = norm or (None, None)
    how = Static(target.backend, norm=eps, softcap=softcap)
    made = _head(how, jnp.asarray(x), table, weight, jnp.int32(more.get("n_rows", len(x))))
    return [np.asarray(y) for y in made]


@functools.partial(jax.jit, static_argnums=0)
def _embed(backend: str, ids: Any, table: Any) -> Any:
    return embed(ids, table, n_rows=jnp.int32(len(ids)), backend=backend)


@each_form
def test_greedy_head_is_the_argmax_of_the_logits(target: Target, form: str) -> None:
    if form == "s4":
        pytest.skip("tables are not stored so")
    inputs = inputs_of(form)
    V = 300
    table, _ = make(target, form, (V, inputs))
    x = np.concatenate([rows(9, inputs), np.full((4, inputs), np.nan, np.float32)])
    norm = (np.linspace(0.5, 2, inputs, dtype=np.float32), 1e-6)
    logits = apply(target, x, [table], norm=norm, n_rows=9)[0][:9]
    token, highest, total = (y[:9] for y in head(target, x, table, norm, n_rows=9))
    assert np.array_equal(token, logits.argmax(-1)) and token.dtype == np.int32
    assert np.array_equal(highest, logits.max(-1))
    wide = logits.astype(np.float64)
    want = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)) + wide.max(-1)
    np.testing.assert_allclose(total, want, rtol=1e-6, atol=1e-6)


def test_greedy_head_with_ties_caps_and_odd_numbers(fast: Target) -> None:
    table = np.zeros((40, 32), np.float32)
    table[[7, 21], 0] = 1
    table[30, 1] = 500
    x = np.zeros((4, 32), np.float32)
    x[0, 0] = 1  # 7 and 21 tie
    x[1, 1] = 1
    x[2] = np.nan
    x[3, 0] = -1  # all but two tie at zero
    token, highest, _ = head(fast, x, jnp.asarray(table))
    assert list(token[[0, 1, 3]]) == [7, 30, 0]
    assert token[2] == 0 and list(highest[[0, 1, 3]]) == [1, 500, 0]
    token, highest, total = head(fast, x, jnp.asarray(table), softcap=30.0)
    assert list(token[[0, 1, 3]]) == [7, 30, 0] and highest[1] <= 30
    assert abs(total[0] - np.log(38 + 2 * np.exp(30 * np.tanh(1 / 30)))) < 1e-5


@each_form
def test_rows_of_a_table_are_its_exact_values(target: Target, form: str) -> None:
    inputs = inputs_of(form)
    table, dense = make(target, form, (70, inputs))
    ids = np.array([0, 69, 16, 15, 3, 3, 50], np.int32)
    got = np.asarray(_embed(target.backend, ids, table))
    assert got.dtype == np.float32
    assert np.array_equal(got, dense[ids])


def test_a_stack_may_mix_forms(fast: Target) -> None:
    """Each layer is multiplied in its own form, with its own norm and bias."""
    made = {form: make(fast, form, (2, 40, 256)) for form in ("w4k", "w6k")}
    mixed = Mixed(tuple(made[form][0] for form in made), (0, 1, 1, 0))
    other, _ = make(fast, "w8", (4, 24, 256))
    norm = (np.random.default_rng(0).uniform(0.5, 2, (4, 256)).astype(np.float32), 1e-5)
    bias = np.random.default_rng(1).standard_normal((4, 40)).astype(np.float32)
    x, residual = rows(5, 256), rows(5, 40)
    for layer, (form, row) in enumerate([("w4k", 0), ("w6k", 0), ("w6k", 1), ("w4k", 1)]):
        own = (norm[0][layer], norm[1])
        want = apply(fast, x, [made[form][0]], row, norm=own, bias=[bias[layer]])
        got = apply(fast, x, [other, mixed], layer, norm=norm, bias=[None, bias])
        assert np.array_equal(got[1], want[0])
        assert np.array_equal(got[0], apply(fast, x, [other], layer, norm=norm)[0])
        (got_sum,) = apply(fast, x, [mixed], layer, residual=residual)
        assert np.array_equal(got_sum, apply(fast, x, [made[form][0]], row, residual=residual)[0])


def split_of(target: Target, values: np.ndarray, frequent: np.ndarray) -> tuple[Split, np.ndarray]:
    """A table with some rows in 8 bits and the rest in 4, and its float32 values."""
    V, D = values.shape
    tokens = np.concatenate([frequent, np.setdiff1d(np.arange(V), frequent)]).astype(np.int32)
    place = np.argsort(tokens).astype(np.int32)
    tables, dense = [], []
    for bits, ids in ((8, tokens[: len(frequent)]), (4, tokens[len(frequent) :])):
        groups = quantise(values[ids], bits)
        form = groups.form
        parts = {n: np.zeros(shape, d) for n, (shape, d) in part_shapes(form, target.layout, len(ids), D).items()}
        write_rows(parts, form, target.layout, 0, groups)
        tables.append(Quantised(jax.tree.map(jnp.asarray, parts), form, target.layout, (len(ids), D), D, False))
        dense.append(groups.values())
    return Split(*tables, jnp.asarray(place), jnp.asarray(tokens)), np.concatenate(dense)[place]


def test_a_table_of_two_precisions_is_in_the_order_of_tokens(fast: Target) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((150, 64)) * 0.1).astype(np.float32)
    table, dense = split_of(fast, values, np.sort(rng.permutation(150)[:44]))
    ids = np.arange(150, dtype=np.int32)
    assert np.array_equal(_embed(fast.backend, ids, table), dense)
    x = rows(6, 64)
    seen = rounded(fast, "w8", x)
    (logits,) = apply(fast, x, [table])
    assert_close(logits, seen @ dense.T.astype(np.float64), np.abs(seen) @ np.abs(dense.T), 2e-6)
    token, highest, total = head(fast, x, table)
    assert np.array_equal(token, logits.argmax(-1)) and np.array_equal(highest, logits.max(-1))
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    np.testing.assert_allclose(total, np.log(np.exp(wide).sum(-1)) + logits.max(-1), rtol=1e-6, atol=1e-5)
    x[0] = 0  # all tie: the lowest token wins, in whichever part it is
    assert head(fast, x, table)[0][0] == 0


def test_packing_keeps_every_bit() -> None:
    rng = np.random.default_rng(0)
    for form in GROUPED:
        groups = random_groups(form, 40, 512, rng)
        parts = packing.pack(groups)
        again = packing.unpack(parts, form, 40, 512)
        assert np.array_equal(again.values(), groups.values())
        assert np.array_equal(again.integers(), groups.integers())


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_rounds_to_the_nearest(bits: int) -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-4, 2, (64, 1))).astype(np.float32)
    values[3] = 0
    groups = quantise(values, bits)
    spread = groups.scales()[0].repeat(GROUP, 1)
    assert np.all(np.abs(groups.values() - values) <= spread * (0.51 if bits == 8 else 2))
    assert not np.any(quantise(values[3:4], 8).values())
    error = np.linalg.norm(groups.values() - values, axis=1) / np.maximum(np.linalg.norm(values, axis=1), 1e-9)
    assert np.median(error) < (0.008 if bits == 8 else 0.09)
    assert np.array_equal(packed(groups.integers().view(np.uint8)), groups.q) if bits == 4 else True


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_what_cannot_be_quantised_is_refused(bad: float) -> None:
    values = np.ones((2, 64), np.float32)
    values[1, 3] = bad
    with pytest.raises(ValueError, match="not finite or too large"):
        quantise(values, 8)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "backend": (lambda x, w: linear(x, [w], None, n_rows=1, backend="gpu"), "no backend 'gpu'; supported: xla, cpu"),
    "gate": (lambda x, w: linear(x, [w], None, n_rows=1, backend="xla", up=x), "belong together"),
    "sum": (lambda x, w: linear(x, [w, w], None, n_rows=1, backend="xla", residual=x), "needs one weight, got 2"),
    "layout": (lambda x, w: linear(x, [w], None, n_rows=1, backend="xla"), "packed for the native kernels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_calls_are_refused(case: str) -> None:
    weight, _ = make(Target("cpu", "cpu"), "w8", (32, 32))
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((2, 32)), weight)
