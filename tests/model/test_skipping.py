"""Layer subsets: reading texts with some of the layers, contributions, the greedy choice, the shipped file."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from umbra.configs.engine import EngineConfig
from umbra.configs.models import NAMED
from umbra.kernels.backend import Kernels
from umbra.model import skipping, trunk
from umbra.model.load import Model, random_params
from umbra.model.reading import Reader, Text
from umbra.model.skipping import SkipError, Skips, layer_share, measure_skips, skips_for


@pytest.fixture(scope="module")
def deep() -> Model:
    """A random trunk of eight small layers, so that some may be left out."""
    config = dataclasses.replace(NAMED["tiny"], name="deep", n_layers=8)
    params = random_params(config, seed=3)
    return Model("deep", config, params, None, None, (), "deep-weights", "float32", Kernels())


def texts(n: int, vocab: int, length: int = 20) -> list[Text]:
    rng = np.random.default_rng(5)
    return [Text(rng.integers(1, vocab, length + i % 3).tolist(), 8 + i % 4) for i in range(n)]


@pytest.fixture(scope="module")
def measured(deep: Model) -> Skips:
    return measure_skips(deep, texts(5, deep.config.vocab_size), search_tokens=24)


def test_all_layers_give_the_trunks_logits(deep: Model) -> None:
    text = texts(1, deep.config.vocab_size)[0]
    got = np.asarray(Reader(deep, 64).logits(text))[: len(text.ids) - text.begin]
    rows = np.arange(text.begin - 1, len(text.ids) - 1)
    expected = trunk.logits(deep.config, deep.params, np.asarray(text.ids), rows)
    np.testing.assert_array_equal(got, np.asarray(expected))


def test_a_subset_is_a_trunk_of_fewer_layers(deep: Model) -> None:
    """Leaving layers out is the same as never having had them."""
    kept = (0, 1, 4, 6, 7)
    config = dataclasses.replace(deep.config, n_layers=len(kept))
    params = {
        name: value[np.asarray(kept)] if name.startswith("layers.") else value for name, value in deep.params.items()
    }
    text = texts(1, config.vocab_size)[0]
    small = Reader(dataclasses.replace(deep, config=config, params=params), 64)
    np.testing.assert_array_equal(Reader(deep, 64).logits(text, kept), small.logits(text))


def test_hidden_states_begin_with_the_embedding(deep: Model) -> None:
    ids = texts(1, deep.config.vocab_size)[0].ids
    states = Reader(deep, 64).states(ids)
    assert states.shape == (9, len(ids), deep.config.d_model)
    np.testing.assert_allclose(states[0], np.asarray(deep.params["embed"])[np.asarray(ids)], rtol=1e-6)


def test_choices_are_the_engines(random_model) -> None:
    """Greedy answers of the engine, with this machine's kernels: the reader chooses every token of them."""
    from umbra.serving.engine import Engine, SamplingParams

    model = random_model("tiny")
    prompt = list(range(7, 40))
    with Engine(model, EngineConfig(slots=2, context_length=512, blocks=9)) as engine:
        engine.start()
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))
    text = Text([*prompt, *answer.token_ids], len(prompt))
    assert Reader(model, len(text.ids)).choices(text).tolist() == list(answer.token_ids)


def test_the_full_trunk_does_not_differ_from_itself(deep: Model) -> None:
    text = texts(1, deep.config.vocab_size)[0]
    one, fewer = Reader(deep, 64).compare(text, [range(8), (0, 1, 6, 7)])
    assert one.same.all() and np.allclose(one.kl, 0, atol=1e-6)
    np.testing.assert_array_equal(one.nats, one.all_nats)
    assert fewer.kl.mean() > 0 and len(fewer.kl) == len(text.ids) - text.begin


