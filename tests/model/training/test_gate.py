"""Proposals along recorded answers against the drafting kernel itself; the gate's calibration; the measures."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from umbra.kernels import draft as kernel
from umbra.model import shadow as shadows
from umbra.model.training import gate as gates
from umbra.model.training import measure as measures
from umbra.model.training.chains import find_matches, propose

V = 64


@pytest.fixture(scope="module")
def shadow(shape):
    rng = np.random.default_rng(5)
    empty = shadows.initial(shape, rng.permutation(V)[: shape.vocab], seed=1)
    values = {name: np.asarray(empty[name]) for name in shape.shapes}
    values["scale"] = np.float32(3.0)
    values["conf"] = rng.normal(0, 0.2, values["conf"].shape)
    values["gate"] = np.stack([rng.uniform(0.5, 1.5, (2, 8)), rng.normal(-1, 0.3, (2, 8))], axis=-1)
    values["lookup"] = rng.uniform(0, 1, values["lookup"].shape)
    return shadows.Shadow(shape, values, np.asarray(empty.vocab.get_value()))


@pytest.fixture(scope="module")
def weights(shadow, table):
    return shadows.drafting_from(shadow, table)


@pytest.fixture(scope="module")
def proposals(corpus, weights):
    return propose(corpus, np.arange(60).tolist(), weights, lambda done, total: None)


def gate_of(shadow) -> gates.Gate:
    return gates.Gate(*(np.asarray(shadow[field.name]) for field in dataclasses.fields(gates.Gate)))


@pytest.mark.parametrize("sources", [kernel.LOOKUP, kernel.SHADOW, kernel.LOOKUP | kernel.SHADOW])
def test_chains_are_those_of_the_kernel(corpus, shadow, weights, proposals, sources):
    """Same tokens, sources and probabilities up to the first draft that is wrong."""
    chains = gates.draft_all(proposals, gate_of(shadow), sources)
    picked = np.random.default_rng(0).choice(len(proposals.anchors), 48, replace=False)
    anchors = proposals.anchors[picked]
    owner = corpus.answer[anchors]
    size = 128
    history = np.zeros((48, size), np.int32)
    position = np.zeros(48, np.int32)
    for row, (anchor, answer) in enumerate(zip(anchors, owner, strict=True)):
        text = [*corpus.prompts[answer], *corpus.tokens[corpus.starts[answer] : anchor + 1]]
        history[row, : len(text)], position[row] = text, len(text) - 1
    seed = np.stack([corpus.seed[owner], np.zeros_like(owner)], axis=1).astype(np.uint32)
    inputs = kernel.DraftInput(
        hidden=jnp.asarray(corpus.hidden[anchors], jnp.float32), token=jnp.asarray(corpus.tokens[anchors]),
        position=jnp.asarray(position), history=jnp.asarray(history), active=jnp.ones(48, bool),
        sources=jnp.full(48, sources, jnp.int32), temperature=jnp.asarray(corpus.temperature[owner]),
        seed=jnp.asarray(seed), room=jnp.full(48, kernel.MAX_DRAFTS, jnp.int32),
        predicted=jnp.zeros(48, jnp.int32), floor=jnp.float32(0),
    )  # fmt: skip
    drafted = kernel.draft(weights, inputs, backend="xla")
    compared = 0
    for row, i in enumerate(picked):
        truth = corpus.tokens[anchors[row] + 1 : anchors[row] + 1 + proposals.inside[i]]
        for place, token in enumerate(truth):
            assert int(drafted.source[row, place]) == chains.source[i, place], (row, place)
            if not chains.source[i, place]:
                break
            assert float(drafted.probability[row, place]) == pytest.approx(chains.probability[i, place], abs=6e-3)
            assert (int(drafted.tokens[row, place]) == token) == chains.right[i, place], (row, place)
            compared += 1
            if not chains.right[i, place]:
                break
    assert compared > 30


def test_matches_are_the_longest_and_most_recent(corpus):
    small = dataclasses.replace(
        corpus, tokens=np.array([1, 2, 3, 9, 1, 2, 3, 5, 2, 3, 7], np.int32), starts=np.array([0, 11]),
        prompts=((8, 2, 3, 4),),
    )  # fmt: skip
    length, copied = find_matches(small, [0])
    assert length.tolist() == [0, 0, 2, 0, 0, 2, 3, 0, 0, 2]
    assert copied[2, :2].tolist() == [4, 1], "after 2 3 in the prompt"
    assert copied[6, :3].tolist() == [9, 1, 2], "after 1 2 3, the longest"
    assert copied[9, :3].tolist() == [5, 2, 3], "after the most recent 2 3"


def test_the_confidence_and_the_scaling_are_calibrated(corpus, shadow, proposals):
    """Outcomes drawn from a known logistic model: the fitted gate finds its probabilities."""
    rng = np.random.default_rng(3)
    n, width = 4000, 6
    x = rng.normal(size=(n, 8, width)).astype(np.float16)
    truth = 1 / (1 + np.exp(-(x.astype(np.float32) @ np.array([1.5, -1, 0.5, 0, 0, 2]) - 0.4)))
    right = rng.random((n, 8)) < truth
    artificial = dataclasses.replace(
        proposals, anchors=np.arange(n), kind=np.zeros(n, np.int32), inside=np.full(n, 15, np.int32),
        match=np.zeros(n, np.int32), copied_right=np.zeros((n, 15), bool), guess=np.zeros((n, 8), np.int32),
        guess_right=right, agrees=np.zeros((n, 8), bool), features=x,
    )  # fmt: skip
    one = dataclasses.replace(corpus, starts=np.array([0, n + 1]), part=np.zeros(1, np.int8))
    gate = gates.fit_gate(artificial, one, 1)
    chains = gates.draft_all(artificial, gate)
    assert np.mean(np.abs(chains.probability[:, 0] - truth[:, 0])) < 0.03
    found = measures.calibration(chains.probability[:, 0], chains.right[:, 0], {"95%": 0.9})
    assert found.ece < 0.03 and found.auroc > 0.85
    assert found.coverage["95%"][2] > 0.9


def test_the_lookup_table_holds_shares_and_shrinks_where_little_was_seen(corpus, proposals):
    gate = gates.fit_gate(proposals, corpus, 2)
    assert gate.lookup.shape == (2, 17, 3, 15) and np.all((gate.lookup > 0) & (gate.lookup < 1))
    right = proposals.copied_right[proposals.match > 0, 0].mean()
    assert gate.lookup[:, :, kernel.UNKNOWN].mean() == pytest.approx(right, abs=0.1)
    assert np.ptp(gate.lookup[0, 1, kernel.UNKNOWN]) < 1e-6, "no match has one token: every place has the coarser share"


def test_lengths_maximise_tokens_over_time():
    chains = gates.Chains(
        source=np.array([[2, 2, 2], [2, 2, 0]]), probability=np.array([[0.9, 0.9, 0.1], [0.05, 0.9, 0.0]], np.float32),
        right=np.ones((2, 3), bool), guessed=np.zeros((2, 3)), says=np.zeros((2, 3)), follows=np.zeros((2, 3), bool),
    )  # fmt: skip
    assert gates.lengths(chains, (1.0, 1.1, 1.2, 1.4)).tolist() == [2, 0]


def test_passes_start_where_the_one_before_ended(corpus, proposals):
    starts = gates.live(proposals, corpus, np.zeros(len(proposals.anchors), np.int32))
    assert starts.all()
    accepted = np.full(len(proposals.anchors), 2, np.int32)
    starts = gates.live(proposals, corpus, accepted)
    owner = corpus.answer[proposals.anchors]
    for answer in range(60):
        mine = starts[owner == answer]
        assert np.array_equal(np.flatnonzero(mine), np.arange(0, len(mine), 3))
    assert measures.tokens_per_pass(proposals, corpus, np.zeros_like(accepted)) == 1.0
    assert 2 < measures.tokens_per_pass(proposals, corpus, accepted) < 3


def test_calibration_error_and_ranking_of_known_probabilities():
    p = np.repeat([0.1, 0.9], 1000).astype(np.float32)
    right = np.concatenate([np.arange(1000) < 100, np.arange(1000) < 900])
    found = measures.calibration(p, right, {}, bins=2)
    assert found.ece == pytest.approx(0, abs=1e-6) and found.auroc == pytest.approx(0.9)
    assert measures.calibration(1 - p, right, {}, bins=2).ece == pytest.approx(0.8)
    assert measures.threshold_for(p, right, 0.85) == pytest.approx(0.9)
    assert measures.threshold_for(p, right, 0.95) == 1.0


def test_a_bigram_table_predicts_the_rule(corpus, proposals):
    best = measures.bigram_table(corpus, V)
    assert np.mean([best[t] == (3 * t + 1) % 40 for t in range(40)]) > 0.8
    accepted = measures.bigram_accepted(best, corpus, proposals)
    assert measures.tokens_per_pass(proposals, corpus, accepted) > 2


def test_everything_is_measured_by_category(corpus, proposals, shadow):
    gate = gate_of(shadow)
    thresholds = measures.gate_thresholds(corpus, proposals, gate, 2)
    best = measures.bigram_table(corpus, V)
    found = measures.measure(corpus, proposals, gate, thresholds, best, (0.0, 1.0))
    assert set(found.acceptance) == {"all", "even", "odd"} and set(found.per_length) == {"shadow", "lookup", "both"}
    assert all(len(rates) == 8 and np.all(np.diff(rates) >= 0) for rates in found.per_length.values())
    assert set(found.calibration) == {"temperature 0", "temperature 1"}
    assert found.answers["all"] == 45, "the greedy ones"


def test_answers_that_go_round_in_circles_are_recognised(corpus):
    loop = dataclasses.replace(corpus, tokens=np.tile([1, 2, 3, 4, 5], 8), starts=np.array([0, 40]))
    assert measures.repetitive(loop, 0)
    straight = dataclasses.replace(corpus, tokens=np.arange(40), starts=np.array([0, 40]))
    assert not measures.repetitive(straight, 0)
