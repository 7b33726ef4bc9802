"""The sampling kernel gives the same bits alone, in any batch, in any program and at any time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.kernels import native
from umbra.kernels.sample import Choice, RowParams, choose, choose_rows
from umbra.kernels.sample.reference import _noisy_scores

alone = jax.jit(choose)


def random_masks(rng, rows, vocab):
    """Words with all, no, some and few bits set."""
    words = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)
    kind = rng.integers(0, 4, words.shape)
    few = np.uint32(1) << (words % np.uint32(32))
    choices = [np.full_like(words, 0xFFFFFFFF), np.zeros_like(words), words]
    return np.select([kind == 0, kind == 1, kind == 2], choices, few)


def batch(rows, vocab, seed):
    """Random logits and a random mix of options, stacked over rows; each of a slot of its own."""
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
        slot=jnp.arange(rows),
        drafted=jnp.asarray(rng.integers(-1, min(vocab, 6), (rows, 4)), jnp.int32),
        bias_ids=jnp.asarray([rng.choice([[1, 3, -1], [-1, -1, -1]]) for _ in range(rows)], jnp.int32),
        bias_values=jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32),
        n_logprobs=jnp.asarray(rng.choice([-1, 0, 4], rows), jnp.int32),
        mask=jnp.where(rng.random(rows) < 0.5, jnp.arange(rows), -1),
        masks=jnp.asarray(random_masks(rng, rows, vocab)),
    )
    return jnp.asarray(rng.normal(size=(rows, vocab)) * 4, jnp.float32), params


def take(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def loop(logits, params, backend="xla"):
    return choose_rows(logits, params, jnp.ones(len(logits), bool), backend=backend)


def assert_same_bits(a, b):
    for name, x, y in zip(Choice._fields, a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32), err_msg=name)


@pytest.mark.parametrize(("rows", "vocab"), [(12, 37), (4, 49152)])
def test_same_bits_in_any_program(rows, vocab):
    logits, params = batch(rows, vocab, vocab)
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


# --- the native backend against the reference alone ---

every_instruction_set = pytest.mark.parametrize(
    "cpu_backend", ["cpu-portable", "cpu-avx2", "cpu-avx512", "cpu-amx"], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def run(cpu_backend):
    return jax.jit(lambda logits, params, active: choose_rows(logits, params, active, backend=cpu_backend))


def odd_batch(rows, vocab, seed):
    """Rows and options of every kind, extreme ones included."""
    rng = np.random.default_rng(seed)
    _, params = batch(rows, vocab, seed)
    pick = lambda *values: jnp.asarray(rng.choice(np.array(values, np.float32), rows))  # noqa: E731
    params = params._replace(
        temperature=pick(0, 0.7, 1, 1, 1.3, 100, 1e-30, 1e-40, np.inf, np.nan, -1),
        top_k=jnp.asarray(rng.choice([0, 0, 0, 1, 5, 40, vocab - 1, vocab, 2**31 - 1, -1], rows), jnp.int32),
        top_p=pick(1, 1, 1, 0.999, 0.95, 0.5, 1e-6, 0, -1, np.nan),
        min_p=pick(0, 0, 0, 0.05, 1, 2, 1e-3, 1e-40, np.nan),
        repetition=pick(1, 1, 1.1, 0.9, 1e-30),
        presence=pick(0, 0, 0.3, -2, np.inf),
        frequency=pick(0, 0, 0.7, -0.1, 1e30),
    )
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0, 1e-38, 0.1, 1, 4, 20, 1e30], (rows, 1))
    logits = np.where(rng.random((rows, 1)) < 0.2, np.round(logits), logits).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf, 1e-40, -0.0, 3.4e38, -3.4e38):
        share = rng.choice([0.01, 0.5, 1], (rows, 1))
        here = (rng.random((rows, 1)) < 0.15) & (rng.random((rows, vocab)) < share)
        logits = np.where(here, np.float32(value), logits)
    return jnp.asarray(logits), params


def check_against_alone(run, logits, params, active):
    got = run(logits, params, active)
    assert_same_bits(run(logits, params, active), got)
    none = take(Choice.none(1), 0)
    for b in range(len(logits)):
        assert_same_bits(take(got, b), alone(logits[b], take(params, b)) if active[b] else none)


@every_instruction_set
@settings(max_examples=40, deadline=None)
@given(vocab=st.sampled_from([1, 2, 16, 61, 300, 4097]), seed=st.integers(0, 2**32 - 1))
def test_odd_rows_give_the_bits_of_the_reference(run, vocab, seed):
    logits, params = odd_batch(8, vocab, seed)
    check_against_alone(run, logits, params, np.random.default_rng(seed).random(8) < 0.9)


@every_instruction_set
@pytest.mark.parametrize("drafts", [1, 5])
def test_drafted_tokens_count_as_generated(run, drafts):
    """Rows of one slot in one pass choose as they would one pass after the other, with the counts of then."""
    vocab, rows = 61, 9
    logits, params = odd_batch(rows, vocab, drafts)
    _, all_penalised = batch(rows, vocab, 3)
    rng = np.random.default_rng(drafts)
    for base in (params, all_penalised._replace(frequency=jnp.full(rows, 0.3, jnp.float32))):
        slots = np.array([0, 0, 0, 3, 3, 1, 0, 2, 2])
        drafted = rng.integers(-1, 4, (rows, drafts)).astype(np.int32)  # few tokens: the same ones often
        counts = np.asarray(base.counts)[:4]
        rows_of_slots = base._replace(counts=jnp.asarray(counts), slot=jnp.asarray(slots), drafted=jnp.asarray(drafted))
        got = run(logits, rows_of_slots, jnp.ones(rows, bool))
        assert_same_bits(jax.jit(loop)(logits, rows_of_slots), got)
        then = counts[slots]
        for r, draft in np.argwhere(drafted >= 0):
            then[r, drafted[r, draft]] += 2
        one_after_the_other = base._replace(
            counts=jnp.asarray(then), slot=jnp.arange(rows), drafted=jnp.full((rows, drafts), -1, jnp.int32)
        )
        assert_same_bits(run(logits, one_after_the_other, jnp.ones(rows, bool)), got)


@every_instruction_set
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_large_vocabularies_give_the_bits_of_the_reference(run, vocab):
    logits, params = batch(6, vocab, vocab)
    check_against_alone(run, logits, params, np.ones(6, bool))


@every_instruction_set
@pytest.mark.parametrize("scale", [1e-3, 1, 3, 10])
def test_threshold_searches_give_the_bits_of_the_reference(run, scale):
    """Flat rows and peaked ones, with thresholds all over the row."""
    _, params = batch(12, 5000, 1)
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(12, 5000)) * scale, jnp.float32)
    top_p = jnp.asarray([1, 0.9999, 0.99, 0.9, 0.7, 0.5, 0.2, 0.1, 0.01, 1e-4, 0.95, 0.8], jnp.float32)
    top_k = jnp.asarray([4000, 0, 0, 0, 0, 3000, 50, 0, 0, 0, 2000, 1], jnp.int32)
    params = params._replace(temperature=jnp.full(12, 0.8, jnp.float32), top_p=top_p, top_k=top_k)
    for position in range(4):
        moved = params._replace(position=params.position + position)
        check_against_alone(run, logits, moved, np.ones(12, bool))


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_threads_do_not_matter():
    run = jax.jit(lambda logits, params: loop(logits, params, "cpu"))
    try:
        for rows in (1, 5):
            logits, params = batch(rows, 100_000, rows)
            params = params._replace(temperature=jnp.full(rows, 1.1, jnp.float32))
            results = []
            for threads in (1, 2, 3, 4):
                native.set_threads(threads)
                results.append(run(logits, params))
            for other in results[1:]:
                assert_same_bits(other, results[0])
    finally:
        native.set_threads(None)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_the_native_call_refuses_wrong_shapes():
    logits, params = batch(2, 10, 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="umbra_sample: a field does not have the shape"):
        jax.block_until_ready(loop(logits, params._replace(counts=params.counts[:, :5]), "cpu"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="umbra_sample: a field does not have the shape"):
        jax.block_until_ready(loop(logits, params._replace(drafted=params.drafted[:1]), "cpu"))