def test_what_subsets_share_changes_nothing(deep: Model) -> None:
    """Many subsets at once, given in any order and twice, are what each is alone."""
    text = texts(1, deep.config.vocab_size)[0]
    subsets = [(0, 1, 2, 4, 5, 6, 7), (0, 2, 4, 6, 7), (0, 1, 2, 4, 5, 7), (0, 1, 2), (0, 2, 4, 6, 7), (3,), range(8)]
    reader = Reader(deep, 64)
    for layers, one in zip(subsets, reader.compare(text, subsets), strict=True):
        (alone,) = reader.compare(text, [layers])
        for got, expected in zip(one, alone, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_measured_subsets(deep: Model, measured: Skips) -> None:
    assert [len(subset.layers) for subset in measured.subsets] == [7, 6, 5, 4]
    for larger, smaller in zip(measured.subsets, measured.subsets[1:], strict=False):
        assert set(smaller.layers) < set(larger.layers)
        assert smaller.speed_bound > larger.speed_bound > 1.0
    assert all({0, 1, 6, 7} <= set(subset.layers) for subset in measured.subsets)
    assert all(subset.loss <= subset.bound <= 1.0 for subset in measured.subsets)
    assert [one.layer for one in measured.contributions] == list(range(8))
    first_gone = set(range(8)) - set(measured.subsets[0].layers)
    least = min(measured.contributions[2:6], key=lambda one: one.kl)
    assert first_gone == {least.layer}
    assert 3 <= measured.prompts < 5  # the first texts chose, the others judged


def test_a_speed_bound_comes_from_the_bytes_of_a_pass(deep: Model, measured: Skips) -> None:
    per_layer = sum(value.size for name, value in deep.params.items() if name.startswith("layers."))
    share = per_layer / (per_layer + deep.params["embed"].size)
    assert layer_share(deep.params) == pytest.approx(share)
    assert measured.subsets[1].speed_bound == pytest.approx(1 / (1 - share * 2 / 8))


def test_the_boldest_subset_that_passed_is_allowed(measured: Skips) -> None:
    def with_passes(*passed: bool) -> Skips:
        pairs = zip(measured.subsets, passed, strict=True)
        return dataclasses.replace(measured, subsets=tuple(dataclasses.replace(s, passed=p) for s, p in pairs))

    assert with_passes(False, False, False, False).allowed is None
    allowed = with_passes(True, True, False, False).allowed
    assert allowed is not None and len(allowed.layers) == 6
    assert measured.of(5) is measured.subsets[2]
    with pytest.raises(SkipError, match="no subset of 3 layers of deep was measured; there are 7, 6, 5, 4"):
        measured.of(3)


def test_at_least_eight_subsets_of_the_default_model() -> None:
    n = NAMED["smollm2-135m"].n_layers
    assert len(skipping.sizes(n)) >= 8 and max(skipping.sizes(n)) == 13
    assert skipping.sizes(3) == []


def test_a_file_is_of_one_trunk(deep: Model, measured: Skips, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(skipping, "FOLDER", tmp_path)
    assert skips_for(deep) is None
    measured.save(skipping.skips_path("deep"))
    loaded = skips_for(deep)
    assert loaded is not None and loaded.subsets[0].layers == measured.subsets[0].layers
    assert loaded.subsets[2].kl == pytest.approx(measured.subsets[2].kl, rel=1e-5)
    other = dataclasses.replace(deep, weights_id="other-weights")
    with pytest.raises(SkipError, match="weights deep-weights, and these are other-weight of deep: measure them"):
        Skips.load(tmp_path / "deep.json", other)
    assert skips_for(other) is None
    assert "all layers are used" in caplog.text
    (tmp_path / "deep.json").write_text('{"trunk": "deep"}')
    with pytest.raises(SkipError, match="does not hold measured layer subsets"):
        Skips.load(tmp_path / "deep.json", deep)


def test_shipped_files_are_small_and_of_known_trunks() -> None:
    for path in skipping.FOLDER.glob("*.json"):
        assert path.stat().st_size < 50_000
        assert path.stem in NAMED


def test_too_few_texts_are_refused(deep: Model) -> None:
    with pytest.raises(ValueError, match="too few"):
        measure_skips(deep, texts(1, deep.config.vocab_size))
