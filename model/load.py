"""From a model's name to everything needed to serve it: weights on their devices, tokenizer, chat template."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..configs.embedding import FILE, EmbeddingForm, parse_embedding
from ..configs.models import named
from ..configs.trunk import TrunkConfig
from ..kernels.backend import Kernels
from ..kernels.draft import DraftWeights
from .chat_template import ChatTemplate
from .frequency import frequent_tokens
from .shadow import ShadowError, count, drafting, load_shadow, shadow_id, shipped
from .tokenizer import Tokenizer
from .weights import fetch, huggingface
from .weights.assemble import Progress
from .weights.errors import ModelError
from .weights.gguf import open_gguf
from .weights.orbax import DESCRIPTION, open_orbax
from .weights.plan import QUANTS, check_mesh, floats, plan
from .weights.random import RandomSource
from .weights.source import Source
from .weights.text import Text, load_text

log = logging.getLogger(__name__)

__all__ = ["QUANTS", "Model", "ModelError", "load_model", "open_source", "random_params"]

PLAIN = Kernels()
"""Plain JAX for everything."""

RANDOM = ("tiny", "tiny-gemma")
"""Configurations that `load_model` fills with random numbers."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A trunk with its parameters in place: arrays, or quantised leaves (kernels/linear/weight.py). `quant` is the
    resolved form of the weights in words, for example "float32" or "int8 in groups of 32"; `eos_ids` end a text or a
    turn; `tokenizer` and `chat_template` are None where the files have none."""

    name: str
    config: TrunkConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    weights_id: str
    quant: str
    kernels: Kernels = PLAIN
    """What the parameters are laid out for."""
    shadow: DraftWeights | None = None
    """The shadow network, ready to draft; None: there is none for this trunk."""
    shadow_id: str = ""
    """Which shadow it is: `model/shadow.py: shadow_id`; empty without one."""


def load_model(
    spec: str,
    *,
    quant: str = "auto",
    kernels: Kernels = PLAIN,
    embedding: str | EmbeddingForm = FILE,
    shadow: str | Path = "auto",
    mesh: Mesh | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Model:
    """Loads `smollm2`, `gemma3-270m`, `hf:ORG/NAME`, a `.gguf` file, a Hugging Face or Orbax folder, or `tiny` and
    `tiny-gemma` (random weights from `seed`).

    `quant` is "auto", "none", "int8" or "int4" (weights/plan.py says what they are), `embedding` the form of the table
    of tokens (configs/embedding.py) and `kernels` what will run the model: its backend of linear layers decides how
    quantised weights lie in memory. `shadow` is "auto" (the one that ships with the package for these weights, if there
    is one), "off", or a file that scripts/train_shadow.py wrote for these weights. Parameters are
    sharded over `mesh` or on the default device. `progress` is called with what is done and how much of how much.
    Raises `ModelError`.
    """
    source = RandomSource(named(spec), seed) if spec in RANDOM else open_source(spec, progress)
    text = Text() if isinstance(source, RandomSource) else load_text(source)
    config = source.config
    planned = plan(
        source,
        quant,
        kernels.linear,
        mesh.devices.flat[0].platform if mesh is not None else jax.default_backend(),
        embedding=_embedding(embedding),
        frequent=lambda n: frequent_tokens(n, config.vocab_size, text.tokenizer),
    )
    if mesh is not None:
        check_mesh(config, planned.plans, mesh.shape["model"])
    params = source.load(planned.plans, mesh, progress)
    weights_id = source.weights_id()
    return Model(
        spec, config, params, text.tokenizer, text.chat_template, text.eos_ids, weights_id, planned.words, kernels,
        *_shadow(shadow, config, params, weights_id, kernels),
    )  # fmt: skip


def _shadow(
    wanted: str | Path, config: TrunkConfig, params: dict[str, Any], weights_id: str, kernels: Kernels
) -> tuple[DraftWeights | None, str]:
    if wanted == "off":
        return None, ""
    try:
        path = shipped(weights_id) if wanted == "auto" else Path(wanted).expanduser()
        if path is None:
            return None, ""
        trained = load_shadow(path, trunk=config, weights_id=weights_id)
    except ShadowError as error:
        raise ModelError(str(error)) from error
    log.info("shadow %s: %s", path.name, count(trained.config, config))
    # One device's copy of the table: it is read by a function that knows nothing of a mesh.
    table = jax.tree.map(np.asarray, params["embed"])
    return drafting(trained, {"embed": table}, config, kernels), shadow_id(path)


def _embedding(given: str | EmbeddingForm) -> EmbeddingForm:
    try:
        return parse_embedding(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ModelError(str(error)) from error


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
    """Random parameters of one float type, the same for the same `seed` on every machine."""
    return RandomSource(config, seed).load(floats(config, np.dtype(dtype)), mesh)
