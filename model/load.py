"""From a model's name to everything needed to serve it: weights on their devices, tokenizer, chat template."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..configs.models import named
from ..configs.trunk import TrunkConfig
from .chat_template import ChatTemplate
from .params import param_specs
from .tokenizer import Tokenizer
from .weights import fetch, huggingface
from .weights.assemble import Progress
from .weights.errors import ModelError
from .weights.gguf import open_gguf
from .weights.orbax import DESCRIPTION, open_orbax
from .weights.source import Source
from .weights.stored import BFLOAT16
from .weights.text import load_text

__all__ = ["Model", "ModelError", "load_model", "open_source", "random_params"]

RANDOM = ("tiny", "tiny-gemma")
"""Configurations that `load_model` fills with random numbers."""

QUANTS = ("auto", "none")


@dataclasses.dataclass(frozen=True)
class Model:
    """A trunk with its parameters in place. `quant` is the resolved form of the weights, for example "float32";
    `eos_ids` end a text or a turn; `tokenizer` and `chat_template` are None where the files have none."""

    name: str
    config: TrunkConfig
    params: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    weights_id: str
    quant: str


def load_model(spec: str, *, quant: str = "auto", mesh: Mesh | None = None, progress: Progress | None = None) -> Model:
    """Loads `smollm2`, `gemma3-270m`, `hf:ORG/NAME`, a `.gguf` file, a Hugging Face or Orbax folder, or `tiny` and
    `tiny-gemma` (random weights).

    Weights are float32 on a CPU and bfloat16 elsewhere, sharded over `mesh` or on the default device. `progress` is
    called with what is done and how much of how much. Raises `ModelError`.
    """
    if quant not in QUANTS:
        why = "int8 and int4 need the quantised kernels; " if quant in ("int8", "int4") else ""
        raise ModelError(f"quant {quant!r} is not supported: {why}supported: {', '.join(QUANTS)}")
    dtype = _dtype(mesh)
    if spec in RANDOM:
        config = named(spec)
        params = random_params(config, dtype=dtype, mesh=mesh)
        return Model(spec, config, params, None, None, (), _random_id(config), dtype.name)
    source = open_source(spec, progress)
    text = load_text(source)
    params = source.load(dtype, mesh, progress)
    return Model(
        spec, source.config, params, text.tokenizer, text.chat_template, text.eos_ids, source.weights_id(), dtype.name
    )


def open_source(spec: str, progress: Progress | None = None) -> Source:
    """The files behind `spec`, fetched if needed, checked, with the weights still on disk. Raises `ModelError`."""
    if spec in fetch.MODELS:
        source = open_gguf(fetch.fetch(spec, progress))
        return dataclasses.replace(source, config=dataclasses.replace(source.config, name=fetch.MODELS[spec].config))
    if spec.startswith("hf:"):
        return huggingface.open_folder(huggingface.download(spec.removeprefix("hf:")))
    path = Path(spec).expanduser()
    if path.is_dir():
        if (path / DESCRIPTION).is_file():
            return open_orbax(path)
        if (path / "config.json").is_file():
            return huggingface.open_folder(path)
        raise ModelError(
            f"{path} is a folder without config.json (Hugging Face) and without {DESCRIPTION} (Orbax, as "
            "scripts/convert.py writes it)"
        )
    if path.suffix == ".gguf" or path.is_file():
        return open_gguf(path)
    raise ModelError(
        f"no model is called {spec!r}; supported: {', '.join((*fetch.MODELS, *RANDOM))}, hf:ORG/NAME, a .gguf file, "
        "a Hugging Face folder or an Orbax folder"
    )


def random_params(
    config: TrunkConfig, *, seed: int = 0, dtype: Any = np.float32, mesh: Mesh | None = None
) -> dict[str, jax.Array]:
    """Random parameters, the same for the same `seed` on every machine: normal with variance 1 / fan-in, ones for
    norms, zeros for biases."""
    params = {}
    for path, spec in param_specs(config).items():
        if spec.init == "normal":
            rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
            value = rng.standard_normal(spec.shape, np.float32) * np.float32(spec.fan_in**-0.5)
        else:
            value = np.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
        params[path] = jax.device_put(value.astype(dtype), spec.sharding(mesh) if mesh is not None else None)
    return params


def _random_id(config: TrunkConfig) -> str:
    return hashlib.sha256(f"random parameters, seed 0: {config!r}".encode()).hexdigest()


def _dtype(mesh: Mesh | None) -> np.dtype:
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    return np.dtype(np.float32) if platform == "cpu" else BFLOAT16
