"""The drafting kernel against a slow oracle, in odd places, and beside other slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.kernels import native
from umbra.kernels.draft import (
    AGREES,
    CERTAIN,
    DIFFERS,
    FEATURES,
    LONGEST_MATCH,
    LOOKUP,
    MAX_DRAFTS,
    SHADOW,
    SHADOW_PLACES,
    SHORTEST_MATCH,
    UNKNOWN,
    DraftInput,
    Drafts,
    DraftWeights,
    draft,
)
from umbra.kernels.draft.defaults import lookup_only as without_shadow
from umbra.kernels.sample import RowParams, choose_rows, gumbel

V, D, S = 300, 36, 64
BOTH = LOOKUP | SHADOW

noise_of = jax.jit(gumbel, static_argnums=2)


def draft_weights(seed=0, *, rank=20, mlp=12, head=130, classes=3, offset=3.0):
    """Random weights; `offset` makes guesses more or less probable."""
    rng = np.random.default_rng(seed)

    def floats(*shape, scale=0.3):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    def bytes_(*shape):
        return jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)

    gate = np.stack([rng.uniform(0.2, 0.6, (classes, SHADOW_PLACES)), rng.normal(offset, 1, (classes, SHADOW_PLACES))])
    return DraftWeights(
        read=bytes_(V, rank),
        read_scale=jnp.asarray(rng.uniform(0.005, 0.01, V), jnp.float32),
        context=floats(D, rank),
        epsilon=jnp.float32(1e-5),
        recur=floats(rank, 2 * rank),
        gate_u=floats(rank),
        gate_z=floats(rank),
        bias_g=floats(rank),
        bias_c=floats(rank),
        start=floats(rank),
        step=floats(SHADOW_PLACES, rank),
        markov=floats(rank, rank),
        up=floats(rank, mlp),
        down=floats(mlp, rank),
        head=bytes_(head, rank),
        head_scale=jnp.asarray(rng.uniform(0.01, 0.02, head), jnp.float32),
        vocab=jnp.asarray(rng.permutation(V)[:head], jnp.int32),
        conf=floats(2 * rank + FEATURES),
        conf_bias=floats(SHADOW_PLACES),
        gate=jnp.asarray(np.moveaxis(gate, 0, -1), jnp.float32),
        gate_temperatures=jnp.asarray([0.0, 0.5, 1.0][:classes], jnp.float32),
        lookup=jnp.asarray(rng.uniform(0.4, 0.99, (classes, LONGEST_MATCH + 1, 3, MAX_DRAFTS)), jnp.float32),
    )


def draft_input(seed=0, slots=6, *, alphabet=4, **changes):
    """Slots in the middle of random texts of few words, which repeat themselves often."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, alphabet, (slots, S))
    position = rng.integers(S // 2, S, slots)
    fields = dict(
        hidden=rng.normal(size=(slots, D)),
        token=history[np.arange(slots), position],
        position=position,
        history=history,
        active=np.ones(slots),
        sources=np.full(slots, BOTH),
        temperature=np.zeros(slots),
        seed=rng.integers(0, 2**32, (slots, 2)),
        room=np.full(slots, MAX_DRAFTS),
        predicted=np.zeros(slots),
        floor=0.0,
    )
    types = dict(hidden=np.float32, active=np.bool_, temperature=np.float32, seed=np.uint32, floor=np.float32)
    fields |= changes
    return DraftInput(**{name: jnp.asarray(np.asarray(x), types.get(name, np.int32)) for name, x in fields.items()})


@pytest.fixture(scope="module")
def run(cpu_backend):
    program = jax.jit(lambda weights, inputs: draft(weights, inputs, backend=cpu_backend))

    def all_slots(weights, inputs):
        """Filled up to nine slots, so that most tests share a program."""
        slots = len(inputs.token)
        fields = [np.concatenate([x, np.zeros((9 - slots, *x.shape[1:]), x.dtype)]) for x in inputs[:-1]]
        drafts = program(weights, DraftInput(*fields, inputs.floor))
        return jax.tree.map(lambda x: np.asarray(x)[:slots], drafts)

    return all_slots


def chain(drafts, slot):
    """Tokens and sources of a slot; everything behind its chain must be empty."""
    n = drafts.length[slot]
    assert (drafts.tokens[slot, n:] == -1).all()
    assert (drafts.source[slot, n:] == 0).all()
    assert (drafts.probability[slot, n:] == 0).all()
    return drafts.tokens[slot, :n].tolist(), drafts.source[slot, :n].tolist()


def assert_same_bits(a, b):
    for name, x, y in zip(Drafts._fields, a, b, strict=True):
        np.testing.assert_array_equal(x.view(np.int32), y.view(np.int32), err_msg=name)


# --- the oracle: numpy, float64, one slot ---


class Draft(NamedTuple):
    token: int
    source: int
    probability: float
    margin: float
    """How far the nearest decision was from going the other way."""


def match_oracle(text, history):
    """Length of the longest earlier occurrence of the end of `text` in its first `history` tokens, the latest of these,
    and what followed it."""
    last, best, at = len(text) - 1, 0, 0
    for end in range(min(last, history)):
        n = 0
        while n < LONGEST_MATCH and n <= end and text[end - n] == text[last - n]:
            n += 1
        if n >= max(best, SHORTEST_MATCH):
            best, at = n, end + 1
    return best, at


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class ShadowOracle:
    def __init__(self, weights, hidden):
        self.w = DraftWeights(*(np.asarray(x, np.float64) for x in weights))
        self.z = self.rms(np.asarray(hidden, np.float64)) @ self.w.context
        self.s = self.w.start

    def rms(self, x):
        return x / np.sqrt((x**2).mean() + self.w.epsilon)

    def read(self, token, place):
        """The state sees `token`, the one before `place`."""
        w, r = self.w, len(self.w.start)
        self.u = u = w.read[token] * w.read_scale[token] + w.step[place]
        both = self.s @ w.recur
        gate = sigmoid(both[:r] + w.gate_u * u + w.gate_z * self.z + w.bias_g)
        self.s = gate * self.s + (1 - gate) * np.tanh(both[r:] + u + self.z + w.bias_c)

    def logits(self):
        w, x = self.w, self.rms(self.s) @ self.w.up
        self.o = self.s + self.u @ w.markov + (x * sigmoid(x)) @ w.down
        return w.head @ self.o * w.head_scale

    def guess(self, place, kind, temperature, noise):
        """Token, probability and how much larger its score is than the second one."""
        w, x = self.w, self.logits()
        if temperature:
            x = x / temperature + noise[w.vocab.astype(int)]
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        second, first = np.log(np.sort(p)[-2:])
        features = [first, first - second, -(p * np.log(p)).sum()]
        confidence = np.concatenate([self.o, self.u, features]) @ w.conf + w.conf_bias[place]
        slope, offset = w.gate[kind, place]
        return int(w.vocab[x.argmax()]), sigmoid(slope * confidence + offset), first - second


def draft_oracle(weights, inputs, slot):
    """The drafts of a slot, one after the other."""
    of_slot = [np.asarray(x)[slot] for x in inputs[:-1]]
    hidden, token, position, history, active, sources, temperature, seed, room, _ = of_slot  # nothing is predicted
    of_classes = np.asarray(weights.gate_temperatures)
    kind = int(np.abs(of_classes[1:] - temperature).argmin()) + 1 if temperature and len(of_classes) > 1 else 0
    shadow = ShadowOracle(weights, hidden)
    text = history[: position + 1].tolist()
    follows, product, drafts = False, 1.0, []
    for place in range(min(room, MAX_DRAFTS) if active else 0):
        if sources & LOOKUP and not follows:
            length, at = match_oracle(text, position + 1)
            follows, found = length > 0, place
        copied = text[at + place - found] if follows else -1
        table = np.asarray(weights.lookup, np.float64)[kind, length, :, place - found] if follows else None
        if place < SHADOW_PLACES:
            shadow.read(drafts[-1].token if drafts else token, place)
        proposals = []
        if follows and table[UNKNOWN] >= CERTAIN:
            proposals = [Draft(copied, LOOKUP, table[UNKNOWN], 1)]
        elif sources & SHADOW and place < SHADOW_PLACES:
            noise = np.asarray(noise_of(seed, np.int32(position + 1 + place), V), np.float64)
            guess, p, margin = shadow.guess(place, kind, temperature, noise)
            if follows:
                expected = table[AGREES if guess == copied else DIFFERS]
                proposals = [Draft(copied, LOOKUP, expected, min(margin, abs(p - expected)))]
                margin = min(margin, abs(p - expected))
            proposals.append(Draft(guess, SHADOW, p, margin))
        elif follows:
            proposals = [Draft(copied, LOOKUP, table[UNKNOWN], 1)]
        if not proposals:
            break
        taken = max(proposals, key=lambda d: d.probability)
        product *= taken.probability
        if product < inputs.floor:
            break
        drafts.append(taken._replace(margin=min(taken.margin, abs(product - float(inputs.floor)))))
        text.append(taken.token)
        follows = follows and taken.token == copied
    return drafts


def check_against_oracle(run, weights, inputs):
    """Up to the first decision that rounding may turn; how many drafts were compared."""
    got, compared = run(weights, inputs), 0
    for slot in range(len(inputs.token)):
        tokens, sources = chain(got, slot)
        want = draft_oracle(weights, inputs, slot)
        unsure = next((i for i, d in enumerate(want) if d.margin < 1e-3), None)
        if unsure is None:
            assert len(tokens) == len(want)
        want = want[:unsure]
        assert tokens[: len(want)] == [d.token for d in want]
        assert sources[: len(want)] == [d.source for d in want]
        np.testing.assert_allclose(got.probability[slot, : len(want)], [d.probability for d in want], atol=1e-3)
        compared += len(want)
    return compared


@pytest.mark.parametrize("sources", [LOOKUP, SHADOW, BOTH])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_drafts_are_those_of_the_oracle(run, sources, temperature):
    for seed in range(4):
        n = 6
        inputs = draft_input(seed, n, sources=np.full(n, sources), temperature=np.full(n, temperature), floor=0.02)
        assert check_against_oracle(run, draft_weights(seed), inputs) > n


@pytest.mark.parametrize(
    "sizes",
    [dict(rank=7, mlp=3, head=2), dict(rank=48, mlp=40, head=300), dict(rank=33, classes=1), dict(rank=16, classes=2)],
)
def test_sizes_of_shadows(run, sizes):
    inputs = draft_input(1, 5, temperature=[0, 0.3, 0, 0.9, 5.0], sources=[SHADOW, BOTH, BOTH, SHADOW, SHADOW])
    assert check_against_oracle(run, draft_weights(2, **sizes), inputs) > 5


def test_a_head_of_many_rows(run):
    """More than one chunk of them, and none of a round number."""
    weights = draft_weights(3, head=300)
    times = 5
    head = np.concatenate([np.asarray(weights.head)] * times)[: 300 * times - 77]
    scale = np.random.default_rng(0).uniform(0.01, 0.02, len(head))
    vocab = np.tile(np.asarray(weights.vocab), times)[: len(head)]
    weights = weights._replace(
        head=jnp.asarray(head), head_scale=jnp.asarray(scale, jnp.float32), vocab=jnp.asarray(vocab)
    )
    inputs = draft_input(3, 7, sources=np.full(7, SHADOW), temperature=[0, 0, 0, 0, 0, 1, 1])
    assert check_against_oracle(run, weights, inputs) > 20


def test_equal_scores_give_the_lowest_index(run):
    weights = draft_weights(4, head=300)
    same = jnp.broadcast_to(weights.head[:1], weights.head.shape), jnp.full_like(weights.head_scale, 0.01)
    weights = weights._replace(head=same[0], head_scale=same[1])
    got = run(weights, draft_input(4, 3, sources=np.full(3, SHADOW)))
    assert (got.tokens[:, 0] == int(weights.vocab[0])).all()


# --- the lookup ---


def test_without_a_shadow(run):
    """Its weights are hardly there, and nothing of them is used."""
    inputs = draft_input(19, 4, alphabet=2, sources=np.full(4, LOOKUP), temperature=[0, 0, 1, 1])
    inputs = inputs._replace(hidden=jnp.full_like(inputs.hidden, jnp.nan))
    weights = without_shadow(D)
    got = run(weights, inputs)
    assert got.length.tolist() == [MAX_DRAFTS] * 4
    assert_same_bits(run(draft_weights()._replace(lookup=np.repeat(weights.lookup, 3, axis=0)), inputs), got)


def lookup_only(**changes):
    """Weights whose probabilities tell the length of the match: length / 20."""
    lengths = np.arange(LONGEST_MATCH + 1) / 20
    table = np.broadcast_to(lengths[None, :, None, None], (3, LONGEST_MATCH + 1, 3, MAX_DRAFTS))
    return draft_weights()._replace(lookup=jnp.asarray(table, jnp.float32))


def test_what_is_predicted_is_copied_until_it_ends(run):
    """Slots whose text says nothing twice: [0, position] counts up from 1000."""
    slots, position = 6, S // 3
    history = np.tile(1000 + np.arange(S), (slots, 1))
    expected = [7, 1000 + position - 1, 1000 + position, 1, 2, 3]
    history[:, S - 6 :] = expected
    history[2, position - 5 : position - 1] = history[2, position - 1] = 8  # a text that repeats itself...
    history[2, position] = 8
    history[3, 10:14] = [1000 + position - 2, 1000 + position - 1, 1000 + position, 50]  # ... one with a longer match
    history[4, 10:13] = [1000 + position - 1, 1000 + position, 60]  # ... and one with a match as long
    positions = np.full(slots, position)
    positions[5] = S - 6 - MAX_DRAFTS  # so near that drafts could run into it
    history[5, S - 5 : S - 3] = history[5, positions[5] - 1 : positions[5] + 1]
    inputs = draft_input(
        0, slots, history=history, position=positions, token=history[range(slots), positions],
        sources=np.full(slots, LOOKUP), predicted=[6, 3, 6, 6, 6, 6],
    )  # fmt: skip
    got = run(lookup_only(), inputs)
    assert chain(got, 0) == ([1, 2, 3], [LOOKUP] * 3)
    assert chain(got, 1)[0] == [], "what is predicted begins behind the match"
    assert chain(got, 2)[0][:2] == [8, 8]
    assert chain(got, 3)[0][0] == 50
    assert chain(got, 4)[0] == [1, 2, 3]
    assert chain(got, 5)[0] == []


@settings(max_examples=60, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 4))
def test_the_longest_and_latest_match_is_copied(run, data, alphabet):
    slots = 3
    text = data.draw(st.lists(st.lists(st.integers(0, alphabet - 1), min_size=S, max_size=S), min_size=3, max_size=3))
    position = np.array(data.draw(st.lists(st.integers(0, S - 1), min_size=slots, max_size=slots)))
    history = np.array(text)
    inputs = draft_input(
        0, slots, history=history, position=position, token=history[range(slots), position],
        sources=np.full(slots, LOOKUP),
    )  # fmt: skip
    got = run(lookup_only(), inputs)
    for slot in range(slots):
        known = text[slot][: position[slot] + 1]
        length, at = match_oracle(known, len(known))
        tokens, sources = chain(got, slot)
        if not length:
            assert tokens == []
            continue
        for place in range(MAX_DRAFTS):
            known.append(known[at + place])
        assert tokens == known[-MAX_DRAFTS:]
        assert sources == [LOOKUP] * MAX_DRAFTS
        np.testing.assert_allclose(got.probability[slot], length / 20, rtol=1e-6)


