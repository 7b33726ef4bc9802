"""The sampling kernel against a float64 oracle that sorts, against the exact distribution, and in odd rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from umbra.configs.engine import MAX_TOP_LOGPROBS
from umbra.kernels.sample import RowParams, accept, choice_seed, choose_rows, gumbel, seed_words, threefry2x32

INF, NAN = np.inf, np.nan
DTYPES = {"top_k": np.int32, "seed": np.uint32, "position": np.int32, "counts": np.int32, "bias_ids": np.int32}
DTYPES |= {"n_logprobs": np.int32, "slot": np.int32, "drafted": np.int32, "mask": np.int32, "masks": np.uint32}


def row_params(vocab, **values):
    defaults = dict(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0,
        seed=seed_words(7), position=5, counts=np.zeros(vocab), slot=0, drafted=[-1], bias_ids=np.full(8, -1),
        bias_values=np.zeros(8), n_logprobs=-1, mask=-1, masks=np.zeros(-(-vocab // 32)),
    )  # fmt: skip
    values = defaults | values
    return RowParams(**{name: jnp.asarray(value, DTYPES.get(name, np.float32)) for name, value in values.items()})


def bias(pairs, width=8):
    ids, amounts = np.full(width, -1), np.zeros(width)
    for i, (token, amount) in enumerate(pairs):
        ids[i], amounts[i] = token, amount
    return dict(bias_ids=ids, bias_values=amounts)


@pytest.fixture(scope="module")
def choose_many(cpu_backend):
    """`choose_rows` of every backend: logits [R, V] and rows with a leading axis, each of a slot of its own."""

    @jax.jit
    def run(logits, rows):
        rows = rows._replace(slot=jnp.arange(len(logits)))
        return choose_rows(logits, rows, jnp.ones(len(logits), bool), backend=cpu_backend)

    return run


@pytest.fixture(scope="module")
def run(choose_many):
    """The choice for one row: logits [V]."""

    def one(logits, row):
        logits, row = jax.tree.map(lambda a: jnp.asarray(a)[None], (logits, row))
        return jax.tree.map(lambda a: a[0], choose_many(logits, row))

    return one


# --- the oracle: numpy, float64, sorting ---


def threefry_oracle(key, counter):
    """Random123's threefry2x32-20 on Python integers."""
    mask = 0xFFFFFFFF
    keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA]
    x = [(counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask]
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    for r in range(20):
        x[0] = (x[0] + x[1]) & mask
        n = rotations[r % 8]
        x[1] = ((x[1] << n | x[1] >> 32 - n) & mask) ^ x[0]
        if r % 4 == 3:
            s = r // 4 + 1
            x = [(x[0] + keys[s % 3]) & mask, (x[1] + keys[(s + 1) % 3] + s) & mask]
    return x


def gumbel_oracle(seed, position, ids):
    words = np.array([threefry_oracle((int(seed[0]), position), (int(i), int(seed[1])))[0] for i in ids], np.float64)
    return -np.log(-np.log1p(-np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)))


