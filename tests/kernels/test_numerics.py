"""The arithmetic every backend shares: accuracy against float64, odd values, and the same bits in any program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from umbra.kernels import numerics


def ulps(got, want):
    """Largest distance of float32 `got` from float64 `want`, in units of the last place of the wanted value."""
    want = np.asarray(want, np.float64)
    return np.max(np.abs(np.asarray(got, np.float64) - want) / np.spacing(np.abs(want).astype(np.float32)))


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def test_exp_is_accurate():
    x = np.concatenate([np.linspace(-87.336, 88.722, 400_003), np.linspace(-1, 1, 100_001), [0.0, -0.0, 1e-40]])
    x = x.astype(np.float32)
    assert ulps(numerics.exp(x), np.exp(x.astype(np.float64))) < 1.1


def test_log_is_accurate():
    rng = np.random.default_rng(0)
    x = np.concatenate([np.exp(rng.uniform(-87, 88, 200_000)), rng.uniform(0.5, 2, 200_000)]).astype(np.float32)
    x = x[x != 1]
    assert ulps(numerics.log(x), np.log(x.astype(np.float64))) < 1.1


def test_log_of_one_minus_x_is_accurate():
    rng = np.random.default_rng(0)
    x = np.concatenate([np.exp(rng.uniform(-23, 0, 200_000)), rng.uniform(0, 1, 200_000)]).astype(np.float32)
    x = x[(x > 0) & (x < 1)]
    assert ulps(numerics.log1m(x), np.log1p(-x.astype(np.float64))) < 2.5


def test_odd_values():
    inf, nan = np.inf, np.nan
    x = np.array([-inf, inf, nan, -200, -87.4, 88.8, 0, -0.0], np.float32)
    np.testing.assert_array_equal(numerics.exp(x), np.array([0, inf, nan, 0, 0, inf, 1, 1], np.float32))
    x = np.array([0, -0.0, 1e-40, -1, inf, nan, 1, -inf], np.float32)
    np.testing.assert_array_equal(numerics.log(x), np.array([-inf, -inf, -inf, nan, inf, nan, 0, nan], np.float32))


def test_keys_order_as_floats_do():
    x = np.array([-np.inf, -3e38, -1.5, -1e-38, -0.0, 0.0, 1e-38, 2.5, np.inf], np.float32)
    keys = np.asarray(numerics.key_bits(x))
    assert (np.diff(keys.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("size", [0, 1, 3, 16, 17, 576, 4097, 49152])
def test_ordered_sum_is_the_documented_order(size):
    x = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    want = []
    for row in x:
        padded = np.zeros(1 << max(size - 1, 0).bit_length(), np.float32)
        padded[:size] = row
        while len(padded) > 1:
            pieces = padded.reshape(min(16, len(padded)), -1)
            padded = pieces[0].copy()
            for piece in pieces[1:]:
                padded += piece
        want.append(padded[0])
    assert same_bits(jax.jit(numerics.ordered_sum)(x), np.array(want, np.float32))
    assert same_bits(jax.jit(lambda x: numerics.ordered_sum(x, axis=0))(x.T.copy()), np.array(want, np.float32))


def norm_like(a, b):
    """Products, sums and functions mixed as a model mixes them."""
    x = numerics.product(a, b)
    total = numerics.ordered_sum(numerics.product(x, x))
    weights = numerics.exp(numerics.product(x, np.float32(0.3)))
    return jnp.stack([total, numerics.ordered_sum(weights), numerics.ordered_sum(numerics.log(weights))], -1)


@pytest.mark.parametrize("size", [5, 576])
def test_same_bits_in_any_program(size):
    rng = np.random.default_rng(size)
    a, b = rng.normal(size=(2, 7, size)).astype(np.float32)
    want = np.stack([np.asarray(norm_like(a[i], b[i])) for i in range(7)])  # op by op

    def loop(a, b):
        out = jnp.zeros((7, 3), jnp.float32)
        return lax.fori_loop(0, 7, lambda i, out: out.at[i].set(norm_like(a[i], b[i])), out)

    def scanned(a, b):
        return lax.scan(lambda carry, x: (carry + 1, norm_like(*x)), 0, (a, b))[1]

    def surrounded(a, b):
        scaled = norm_like(a * 2, b * 0.5)  # exact factors, fused with what follows
        return scaled - lax.stop_gradient(scaled) * 0.25 + scaled * 0.25 + (a.sum() * 0)

    for program in (norm_like, jax.vmap(norm_like), loop, scanned, surrounded):
        assert same_bits(jax.jit(program)(a, b), want), program
    for rows in (1, 2, 3):
        assert same_bits(jax.jit(norm_like)(a[:rows], b[:rows]), want[:rows])


@pytest.mark.parametrize("function", [numerics.exp, numerics.log, numerics.log1m])
def test_functions_of_fused_operands(function):
    rng = np.random.default_rng(1)
    a, b = rng.uniform(0.1, 0.9, size=(2, 1001)).astype(np.float32)
    for operand in (lambda a, b: a * b, lambda a, b: a + b * 0.1, lambda a, b: a / b * 0.1, lambda a, b: a - b):
        x = jax.jit(operand)(a, b)  # rounded once, in memory
        assert same_bits(jax.jit(lambda a, b, o=operand: function(o(a, b)))(a, b), jax.jit(function)(x))
        assert same_bits(jax.jit(lambda a, b, o=operand: function(o(a, b)))(a[:9], b[:9]), jax.jit(function)(x)[:9])