def test_a_long_history(run):
    """The match is far away, or among many shorter ones."""
    size = 5000
    rng = np.random.default_rng(0)
    history = rng.integers(100, 200, (3, size))
    history[0, 10:16] = history[0, -6:] = [1, 2, 3, 4, 5, 6]
    history[0, 16] = 77
    history[1] = 7
    history[1, ::5] = 8
    history[2] = np.arange(size) % 290
    history[2, 1000] = 295
    inputs = draft_input(
        0, 3, history=history, position=np.full(3, size - 1), token=history[:, -1], sources=np.full(3, LOOKUP)
    )
    got = run(lookup_only(), inputs)
    assert got.tokens[0, 0] == 77 and got.probability[0, 0] == np.float32(6 / 20)
    for slot in (1, 2):
        period = (5, 290)[slot - 1]
        assert got.tokens[slot].tolist() == [history[slot, size - period + i] if i < period else 8 if i % 5 == 0 else 7
                                             for i in range(MAX_DRAFTS)]  # fmt: skip
        assert got.probability[slot, 0] == np.float32(LONGEST_MATCH / 20)


def test_repeated_text_goes_on_behind_its_end(run):
    history = np.tile([5, 6, 7], S)[None, :S]
    got = run(lookup_only(), draft_input(0, 1, history=history, position=[7], token=[6], sources=[LOOKUP]))
    assert chain(got, 0)[0] == [7, 5, 6] * 5
    assert got.probability[0, 0] == np.float32(5 / 20)