def scores_oracle(logits, p):
    x = np.asarray(logits, np.float64)
    counts, generated = np.asarray(p.counts), np.asarray(p.counts) // 2
    repetition = float(p.repetition)
    x = np.where(counts > 0, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - float(p.frequency) * generated - float(p.presence) * (generated > 0)
    for token, amount in zip(np.asarray(p.bias_ids), np.asarray(p.bias_values), strict=True):
        if token >= 0:
            x[token] += float(amount)
    return x


def kept_oracle(x, p, slack):
    """Tokens that survive top-k, top-p and min-p; `slack` > 0 keeps fewer, < 0 more, to bracket rounding."""
    scaled = (x - x.max()) / float(p.temperature)
    weights = np.exp(scaled)
    kept = np.ones(len(x), bool)
    if 0 < int(p.top_k) < len(x):
        kth = np.sort(x)[-int(p.top_k)]
        kept &= scaled >= (kth - x.max()) / float(p.temperature) + slack
    kept[np.argmax(scaled)] = True
    if float(p.top_p) < 1:
        order = np.argsort(-scaled, kind="stable")
        order = order[kept[order]]
        mass = np.cumsum(weights[order])
        last = np.searchsorted(mass, (float(p.top_p) - slack) * mass[-1])
        last = order[min(last, len(order) - 1)]
        kept &= scaled >= scaled[last] + slack
    kept &= weights >= float(p.min_p) * (1 + slack)
    kept[np.argmax(scaled)] = True
    return kept, scaled


def check(run, logits, p):
    """The chosen token is one the oracle allows, with the largest noisy score up to rounding."""
    choice = run(jnp.asarray(logits, jnp.float32), p)
    token = int(choice.token)
    x = scores_oracle(logits, p)
    if float(p.temperature) == 0:
        assert x[token] >= x.max() - 1e-4
        return token
    slack = 2e-5 * max(1.0, 1 / float(p.temperature))
    must, scaled = kept_oracle(x, p, slack)
    may, _ = kept_oracle(x, p, -slack)
    assert may[token], (token, scaled[token], np.flatnonzero(may))
    noisy = scaled + gumbel_oracle(np.asarray(p.seed), int(p.position), range(len(x)))
    assert noisy[token] >= noisy[must].max() - 10 * slack
    return token


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_option_against_the_oracle(run, data):
    vocab = 61
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    draw = lambda values: data.draw(st.sampled_from(values))  # noqa: E731
    logits = (rng.normal(size=vocab) * draw([0.1, 1, 5])).astype(np.float32)
    if draw([False, True]):
        logits = np.round(logits)  # ties
    if draw([False, True]):
        logits[rng.random(vocab) < 0.3] = -INF
        logits[3] = 0
    p = row_params(
        vocab,
        temperature=draw([0, 0.3, 1, 2.5]),
        top_k=draw([0, 1, 2, 7, 60, 61, 1000]),
        top_p=draw([1.0, 0.99, 0.7, 0.2, 1e-6]),
        min_p=draw([0.0, 0.02, 0.5, 1.0]),
        repetition=draw([1.0, 1.3, 0.7]),
        presence=draw([0.0, 0.6, -1.1]),
        frequency=draw([0.0, 0.4, -0.3]),
        seed=seed_words(data.draw(st.integers(-(2**63), 2**64 - 1))),
        position=data.draw(st.integers(0, 2**31 - 1)),
        counts=rng.choice([0, 0, 1, 2, 3, 6, 11], vocab),
        **bias(draw([[], [(5, 3.0)], [(0, -100.0), (9, 100.0), (60, 1.5)]])),
    )
    check(run, logits, p)


@pytest.mark.parametrize("vocab", [1, 2, 3, 512, 49152, 151936, 262144])
def test_vocabulary_sizes(run, vocab):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=vocab) * 3).astype(np.float32)
    assert int(run(logits, row_params(vocab)).token) == logits.argmax()
    noise = np.asarray(gumbel(jnp.asarray(seed_words(vocab << 20)), jnp.int32(5), vocab), np.float64)
    for options in (dict(), dict(top_k=40), dict(top_p=0.9), dict(min_p=0.1), dict(top_k=100, top_p=0.8, min_p=0.01)):
        p = row_params(vocab, temperature=0.8, seed=seed_words(vocab << 20), n_logprobs=3, **options)
        choice = run(logits, p)
        token = int(choice.token)
        x = logits.astype(np.float64)
        may, scaled = kept_oracle(x, p, -1e-5)
        assert may[token]
        must, _ = kept_oracle(x, p, 1e-5)
        assert scaled[token] + noise[token] >= (scaled + noise)[must].max() - 1e-4
        normal = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert float(choice.logprob) == pytest.approx(normal[token], abs=2e-5)
        order = np.argsort(-logits, kind="stable")[:MAX_TOP_LOGPROBS]
        assert np.asarray(choice.top_ids)[: len(order)].tolist() == order.tolist()
        np.testing.assert_allclose(choice.top_logprobs[: len(order)], normal[order], atol=2e-5)
        assert (np.asarray(choice.top_ids)[len(order) :] == -1).all()


# --- noise ---


def test_threefry_known_answers():
    """Vectors of Random123's `kat_vectors` file: threefry2x32, 20 rounds."""
    full = 0xFFFFFFFF
    vectors = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((full, full), (full, full), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, want in vectors:
        words = [jnp.uint32(word) for word in (*key, *counter)]
        assert tuple(int(word) for word in threefry2x32(tuple(words[:2]), tuple(words[2:]))) == want
        assert tuple(threefry_oracle(key, counter)) == want


def test_threefry_is_that_of_jax():
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counter = rng.integers(0, 2**32, (2, 1000), dtype=np.uint32)
    want = threefry_2x32(jnp.asarray(key), jnp.asarray(counter.reshape(-1)))
    got = jnp.concatenate(threefry2x32((key[0], key[1]), (counter[0], counter[1])))
    np.testing.assert_array_equal(got, want)


def test_noise_is_gumbel_distributed():
    noise = np.sort(np.asarray(gumbel(jnp.asarray(seed_words(11)), jnp.int32(3), 200_000), np.float64))
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(200_000) + 0.5) / 200_000).max()
    assert distance < 1.63 / np.sqrt(200_000)  # Kolmogorov-Smirnov, 1 %
    assert np.isfinite(noise).all()


