"""The shadow: a small recurrent network that guesses the tokens which the trunk will choose next.

Letters: B chains, K places, D model width, V vocabulary, r rank, m width of the MLP, Z draft vocabulary.

It reads the trunk's last hidden state (once per pass) and the tokens drafted so far through the trunk's own frozen
embedding, and writes logits over the Z most frequent tokens through the same embedding: one matrix `project` [D, r]
serves both ways, so that tables of the vocabulary are derived from the trunk and cost the shadow no parameters.
`kernels/draft/base.py` has the equations. A first-order term (`markov`) beside the recurrence gets most of what a chain
of drafts needs (DeepSeek's DSpark drafter has such a head); reading only the last hidden state is what recurrent
drafters do (ReDrafter, Arctic's speculator), so no cache is needed and the context's length costs nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from ..configs.files import replacing
from ..configs.shadow import SHARE, ShadowConfig, trunk_parameters
from ..configs.trunk import TrunkConfig
from ..kernels import linear
from ..kernels.backend import Kernels
from ..kernels.draft import DraftWeights

FORMAT = "umbra-shadow-1"
HEADER = "shadow"
"""The entry of the file's metadata that describes the shadow, in JSON."""
FOLDER = Path(__file__).parent / "shadows"
"""Shadows that ship with the package, `<trunk>.safetensors`."""

CALIBRATED = ("conf", "conf_bias", "gate", "lookup")
"""Parameters that are kept in float32: probabilities depend on them."""

PLAIN = Kernels()
ROWS = 4096
"""Rows of the embedding that are read at once."""


class ShadowError(Exception):
    """A shadow cannot be used; one sentence that says why."""


class Cell(NamedTuple):
    """What a step needs apart from tables of the vocabulary: the norms' gains are folded in."""

    context: jax.Array  # [D, r]
    recur: jax.Array  # [r, 2r]
    markov: jax.Array  # [r, r]
    up: jax.Array  # [r, m]
    down: jax.Array  # [m, r]
    gate_u: jax.Array  # [r], as are those below
    gate_z: jax.Array
    bias_g: jax.Array
    bias_c: jax.Array
    start: jax.Array
    step: jax.Array  # [8, r]


class Shadow(nnx.Module):
    """The trained parameters by the names of `ShadowConfig.shapes`, float32, and the ids that it can draft."""

    def __init__(self, config: ShadowConfig, values: Mapping[str, Any], vocab: np.ndarray) -> None:
        self.config = config
        self.vocab = nnx.Variable(jnp.asarray(vocab, jnp.int32))
        for name, shape in config.shapes.items():
            value = jnp.asarray(values[name], jnp.float32)
            if value.shape != shape:
                raise ShadowError(f"the shadow's {name} has the shape {value.shape}, expected {shape}")
            setattr(self, name, nnx.Param(value))

    def __getitem__(self, name: str) -> jax.Array:
        """A parameter's array."""
        return getattr(self, name).get_value()

    def cell(self) -> Cell:
        given = {name: self[name] for name in Cell._fields}
        given["context"] = self["gain_hidden"][:, None] * self["context"]
        given["up"] = self["gain_state"][:, None] * self["up"]
        return Cell(**given)

    def read(self, embeddings: jax.Array) -> jax.Array:
        """u `[..., r]`, without the place's part, of rows of the trunk's embedding `[..., D]`."""
        return (rms(embeddings, self.config.norm_eps) * self["gain_embedding"]) @ self["project"]

    def head(self, embeddings: jax.Array) -> jax.Array:
        """The logits' matrix `[Z, r]` of the embeddings `[Z, D]` of the draft vocabulary."""
        return self["scale"] * (embeddings @ self["project"])


def rms(x: jax.Array, epsilon: float | jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def step(
    cell: Cell, state: jax.Array, u: jax.Array, z: jax.Array, epsilon: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The next state and the output vector o, `[B, r]` each, after the state and the reading u of the token before."""
    gate, candidate = jnp.split(state @ cell.recur, 2, axis=1)
    keep = jax.nn.sigmoid(gate + cell.gate_u * u + cell.gate_z * z + cell.bias_g)
    state = keep * state + (1 - keep) * jnp.tanh(candidate + u + z + cell.bias_c)
    return state, state + u @ cell.markov + jax.nn.silu(rms(state, epsilon) @ cell.up) @ cell.down


def initial(config: ShadowConfig, vocab: np.ndarray, seed: int = 0) -> Shadow:
    """A shadow that has learnt nothing. Its gate believes in nothing either."""
    rng = np.random.default_rng(seed)
    values = {name: np.zeros(shape, np.float32) for name, shape in config.shapes.items()}
    for name in ("context", "project", "recur", "markov", "up"):
        shape = values[name].shape
        values[name] = rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
    values["recur"] *= 0.5
    values["step"] = rng.normal(0, 0.02, values["step"].shape).astype(np.float32)
    for name in ("gain_hidden", "gain_embedding", "gain_state", "scale"):
        values[name] = np.ones(values[name].shape, np.float32)
    values["gate"][..., 0] = 1.0
    return Shadow(config, values, vocab)


@dataclasses.dataclass(frozen=True)
class Count:
    """How large a shadow is beside its trunk."""

    parameters: int
    trunk: int
    derived: int
    """Numbers in the tables that are computed from the trunk's frozen embedding when a shadow is loaded."""

    @property
    def share(self) -> float:
        return self.parameters / self.trunk

    def __str__(self) -> str:
        fits = "at most" if self.share <= SHARE else "more than"
        return (
            f"{self.parameters:,} parameters, {self.share:.4%} of the trunk's {self.trunk:,} ({fits} {SHARE:.1%}); "
            f"{self.derived:,} numbers are derived from the trunk's embedding and not counted"
        )


def count(config: ShadowConfig, trunk: TrunkConfig) -> Count:
    return Count(config.parameters, trunk_parameters(trunk), (trunk.vocab_size + config.vocab) * config.rank)


def embedding_rows(table: Any, ids: np.ndarray, kernels: Kernels = PLAIN) -> np.ndarray:
    """Rows of the trunk's embedding as it is stored, float32 `[len(ids), D]`."""
    take = jax.jit(lambda ids, table: linear.embed(ids, table, n_rows=jnp.int32(ROWS), backend=kernels.linear))
    padded = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % ROWS))
    parts = [np.asarray(take(padded[i : i + ROWS], table)) for i in range(0, len(padded), ROWS)]
    return np.concatenate(parts)[: len(ids)]


