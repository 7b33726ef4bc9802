"""The default models against Transformers in float32, on the same GGUF files (tests/golden/make_logits.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from umbra.configs.engine import EngineConfig
from umbra.model import trunk
from umbra.model.load import Model, load_model
from umbra.serving.engine import Engine, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = 20


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(request.param, quant="none")


@pytest.fixture(scope="module")
def golden(model: Model) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / f"logits_{model.name}.npz"))


@pytest.mark.real
def test_log_probabilities(model: Model, golden: dict[str, np.ndarray]) -> None:
    worst = 0.0
    for i in range(PROMPTS):
        rows = trunk.logits(model.config, model.params, golden[f"ids_{i}"], golden[f"positions_{i}"])
        rows = np.asarray(rows, np.float64)
        logprobs = (
            rows
            - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - rows.max(-1, keepdims=True)
        )
        got = np.take_along_axis(logprobs, golden[f"top_ids_{i}"].astype(np.int64), axis=1)
        difference = np.abs(got - golden[f"top_logprobs_{i}"]).max()
        worst = max(worst, difference)
        assert difference <= 2e-3, f"prompt {i}"
    print(f"{model.name}: largest difference of a log-probability {worst:.1e}")


@pytest.mark.real
def test_greedy_continuations(model: Model, golden: dict[str, np.ndarray]) -> None:
    with Engine(model, EngineConfig(slots=10, context_length=4096, kv_memory=0.7)) as engine:
        engine.start()
        prompts = [golden[f"ids_{i}"].tolist() for i in range(PROMPTS)]
        answers = engine.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
        engine.check()
    for i, answer in enumerate(answers):
        margin = golden[f"margins_{i}"].min()
        assert list(answer.token_ids) == golden[f"greedy_{i}"].tolist(), f"prompt {i}, smallest margin {margin:.1e}"