# --- both together ---


def test_the_shadow_extends_a_copy(run):
    """Where the lookup is no longer trusted, with a state that has seen the copied tokens, asked about them or not."""
    history = np.tile([5, 6, 7, 8], S)[None, :S]
    for before in (0.9, 0.97):  # the shadow is asked too, or not
        table = np.full((3, LONGEST_MATCH + 1, 3, MAX_DRAFTS), before)
        table[..., 3:] = 1e-4
        weights = draft_weights(5, offset=0.5)._replace(lookup=jnp.asarray(table, jnp.float32))
        weights = weights._replace(gate=weights.gate.at[:, :3, 1].set(-9.0))
        inputs = draft_input(5, 1, history=history, position=[9], token=[6])
        tokens, sources = chain(run(weights, inputs), 0)
        assert tokens[:3] == [7, 8, 5]
        assert sources == [LOOKUP] * 3 + [SHADOW] * 5
        assert check_against_oracle(run, weights, inputs) > 4


def test_a_copy_extends_the_shadow(run):
    """The end of the text occurs nowhere else, but with the shadow's token it does."""
    weights = draft_weights(18, offset=9.0)
    weights = weights._replace(lookup=jnp.full_like(weights.lookup, 0.97).at[:, :, :, 3:].set(1e-6))
    alone = dict(position=[40], token=[9], history=np.arange(S)[None] + 200)
    first, second = chain(run(weights, draft_input(18, 1, sources=[SHADOW], **alone)), 0)[0][:2]
    history = alone["history"].copy()
    history[0, 40], history[0, 7:12] = 9, [9, first, 11, 12, 13]
    tokens, sources = chain(run(weights, draft_input(18, 1, **(alone | dict(history=history)))), 0)
    assert tokens[:4] == [first, 11, 12, 13]
    assert sources == [SHADOW] + [LOOKUP] * 3 + [SHADOW] * 4
    assert second != 11
    assert check_against_oracle(run, weights, draft_input(18, 1, **(alone | dict(history=history)))) > 4


