"""The corpus as arrays, the warm start, and the optimiser's loop: order, losses, resuming, several devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from umbra.configs.shadow import TrainingConfig
from umbra.model import shadow as shadows
from umbra.model.training import fit as fitting
from umbra.model.training.corpus import CALIBRATION, TEST, TRAIN, coverage, rank_vocabulary, teach
from umbra.model.training.warm_start import warm_start

V = 64
CONFIG = TrainingConfig(epochs=4, batch=64, unroll=3, learning_rate=5e-3)


@pytest.fixture(scope="module")
def vocab(corpus, shape):
    return rank_vocabulary(corpus, V, shape.vocab)


@pytest.fixture(scope="module")
def teacher(corpus, table, vocab):
    return teach(corpus, np.ones(32, np.float32), 1e-5, table[vocab], top=8)


@pytest.fixture(scope="module")
def start(shape, corpus, table, vocab):
    empty = shadows.initial(shape, vocab)
    values = {name: np.asarray(empty[name]) for name in shape.shapes}
    return warm_start(shape, values, corpus, table, np.ones(32, np.float32), table[vocab], vocab)


def fit(folder, corpus, teacher, vocab, table, shape, start, config=CONFIG, report=lambda *a: None, **how):
    batches = fitting.Batches(corpus, teacher, vocab, V, config)
    return fitting.fit(shadows.Shadow(shape, start, vocab), batches, table, config, folder, report=report, **how)


def test_parts_depend_on_the_prompt_and_share_no_answer(corpus):
    sizes = [len(corpus.answers(part)) for part in (TRAIN, CALIBRATION, TEST)]
    assert sum(sizes) == 60 and min(sizes) > 0 and max(sizes) == sizes[0]
    anchors = np.concatenate([corpus.anchors(part) for part in (TRAIN, CALIBRATION, TEST)])
    assert len(np.unique(anchors)) == len(anchors) == len(corpus.tokens) - 60, "all but the last of each answer"
    assert np.array_equal(corpus.tokens[corpus.starts[3] : corpus.starts[4]], corpus.tokens[corpus.answer == 3])


def test_the_vocabulary_is_ranked_by_training_answers_only(corpus, vocab):
    counts = np.bincount(corpus.tokens[corpus.part[corpus.answer] == TRAIN], minlength=V)
    assert np.all(np.diff(counts[vocab]) <= 0) and len(set(vocab.tolist())) == len(vocab)
    assert coverage(corpus, vocab, TRAIN) == pytest.approx(counts[vocab].sum() / counts.sum())
    assert coverage(corpus, np.arange(V), TEST) == 1.0


def test_the_teacher_is_the_trunks_softmax(corpus, table, vocab, teacher):
    i = 11
    h = corpus.hidden[i].astype(np.float32)
    logits = table[vocab] @ (h / np.sqrt(np.mean(h * h) + 1e-5))
    logits /= corpus.temperature[corpus.answer[i]] or 1.0
    best = np.argsort(-logits)[:8]
    assert set(teacher.index[i].tolist()) == set(best.tolist())
    exp = np.exp(logits[teacher.index[i]] - logits.max())
    np.testing.assert_allclose(teacher.weight[i], exp / exp.sum(), atol=2e-3)


def test_batches_show_every_anchor_once_an_epoch_with_what_follows(corpus, teacher, vocab):
    batches = fitting.Batches(corpus, teacher, vocab, V, CONFIG)
    seen = [batches.at(step) for step in range(batches.per_epoch)]
    assert len(np.unique(np.concatenate([b.hidden for b in seen]), axis=0)) == batches.per_epoch * 64
    anchors = corpus.anchors(TRAIN)[[0, 5]]
    batch = batches.of(anchors)
    place = {int(token): i for i, token in enumerate(vocab)}
    for row, anchor in enumerate(anchors):
        assert batch.tokens[row].tolist() == corpus.tokens[anchor : anchor + 3].tolist()
        expected = [place.get(int(token), -1) for token in corpus.tokens[anchor + 1 : anchor + 4]]
        assert batch.labels[row].tolist() == expected
    ends = np.flatnonzero((corpus.left == 1) & (corpus.part[corpus.answer] == TRAIN))[:1]
    last = batches.of(ends)
    assert last.labels[0, 1:].tolist() == [-1, -1] and not last.weight[0, 1:].any()


def test_later_places_are_thinned_in_multiples_of_the_devices():
    config = dataclasses.replace(CONFIG, unroll=4, thinning=0.5)
    assert fitting.place_sizes(64, config) == (64, 32, 16, 8)
    assert fitting.place_sizes(64, config, devices=8) == (64, 32, 16, 8)
    assert fitting.place_sizes(40, config, devices=8) == (40, 16, 8, 8)


def test_the_warm_start_guesses_better_than_nothing(tmp_path, corpus, teacher, vocab, table, shape, start):
    config = dataclasses.replace(CONFIG, epochs=1e-6, learning_rate=0.0)
    warm = fit(tmp_path / "w", corpus, teacher, vocab, table, shape, start, config).history[0]
    empty = shadows.initial(shape, vocab)
    cold_start = {name: np.asarray(empty[name]) for name in shape.shapes}
    cold = fit(tmp_path / "c", corpus, teacher, vocab, table, shape, cold_start, config).history[0]
    assert warm["ce1"] < cold["ce1"] and warm["right1"] > cold["right1"]


def test_training_learns_the_rule(tmp_path, corpus, teacher, vocab, table, shape, start):
    history = fit(tmp_path, corpus, teacher, vocab, table, shape, start).history
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert history[-1]["right1"] > 0.6 and history[-1]["right3"] > 0.5


class Killed(Exception):
    pass


def test_a_run_that_was_cut_off_gives_the_same(tmp_path, monkeypatch, corpus, teacher, vocab, table, shape, start):
    monkeypatch.setattr(fitting, "CHECKPOINT_STEPS", 7)
    given = (corpus, teacher, vocab, table, shape, start)
    whole = fit(tmp_path / "whole", *given)

    def kill(at):
        def report(done, total, before, row):
            if done == at:
                raise Killed

        return report

    for at in (10, 20, 30):
        with pytest.raises(Killed):
            fit(tmp_path / "cut", *given, report=kill(at))
    with (tmp_path / "cut" / "loss.jsonl").open("a") as log:
        log.write('{"step": 40, "lo')
    resumed = fit(tmp_path / "cut", *given)
    assert resumed.history == whole.history
    for name, value in whole.values.items():
        np.testing.assert_array_equal(resumed.values[name], value)


def test_checkpoints_of_another_run_are_not_continued(tmp_path, corpus, teacher, vocab, table, shape, start):
    given = (corpus, teacher, vocab, table, shape, start)
    short = dataclasses.replace(CONFIG, epochs=0.5)
    fit(tmp_path, *given, short, identity="a")
    firsts = []
    fit(tmp_path, *given, short, identity="b", report=lambda done, total, before, row: firsts.append(before))
    assert set(firsts) == {0}


def test_several_devices_give_the_same_within_rounding(tmp_path, corpus, teacher, vocab, table, shape, start):
    config = dataclasses.replace(CONFIG, epochs=1)
    given = (corpus, teacher, vocab, table, shape, start, config)
    one = fit(tmp_path / "one", *given)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    many = fit(tmp_path / "many", *given, mesh=mesh)
    assert many.history[-1]["loss"] == pytest.approx(one.history[-1]["loss"], rel=1e-3)
    for name, value in one.values.items():
        np.testing.assert_allclose(many.values[name], value, atol=2e-3, err_msg=name)
    odd = dataclasses.replace(config, batch=63)
    with pytest.raises(ValueError, match="63 examples cannot be split over 4 devices"):
        fit(tmp_path / "odd", *given[:-1], odd, mesh=mesh)


def test_without_answers_there_is_nothing_to_train_on(corpus, teacher, vocab):
    none = dataclasses.replace(corpus, part=np.full_like(corpus.part, TEST))
    with pytest.raises(ValueError, match="no answers to train on"):
        fitting.Batches(none, teacher, vocab, V, CONFIG)
