"""The shadow: its size for any trunk, its file, and its drafting form."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from umbra.configs.models import NAMED
from umbra.configs.shadow import (
    CONFIDENCE_FEATURES,
    PLACES,
    SHARE,
    TABLE,
    ShadowConfig,
    TrainingConfig,
    trunk_parameters,
)
from umbra.kernels import draft as kernel
from umbra.kernels.linear import Quantised
from umbra.model import shadow as shadows
from umbra.model.params import param_specs

TINY = NAMED["tiny"]
CONFIG = ShadowConfig(64, 32, 16, 100, (0.0, 1.0))


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.1, (512, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def shadow() -> shadows.Shadow:
    vocab = np.random.default_rng(2).permutation(512)[:100]
    return shadows.initial(CONFIG, vocab, seed=3)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_trunks_are_counted_right(name):
    trunk = NAMED[name]
    assert trunk_parameters(trunk) == sum(int(np.prod(spec.shape)) for spec in param_specs(trunk).values())


@pytest.mark.parametrize("name", sorted(name for name in NAMED if not name.startswith("tiny")))
def test_the_formula_stays_within_the_share_and_uses_it(name):
    trunk = NAMED[name]
    config = ShadowConfig.for_trunk(trunk, (0.0, 0.8, 1.0))
    allowed = SHARE * trunk_parameters(trunk)
    assert config.parameters <= allowed
    larger = dataclasses.replace(config, rank=config.rank + 32, mlp=config.mlp + 32)
    assert larger.parameters > allowed or config.rank + 32 > trunk.d_model


def test_sizes_of_known_trunks():
    sizes = {n: ShadowConfig.for_trunk(NAMED[n]).rank for n in ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "tiny")}
    assert sizes == {"smollm2-135m": 192, "llama-3.2-1b": 544, "llama-3.1-8b": 1536, "tiny": 32}
    config = ShadowConfig.for_trunk(NAMED["smollm2-135m"], (0.0, 0.8, 1.0))
    assert config.parameters == 399_795 <= 403_545
    assert "399,795 parameters, 0.2972% of the trunk's 134,515,008 (at most 0.3%)" in str(
        shadows.count(config, NAMED["smollm2-135m"])
    )


def test_sizes_agree_with_the_kernel():
    assert (PLACES, CONFIDENCE_FEATURES) == (kernel.SHADOW_PLACES, kernel.FEATURES)
    assert TABLE == (kernel.LONGEST_MATCH + 1, 3, kernel.MAX_DRAFTS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "rank of a shadow must be at least 1"),
        ({"temperatures": (1.0,)}, "start with 0"),
        ({"temperatures": ()}, "start with 0"),
    ],
)
def test_impossible_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **wrong)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"tokens": 0}, {"unroll": 9}, {"epochs": 0.0}])
def test_impossible_training_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingConfig(**wrong)


def test_a_file_gives_back_what_was_saved(shadow, tmp_path):
    path = tmp_path / "tiny.safetensors"
    shadows.save_shadow(shadow, path, trunk="tiny", weights_id="abc", notes={"steps": 3})
    read = shadows.load_shadow(path, trunk=TINY, weights_id="abc")
    assert read.config == CONFIG
    assert np.array_equal(read.vocab.get_value(), shadow.vocab.get_value())
    for name in CONFIG.shapes:
        expected = np.asarray(shadow[name])
        exact = name in shadows.CALIBRATED
        np.testing.assert_array_equal(read[name], expected if exact else expected.astype(np.float16).astype(np.float32))
    again = tmp_path / "again.safetensors"
    shadows.save_shadow(read, again, trunk="tiny", weights_id="abc", notes={"steps": 3})
    assert again.read_bytes() == path.read_bytes()


def test_another_trunk_and_other_files_are_refused(shadow, tmp_path):
    path = tmp_path / "tiny.safetensors"
    shadows.save_shadow(shadow, path, trunk="tiny", weights_id="abc", notes={})
    with pytest.raises(
        shadows.ShadowError, match="trained for the trunk tiny with the weights abc; these are tiny with x"
    ):
        shadows.load_shadow(path, trunk=TINY, weights_id="xyz")
    with pytest.raises(shadows.ShadowError, match="for a trunk of width 64, this one has 576"):
        shadows.load_shadow(path, trunk=NAMED["smollm2-135m"], weights_id="abc")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(shadows.ShadowError, match="cannot read the shadow"):
        shadows.load_shadow(path, trunk=TINY, weights_id="abc")
    import safetensors.numpy

    safetensors.numpy.save_file({"x": np.zeros(2)}, path)
    with pytest.raises(shadows.ShadowError, match="is not a shadow of the format"):
        shadows.load_shadow(path, trunk=TINY, weights_id="abc")
    with pytest.raises(shadows.ShadowError, match="cannot read"):
        shadows.load_shadow(tmp_path / "nowhere", trunk=TINY, weights_id="abc")


def test_what_ships_is_small_and_found_by_its_weights():
    for path in sorted(shadows.FOLDER.glob("*.safetensors")):
        assert path.stat().st_size < 2_000_000
        header = shadows._header(path)
        assert shadows.shipped(header["weights_id"]) == path
    assert shadows.shipped("no such weights") is None


def test_the_drafting_form_guesses_as_the_module_does(shadow, table):
    """A chain of the kernel against the module's own equations with the tables in int8."""
    weights = shadows.drafting_from(shadow, table)
    hidden = np.random.default_rng(4).normal(0, 3, (1, 64)).astype(np.float32)
    inputs = kernel.DraftInput(
        hidden=jnp.asarray(hidden), token=jnp.array([7]), position=jnp.array([0]), history=jnp.array([[7, 0, 0]]),
        active=jnp.array([True]), sources=jnp.array([kernel.SHADOW]), temperature=jnp.zeros(1),
        seed=jnp.zeros((1, 2), jnp.uint32), room=jnp.array([4]), predicted=jnp.array([0]), floor=jnp.float32(0),
    )  # fmt: skip
    drafted = np.asarray(kernel.draft(weights, inputs, backend="xla").tokens)[0, :4]
    cell = shadow.cell()
    state, token, z = cell.start[None], 7, shadows.rms(jnp.asarray(hidden), 1e-5) @ cell.context
    head = np.asarray(weights.head, np.float32) * np.asarray(weights.head_scale)[:, None]
    for place in range(4):
        read = weights.read[token].astype(jnp.float32) * weights.read_scale[token] + cell.step[place]
        state, o = shadows.step(cell, state, read[None], z, 1e-5)
        token = int(weights.vocab[int(np.argmax(head @ np.asarray(o[0])))])
        assert token == drafted[place]


def test_the_tables_are_the_frozen_embedding(shadow, table):
    weights = shadows.drafting_from(shadow, table)
    read = np.asarray(weights.read, np.float32) * np.asarray(weights.read_scale)[:, None]
    np.testing.assert_allclose(read, shadow.read(jnp.asarray(table)), atol=np.abs(read).max() / 100)
    head = np.asarray(weights.head, np.float32) * np.asarray(weights.head_scale)[:, None]
    expected = shadow.head(jnp.asarray(table[np.asarray(weights.vocab)]))
    np.testing.assert_allclose(head, expected, atol=np.abs(head).max() / 100)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_rows_are_read_from_any_form(random_model, quant):
    plain, model = random_model(quant="none"), random_model(quant=quant)
    rows = shadows.embedding_rows(model.params["embed"], np.array([5, 0, 511]), model.kernels)
    expected = np.asarray(plain.params["embed"], np.float32)[[5, 0, 511]]
    assert isinstance(model.params["embed"], Quantised) == (quant != "none")
    np.testing.assert_allclose(rows, expected, atol=np.abs(expected).max() / 100)
    weights = shadows.drafting(shadows.initial(CONFIG, np.arange(100)), model.params, model.config, model.kernels)
    assert weights.read.shape == (512, 32)