def test_what_the_shadow_says_changes_the_probability(run):
    """Of the lookup: its table knows whether the two agree."""
    weights = draft_weights(6)
    alone = draft_input(6, 1, sources=[SHADOW], room=[1])
    guess = chain(run(weights, alone), 0)[0][0]
    table = np.zeros((3, LONGEST_MATCH + 1, 3, MAX_DRAFTS))
    table[:, :, DIFFERS], table[:, :, AGREES], table[:, :, UNKNOWN] = 0.9, 0.94, 0.8
    weights = weights._replace(
        lookup=jnp.asarray(table, jnp.float32), gate=weights.gate.at[..., 1].set(-20.0), vocab=weights.vocab
    )
    for copied, sources, probability in ((guess, BOTH, 0.94), ((guess + 1) % V, BOTH, 0.9), (guess, LOOKUP, 0.8)):
        history = np.zeros((1, S), int)
        history[0, :5] = [1, 2, copied, 1, 2]
        at = dict(history=history, position=[4], token=np.asarray(alone.token), room=[1], sources=[sources])
        got = run(weights, draft_input(6, 1, **at))
        assert chain(got, 0) == ([copied], [LOOKUP])
        assert got.probability[0, 0] == np.float32(probability)


def test_the_shadow_stops_after_its_places(run):
    got = run(draft_weights(7), draft_input(7, 2, sources=[SHADOW, LOOKUP], alphabet=1))
    assert got.length.tolist() == [SHADOW_PLACES, MAX_DRAFTS]