def test_noise_depends_on_every_word():
    base = np.asarray(gumbel(jnp.asarray(seed_words(1)), jnp.int32(3), 64))
    for seed, position in ((2, 3), (1 + (1 << 32), 3), (1, 4), (-1, 3)):
        other = np.asarray(gumbel(jnp.asarray(seed_words(seed)), jnp.int32(position), 64))
        assert (base != other).mean() > 0.9
    # A longer vocabulary changes nothing for the ids of the shorter one.
    np.testing.assert_array_equal(gumbel(jnp.asarray(seed_words(1)), jnp.int32(3), 1000)[:64], base)


def test_seeds():
    assert seed_words(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert seed_words(1 << 32 | 5).tolist() == [5, 1]
    assert choice_seed(9, 0) == 9
    low, high = threefry_oracle((9, 1), (3, 0xFFFFFFFF))
    assert choice_seed(9 | 1 << 32, 3) == low | high << 32
    assert len({choice_seed(9, i) for i in range(100)}) == 100


# --- distribution ---


def sampled(choose_many, logits, n, **options):
    """How often each token is chosen over n different (seed, position) pairs."""
    one = row_params(len(logits), temperature=1.0, **options)
    logits, p = jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), (logits, one))
    seeds = np.stack([np.arange(n) % 97, np.arange(n) // 97], 1).astype(np.uint32)
    positions = np.arange(n, dtype=np.int32) * 7
    choices = choose_many(logits, p._replace(seed=jnp.asarray(seeds), position=jnp.asarray(positions)))
    return np.bincount(np.asarray(choices.token), minlength=logits.shape[1])


def chi_square(counts, probabilities):
    support = probabilities > 0
    assert counts[~support].sum() == 0
    expected = probabilities[support] * counts.sum()
    return ((counts[support] - expected) ** 2 / expected).sum(), support.sum() - 1


DISTRIBUTION = np.array([0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.03, 0.02])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(), 8),
        (dict(top_k=2), 2),
        (dict(top_k=3), 4),  # a tie at the threshold stays
        (dict(top_p=0.49), 2),
        (dict(top_p=0.51), 4),
        (dict(top_p=0.93), 6),
        (dict(min_p=0.2), 5),
        (dict(top_k=2, top_p=0.5), 1),  # 0.3 of 0.5 is enough after renormalisation
        (dict(top_k=5, top_p=0.95, min_p=0.4), 4),
    ],
)
def test_distribution_and_support(choose_many, options, kept):
    p = np.where(np.arange(8) < kept, DISTRIBUTION, 0)
    logits = jnp.asarray(np.log(DISTRIBUTION), jnp.float32).at[3].set(jnp.float32(np.log(0.15)))
    statistic, freedom = chi_square(sampled(choose_many, logits, 20_000, **options), p / p.sum())
    assert statistic < freedom + 4 * np.sqrt(2 * max(freedom, 1)) + 4


def test_temperature_in_the_distribution(choose_many):
    weights = DISTRIBUTION**2
    counts = sampled(choose_many, jnp.asarray(np.log(DISTRIBUTION) * 2, jnp.float32), 20_000)
    statistic, freedom = chi_square(counts, weights / weights.sum())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


# --- penalties and bias ---


def test_penalties_by_hand(run):
    logits = np.array([2.0, -1.0, 1.9, 0.5], np.float32)
    greedy = lambda **options: int(run(logits, row_params(4, **options)).token)  # noqa: E731
    assert greedy() == 0
    assert greedy(repetition=1.1, counts=[1, 0, 0, 0]) == 2  # the prompt counts
    assert greedy(presence=1.0, counts=[1, 0, 0, 0]) == 0  # here it does not
    assert greedy(presence=1.0, counts=[2, 0, 0, 0]) == 2
    assert greedy(frequency=0.06, counts=[2, 0, 0, 0]) == 0
    assert greedy(frequency=0.06, counts=[5, 0, 0, 0]) == 2
    assert greedy(frequency=0.06, presence=2.0, counts=[4, 0, 2, 0]) == 3
    assert greedy(**bias([(1, 3.2)])) == 1
    assert greedy(**bias([(0, -100), (2, -100)])) == 3
    assert greedy(**bias([(0, -INF), (2, -INF), (3, -INF)])) == 1


