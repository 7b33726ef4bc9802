"""The sampling kernel gives the same bits alone, in any batch, in any program and at any time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from umbra.configs.engine import MAX_TOP_LOGPROBS
from umbra.kernels.sample import Choice, RowParams, choose
from umbra.kernels.sample.reference import _noisy_scores


def batch(rows, vocab, seed):
    """Random logits and a random mix of options, stacked over rows."""
    rng = np.random.default_rng(seed)
    pick = lambda values: jnp.asarray(rng.choice(values, rows), np.float32)  # noqa: E731
    params = RowParams(
        temperature=pick([0, 0.5, 1, 1.3]),
        top_k=jnp.asarray(rng.choice([0, 5, 40], rows), jnp.int32),
        top_p=pick([1, 0.95, 0.5]),
        min_p=pick([0, 0.05]),
        repetition=pick([1, 1.1, 0.9]),
        presence=pick([0, 0.3]),
        frequency=pick([0, 0.7]),
        seed=jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
        position=jnp.asarray(rng.integers(0, 100_000, rows), jnp.int32),
        counts=jnp.asarray(rng.integers(0, 9, (rows, vocab)), jnp.int32),
        bias_ids=jnp.asarray([rng.choice([[1, 3, -1], [-1, -1, -1]]) for _ in range(rows)], jnp.int32),
        bias_values=jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32),
        n_logprobs=jnp.asarray(rng.choice([-1, 0, 4], rows), jnp.int32),
    )
    return jnp.asarray(rng.normal(size=(rows, vocab)) * 4, jnp.float32), params


def take(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def loop(logits, params):
    rows = logits.shape[0]
    top = jnp.zeros((rows, MAX_TOP_LOGPROBS))
    out = Choice(jnp.zeros(rows, jnp.int32), jnp.zeros(rows), top.astype(jnp.int32), top)
    body = lambda i, out: jax.tree.map(lambda a, b: a.at[i].set(b), out, choose(logits[i], take(params, i)))  # noqa: E731
    return lax.fori_loop(0, rows, body, out)


def assert_same_bits(a, b):
    for name, x, y in zip(Choice._fields, a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32), err_msg=name)


@pytest.mark.parametrize(("rows", "vocab"), [(12, 37), (4, 49152)])
def test_same_bits_in_any_program(rows, vocab):
    logits, params = batch(rows, vocab, vocab)
    alone = jax.jit(choose)
    want = jax.tree.map(lambda *a: jnp.stack(a), *[alone(logits[i], take(params, i)) for i in range(rows)])
    assert_same_bits(alone(logits[0], take(params, 0)), take(want, 0))  # run twice
    assert_same_bits(jax.jit(loop)(logits, params), want)
    assert_same_bits(jax.jit(jax.vmap(choose))(logits, params), want)
    head = jax.jit(lambda x, w, p: loop((x * w)[:, ::-1][:, ::-1], p))  # fused with what made the logits
    assert_same_bits(head(logits * 2, jnp.full_like(logits, 0.5), params), want)


def test_same_bits_op_by_op():
    logits, params = batch(1, 37, 5)
    one = take((logits, params), 0)
    assert_same_bits(choose(*one), jax.jit(choose)(*one))


def test_neighbours_do_not_matter():
    logits, params = batch(8, 333, 0)
    others, other_params = batch(8, 333, 1)
    others = others.at[2].set(jnp.nan).at[3].set(-jnp.inf)
    run = jax.jit(loop)
    want = run(logits, params)
    mixed = jax.tree.map(lambda a, b: a.at[5].set(b[5]), (others, other_params), (logits, params))
    assert_same_bits(take(run(*mixed), 5), take(want, 5))
    assert_same_bits(take(jax.jit(jax.vmap(choose))(*mixed), 5), take(want, 5))


def test_scores_have_the_same_bits_too():
    """Ids hide small drift: compare the noisy scores of the whole row."""
    logits, params = batch(6, 700, 3)
    params = params._replace(temperature=jnp.full(6, 0.7, jnp.float32))
    vmapped = jax.jit(jax.vmap(_noisy_scores))(logits, params)
    run = jax.jit(_noisy_scores)
    for i in range(6):
        alone = run(logits[i], take(params, i))
        np.testing.assert_array_equal(np.asarray(alone).view(np.int32), np.asarray(vmapped[i]).view(np.int32))


def test_no_sort_over_the_vocabulary():
    logits, params = batch(1, 1000, 0)
    text = jax.jit(choose).lower(logits[0], take(params, 0)).as_text()
    assert "stablehlo.sort" not in text
