"""The engine on a mesh of four simulated CPU devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from umbra.configs.engine import EngineConfig
from umbra.configs.models import named
from umbra.model.load import Model
from umbra.model.params import param_specs
from umbra.serving.engine import Engine, SamplingParams, make_mesh

CONFIG = EngineConfig(slots=4, context_length=512, blocks=12, prefill_chunk=64)


def place(model: Model, mesh: jax.sharding.Mesh) -> Model:
    specs = param_specs(model.config)
    params = {name: jax.device_put(value, specs[name].sharding(mesh)) for name, value in model.params.items()}
    return Model(**{**vars(model), "params": params})


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 512, int(rng.integers(1, 200))).tolist() for _ in range(n)]


def run(model: Model, data: int, model_axis: int) -> list[tuple[int, ...]]:
    mesh = make_mesh(jax.devices()[: data * model_axis], model.config, data, model_axis)
    with Engine(place(model, mesh), CONFIG, mesh=mesh) as engine:
        engine.start()
        before = engine.stats().compilations_after_ready
        answers = engine.generate(prompts(16), SamplingParams(temperature=0.8, seed=7, max_tokens=24))
        assert engine.stats().total_slots == 4 * data
        assert engine.stats().compilations_after_ready == before
        engine.check()
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma"])
def test_meshes_agree_with_one_device(name: str, random_model: Callable) -> None:
    """Data parallelism changes nothing. Tensor parallelism adds partial sums in another order, so that after a while
    a near tie may fall the other way: at least nine tokens in ten come before that (all of them, as measured)."""
    model = random_model(name)
    expected = run(model, 1, 1)
    if name == "tiny":
        assert run(model, 4, 1) == expected
    got = run(model, 2, 2)
    same = sum(sum(np.cumprod(np.equal(a, b))) for a, b in zip(got, expected, strict=True))
    assert same >= 0.9 * sum(map(len, expected))


@pytest.mark.parametrize(("data", "model_axis", "kernels"), [(4, 1, "xla"), (2, 2, "xla"), (2, 2, "auto")])
def test_drafting_on_a_mesh(
    data: int, model_axis: int, kernels: str, random_model: Callable, random_shadow: Callable
) -> None:
    """Every data shard drafts for its own slots, and all devices of a shard the same: the answers do not change."""
    model = random_model("tiny", kernels=kernels)
    model = dataclasses.replace(model, shadow=random_shadow(512, model.config.d_model))
    mesh = make_mesh(jax.devices()[: data * model_axis], model.config, data, model_axis)
    asked = [
        SamplingParams(max_tokens=40, ignore_eos=True)
        if i % 2
        else SamplingParams(temperature=0.8, seed=7, max_tokens=24)
        for i in range(16)
    ]
    with Engine(place(model, mesh), dataclasses.replace(CONFIG, draft_rows=20), mesh=mesh) as engine:
        engine.start(warm=False)
        alone = engine.generate(prompts(16), [dataclasses.replace(params, draft="off") for params in asked])
        drafting = engine.generate(prompts(16), asked)
        engine.check()
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in alone]
    assert all(answer.timings.drafted == 0 for answer in alone)
    accepted = sum(count for answer in drafting for _, count in answer.timings.accepted)
    assert 0 < accepted < sum(answer.timings.drafted for answer in drafting)


def test_default_mesh_follows_the_heads() -> None:
    devices = jax.devices()
    assert dict(make_mesh(devices[:4], named("tiny")).shape) == {"data": 2, "model": 2}
    assert dict(make_mesh(devices[:4], named("smollm2-135m")).shape) == {"data": 4, "model": 1}
    assert dict(make_mesh(devices[:4], named("llama-3.1-8b")).shape) == {"data": 1, "model": 4}
    assert dict(make_mesh(devices[:4], named("llama-3.1-8b"), data=2).shape) == {"data": 2, "model": 2}


def test_impossible_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match="smollm2-135m cannot be split over model=4: K = 3"):
        make_mesh(jax.devices()[:4], named("smollm2-135m"), 1, 4)
    with pytest.raises(ValueError, match="needs 8 devices; there are 4"):
        make_mesh(jax.devices()[:4], named("tiny"), 4, 2)