def drafting(shadow: Shadow, params: Mapping[str, Any], trunk: TrunkConfig, kernels: Kernels = PLAIN) -> DraftWeights:
    """The drafting form of a shadow: with tables for all of the trunk's vocabulary, in int8. `params` are the trunk's,
    laid out for `kernels`."""
    table = embedding_rows(params["embed"], np.arange(trunk.vocab_size), kernels)
    return drafting_from(shadow, table)


def drafting_from(shadow: Shadow, table: np.ndarray) -> DraftWeights:
    """The same from the trunk's whole embedding, float32 `[V, D]`."""
    read, read_scale = _int8(np.asarray(shadow.read(jnp.asarray(table))))
    vocab = np.asarray(shadow.vocab.get_value())
    head, head_scale = _int8(np.asarray(shadow.head(jnp.asarray(table[vocab]))))
    calibrated = {name: shadow[name] for name in CALIBRATED}
    return DraftWeights(
        read=read, read_scale=read_scale, head=head, head_scale=head_scale, vocab=jnp.asarray(vocab),
        epsilon=jnp.float32(shadow.config.norm_eps), **shadow.cell()._asdict(), **calibrated,
        gate_temperatures=jnp.asarray(shadow.config.temperatures, jnp.float32),
    )  # fmt: skip


def _int8(rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
    scale = np.maximum(np.abs(rows).max(axis=1), 1e-12) / 127
    return jnp.asarray(np.rint(rows / scale[:, None]).astype(np.int8)), jnp.asarray(scale.astype(np.float32))


def save_shadow(shadow: Shadow, path: Path, *, trunk: str, weights_id: str, notes: Mapping[str, Any]) -> None:
    """Write a shadow as one safetensors file: float16, what is calibrated float32. `notes` (plain data) say how it was
    made."""
    arrays = {
        name: np.asarray(shadow[name], np.float32 if name in CALIBRATED else np.float16)
        for name in shadow.config.shapes
    }
    arrays["vocab"] = np.asarray(shadow.vocab.get_value(), np.int32)
    header = {
        "format": FORMAT, "trunk": trunk, "weights_id": weights_id, "notes": dict(notes),
        "config": dataclasses.asdict(shadow.config),
    }  # fmt: skip
    # One entry: the library writes several in an order of its own, and the same shadow should give the same file.
    data = safetensors.numpy.save(arrays, {HEADER: json.dumps(header, sort_keys=True)})
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def load_shadow(path: Path, *, trunk: TrunkConfig, weights_id: str) -> Shadow:
    """The shadow in a file. Raises `ShadowError` if it was trained for other weights or does not fit the trunk."""
    header = _header(path)
    if header["weights_id"] != weights_id:
        raise ShadowError(
            f"the shadow {path} was trained for the trunk {header['trunk']} with the weights {header['weights_id']}; "
            f"these are {trunk.name} with {weights_id}; train one with scripts/train_shadow.py, or go without a shadow"
        )
    given = header["config"]
    config = ShadowConfig(**{**given, "temperatures": tuple(given["temperatures"])})
    if config.d_model != trunk.d_model:
        raise ShadowError(f"the shadow {path} is for a trunk of width {config.d_model}, this one has {trunk.d_model}")
    try:
        values = safetensors.numpy.load_file(path)
        return Shadow(config, values, values["vocab"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ShadowError(f"the shadow {path} is damaged: {error}") from error


def shadow_id(path: Path) -> str:
    """Names the shadow in a file: 16 hexadecimal digits of the SHA-256 of its bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def shipped(weights_id: str) -> Path | None:
    """The file of the shadow that ships with the package for these weights, if there is one."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        if _header(path)["weights_id"] == weights_id:
            return path
    return None


def _header(path: Path) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ShadowError(f"cannot read the shadow {path}: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ShadowError(f"{path} is not a shadow of the format {FORMAT}; scripts/train_shadow.py writes such files")
    return header