def test_the_floor_ends_a_chain(run):
    weights = draft_weights(8)
    got = run(weights, draft_input(8))
    products = np.cumprod(got.probability, axis=1)
    for floor in (0.9, 0.5, 0.1, 2.0, np.nan):
        cut = run(weights, draft_input(8, floor=floor))
        want = ((products >= floor) & (got.tokens >= 0)).sum(1)
        assert cut.length.tolist() == want.tolist()
        for slot, n in enumerate(want):
            assert chain(cut, slot)[0] == got.tokens[slot, :n].tolist()


def test_room(run):
    weights, full = draft_weights(9), run(draft_weights(9), draft_input(9))
    got = run(weights, draft_input(9, room=[0, -3, 1, 3, 99, MAX_DRAFTS]))
    assert got.length.tolist() == [0, 0, *np.minimum(full.length[2:], [1, 3, 99, MAX_DRAFTS])]
    for slot, n in enumerate(got.length):
        assert chain(got, slot)[0] == full.tokens[slot, :n].tolist()


# --- temperature ---


def test_drafts_have_the_noise_of_the_sampler(run, cpu_backend):
    """A shadow that knows the trunk's logits guesses what is sampled."""
    slots, rank, temperature = 8, 48, 0.8
    weights = draft_weights(10, rank=rank, head=V)
    inputs = draft_input(10, slots, sources=np.full(slots, SHADOW), temperature=np.full(slots, temperature))
    logits = np.full((slots, V), -np.inf)
    for slot in range(slots):
        shadow = ShadowOracle(weights, inputs.hidden[slot])
        shadow.read(int(inputs.token[slot]), 0)
        logits[slot, np.asarray(weights.vocab)] = shadow.logits()

    def each(value, dtype=jnp.float32):
        return jnp.full(slots, value, dtype)

    rows = RowParams(
        temperature=each(temperature), top_k=each(0, jnp.int32), top_p=each(1), min_p=each(0), repetition=each(1),
        presence=each(0), frequency=each(0), seed=inputs.seed, position=inputs.position + 1,
        counts=jnp.zeros((slots, V), jnp.int32), slot=jnp.arange(slots), drafted=jnp.full((slots, 1), -1),
        bias_ids=jnp.full((slots, 1), -1), bias_values=jnp.zeros((slots, 1)), n_logprobs=each(-1, jnp.int32),
        mask=each(-1, jnp.int32), masks=jnp.zeros((1, -(-V // 32)), jnp.uint32),
    )  # fmt: skip
    chosen = choose_rows(jnp.asarray(logits, jnp.float32), rows, jnp.ones(slots, bool), backend=cpu_backend)
    got = run(weights, inputs)
    assert got.tokens[:, 0].tolist() == chosen.token.tolist()
    greedy = run(weights, inputs._replace(temperature=jnp.zeros(slots)))
    assert (greedy.tokens[:, 0] != got.tokens[:, 0]).any()


def test_each_temperature_has_its_class(run):
    """Classes at 0, 0.5 and 1, told by the probability of the only draft."""
    weights = draft_weights(11)
    offsets = np.array([-1.0, 0.0, 1.0])
    gate = np.zeros((3, SHADOW_PLACES, 2))
    gate[..., 1] = offsets[:, None]
    temperatures = [0, 1e-40, -1, np.nan, 0.01, 0.74, 0.75, 0.76, 50]
    n = len(temperatures)
    got = run(
        weights._replace(gate=jnp.asarray(gate, jnp.float32)),
        draft_input(11, n, temperature=temperatures, sources=np.full(n, SHADOW), room=np.ones(n)),
    )
    np.testing.assert_allclose(got.probability[:, 0], sigmoid(offsets[[0, 0, 0, 0, 1, 1, 1, 2, 2]]), rtol=1e-6)


# --- slots that draft nothing, and neighbours ---


def test_nothing_to_draft_from(run):
    """The first position, histories of one token, no sources."""
    weights = draft_weights(12)
    got = run(weights, draft_input(12, 4, position=[0, 1, 0, 9], sources=[LOOKUP, LOOKUP, BOTH, 0]))
    assert got.length.tolist() == [0, 0, SHADOW_PLACES, 0]
    short = draft_input(12, 2, history=[[5], [5]], position=[0, 0], token=[5, 5], sources=[LOOKUP, BOTH])
    assert run(weights, short).length.tolist() == [0, SHADOW_PLACES]
    for slot in range(4):
        chain(got, slot)


def poisoned(inputs, slots):
    """Anything may be in these slots."""
    at = np.asarray(slots)
    huge = 2**31 - 1
    return inputs._replace(
        hidden=inputs.hidden.at[at].set(jnp.asarray([[np.nan], [np.inf]])[: len(at)]),
        token=inputs.token.at[at].set(jnp.asarray([huge, -7])[: len(at)]),
        position=inputs.position.at[at].set(jnp.asarray([huge, -100])[: len(at)]),
        history=inputs.history.at[at].set(-huge),
        temperature=inputs.temperature.at[at].set(jnp.asarray([np.nan, 1e30])[: len(at)]),
    )


@pytest.mark.parametrize("off", [dict(active=[1, 0, 1, 0, 1, 1]), dict(room=[9, 0, 9, 0, 9, 9])])
def test_slots_that_draft_nothing_may_hold_anything(run, off):
    weights = draft_weights(13)
    inputs = draft_input(13, temperature=[0, 0, 0.7, 0, 0, 0.7], **off)
    want = run(weights, inputs)
    got = run(weights, poisoned(inputs, [1, 3]))
    assert_same_bits(got, want)
    assert got.length[[1, 3]].tolist() == [0, 0]
    chain(got, 1), chain(got, 3)


def test_hidden_states_that_are_not_numbers_give_no_shadow_drafts(run):
    weights = draft_weights(14)
    inputs = draft_input(14, 3, sources=np.full(3, SHADOW))
    inputs = inputs._replace(hidden=inputs.hidden.at[0].set(jnp.nan).at[1, 4].set(jnp.inf))
    got = run(weights, inputs)
    assert got.length.tolist()[:2] == [0, 0]
    assert got.length[2] > 0


def test_neighbours_do_not_matter(run):
    weights = draft_weights(15)
    temperature = [0, 0.7, 0, 0.7, 0, 0.7]
    inputs, others = (draft_input(seed, temperature=temperature) for seed in (15, 16))
    others = others._replace(sources=jnp.asarray([LOOKUP, SHADOW, BOTH, 0, BOTH, SHADOW]), room=jnp.arange(6))
    want = run(weights, inputs)
    for slot in (0, 1, 5):
        own = [jnp.asarray(b).at[slot].set(a[slot]) for a, b in zip(inputs[:-1], others[:-1], strict=True)]
        got = run(weights, DraftInput(*own, inputs.floor))
        assert_same_bits(*(jax.tree.map(lambda x, slot=slot: x[slot : slot + 1], d) for d in (got, want)))
        assert got.length[slot] > 0


# --- the native backend alone ---

needs_library = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


@needs_library
def test_the_bits_depend_on_nothing_else():
    """Neither on threads nor on the instruction set nor on how many slots there are."""
    weights = draft_weights(17, rank=48, mlp=33, head=300)
    inputs = draft_input(17, 7, temperature=[0, 0.7, 0, 0.7, 0, 0.7, 0])
    program = jax.jit(lambda weights, inputs: draft(weights, inputs, backend="cpu"))
    run = lambda inputs: jax.tree.map(np.asarray, program(weights, inputs))  # noqa: E731
    want = run(inputs)
    assert want.length.min() > 0
    try:
        for isa in native.isas():
            native.set_isa(isa)
            for threads in (1, 2, 3):
                native.set_threads(threads)
                for _ in range(5):
                    assert_same_bits(run(inputs), want)
    finally:
        native.set_isa(None)
        native.set_threads(None)
    for slot in range(7):
        alone = DraftInput(*(x[slot : slot + 1] for x in inputs[:-1]), inputs.floor)
        assert_same_bits(run(alone), jax.tree.map(lambda x, slot=slot: x[slot : slot + 1], want))


@needs_library
@pytest.mark.parametrize("field", ["head", "recur", "lookup", "hidden", "seed"])
def test_the_native_call_refuses_wrong_shapes(field):
    weights, inputs = draft_weights(), draft_input()
    if field in weights._fields:
        weights = weights._replace(**{field: getattr(weights, field)[:, 1:]})
    else:
        inputs = inputs._replace(**{field: getattr(inputs, field)[:, 1:]})
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"umbra_draft: \w+ does not have the type and shape"):
        jax.block_until_ready(draft(weights, inputs, backend="cpu"))
