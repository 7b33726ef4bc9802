"""Tiny models as Transformers saved them: the logits it computed in float32 (tests/golden/make_hf_tiny.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from umbra.model import trunk
from umbra.model.weights.huggingface import open_folder
from umbra.model.weights.plan import floats

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("family", ["gemma3", "llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(family: str) -> None:
    source = open_folder(GOLDEN / f"hf_{family}")
    params = source.load(floats(source.config, np.dtype(np.float32)), None, None)
    golden = np.load(GOLDEN / f"hf_{family}" / "golden.npz")
    logits = np.asarray(trunk.logits(source.config, params, golden["ids"]))
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-4)