def test_unused_options_change_no_bit(run):
    """Neutral values and absent history leave the logits alone, so the noisy choice is the plain one's."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 33)).astype(np.float32)
    for i, x in enumerate(logits):
        plain = int(run(x, row_params(33, temperature=1, position=i)).token)
        counted = row_params(33, temperature=1, position=i, counts=rng.integers(0, 9, 33))
        assert int(run(x, counted).token) == plain
        assert int(run(x, row_params(33, temperature=1, position=i, repetition=1.5, presence=1)).token) == plain


# --- odd rows ---


@pytest.mark.parametrize("temperature", [0, 1, 1e-30, 100])
@pytest.mark.parametrize("options", [dict(), dict(top_k=2), dict(top_p=0.5), dict(top_k=3, top_p=0.9, min_p=0.1)])
def test_odd_logits_give_a_token_in_range(run, temperature, options):
    rows = {
        "all NaN": ([NAN] * 6, range(6)),
        "all -inf": ([-INF] * 6, range(6)),
        "some NaN": ([NAN, 1, NAN, 1, -INF, NAN], (1, 3)),
        "one": ([-INF, -INF, 0, -INF, -INF, -INF], (2,)),
        "+inf": ([0, INF, 3, INF, -INF, NAN], (1, 3)),
        "all +inf": ([INF] * 6, range(6)),
        "huge": ([3e38, -3e38, 3e38, -3e38, -INF, -3e38], (0, 2)),
        "denormal": ([1e-40, -1e-40, 0, -0.0, -INF, -INF], range(4)),
    }
    for name, (logits, allowed) in rows.items():
        p = row_params(6, temperature=temperature, n_logprobs=5, repetition=1.2, counts=[1, 2, 3, 0, 0, 1], **options)
        choice = run(np.array(logits, np.float32), p)
        if temperature == 100 and name == "huge":
            assert 0 <= int(choice.token) < 6
        else:
            assert int(choice.token) in allowed, name
        assert not np.isnan(choice.logprob), name
        assert not np.isnan(choice.top_logprobs).any(), name
        assert ((np.asarray(choice.top_ids) >= -1) & (np.asarray(choice.top_ids) < 6)).all()


def test_greedy_takes_the_lowest_id_on_ties(run):
    assert int(run(np.array([1, 5, 5, 2, 5], np.float32), row_params(5)).token) == 1
    assert int(run(np.array([-0.0, 0.0], np.float32), row_params(2)).token) == 0


def test_logprobs_only_when_asked_for(run):
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    normal = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    none = run(logits, row_params(3))
    assert (float(none.logprob), none.top_ids[0], none.top_logprobs[0]) == (0, -1, 0)
    chosen = run(logits, row_params(3, n_logprobs=0, temperature=1, repetition=2, counts=[1, 1, 1]))
    assert float(chosen.logprob) == pytest.approx(normal[int(chosen.token)], abs=1e-6)  # of the raw logits
    assert chosen.top_ids[0] == -1
    top = run(logits, row_params(3, n_logprobs=2))
    assert np.asarray(top.top_ids)[:4].tolist() == [1, 2, 0, -1]
    np.testing.assert_allclose(top.top_logprobs[:3], normal[[1, 2, 0]], atol=1e-6)


# --- drafts ---


def test_accept_by_hand():
    drafted = np.array([[1, 2, 3], [1, 2, 3], [5, 2, 3], [1, 2, 3], [1, 5, 3], [1, 2, 3]])
    chosen = np.array([[1, 2, 3, 4]] * 6)
    n_drafted = np.array([3, 1, 3, 99, 3, 0])
    assert accept(drafted, n_drafted, chosen).tolist() == [3, 1, 0, 3, 1, 0]
    assert accept(drafted[:0], n_drafted[:0], chosen[:0]).shape == (0,)
    assert accept(np.zeros((2, 0), int), np.array([0, 4]), np.array([[7], [8]])).tolist() == [0, 0]  # W = 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6), st.integers(-2, 8))
def test_accepted_drafts_are_the_longest_agreeing_start(pairs, n):
    drafted, chosen = (np.array([[pair[i] for pair in pairs]], np.int32) for i in (0, 1))
    got = int(accept(drafted, np.array([n], np.int32), np.pad(chosen, ((0, 0), (0, 1))))[0])
    want = 0
    while want < min(n, len(pairs)) and pairs[want][0] == pairs[want][1]:
        want += 1
    assert got == want
