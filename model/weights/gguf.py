"""GGUF files: tensors in any of the types the `gguf` package can dequantise, and the configuration in the metadata."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ...configs.trunk import TrunkConfig
from ..gguf_header import GGUFError, TensorInfo, read_header
from .errors import ModelError
from .gguf_config import Fields, trunk_config
from .placement import Naming, place
from .source import TensorSource
from .stored import BF16, F16, F32, Encoding, OpenFiles, StoredTensor

NAMES = {
    "embed": "token_embd.weight",
    "layers.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.q": "blk.{i}.attn_q.weight",
    "layers.k": "blk.{i}.attn_k.weight",
    "layers.v": "blk.{i}.attn_v.weight",
    "layers.o": "blk.{i}.attn_output.weight",
    "layers.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.gate": "blk.{i}.ffn_gate.weight",
    "layers.up": "blk.{i}.ffn_up.weight",
    "layers.down": "blk.{i}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "layers.q_bias": "blk.{i}.attn_q.bias",
    "layers.k_bias": "blk.{i}.attn_k.bias",
    "layers.v_bias": "blk.{i}.attn_v.bias",
    "layers.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "layers.post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
    "head": "output.weight",
}
ROPE_FREQS = "rope_freqs.weight"

_ROTARY = frozenset({"layers.q", "layers.k", "layers.q_bias", "layers.k_bias"})
_DAMAGE = (GGUFError, ValueError, TypeError, IndexError, OverflowError, RecursionError, MemoryError)


def naming(architecture: str) -> Naming:
    """Llama files interleave the rotary pairs; norm weights of Gemma files already include the one that is added."""
    interleaved = _ROTARY if architecture == "llama" else frozenset()
    return Naming(NAMES, interleaved, ignored=lambda name: name == ROPE_FREQS)


@functools.cache
def encoding(number: int) -> Encoding | None:
    """How tensors of the GGUF type `number` are stored; None if the type is unknown or cannot be dequantised."""
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name in (plain := {"F32": F32, "F16": F16, "BF16": BF16}):
            return plain[kind.name]
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    # The package works on 16 rows at a time, which costs more than the work itself; blocks do not depend on rows, so
    # all bytes are given to it as one row.
    return Encoding(
        kind.name,
        block,
        block_bytes,
        lambda raw: gguf.quants.dequantize(raw.reshape(1, -1), kind).reshape(-1),
        np.dtype(np.float32),
    )


def supported_types() -> list[str]:
    """Names of the tensor types that can be loaded."""
    return [kind.name for kind in gguf.GGMLQuantizationType if encoding(int(kind)) is not None]


def open_gguf(path: Path) -> TensorSource:
    """Reads the header of `path` and checks every tensor against the configuration; no weights are read yet."""
    try:
        header = read_header(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        text = str(error)
        raise ModelError(text if isinstance(error, GGUFError) else f"{path} has a damaged header: {text}") from error
    fields = Fields(header.metadata)
    if (parts := fields.metadata.get("split.count", 1)) != 1:
        raise ModelError(
            f"GGUF field 'split.count' of {path} is {parts}; supported: one single file (join the parts with "
            "llama-gguf-split --merge)"
        )
    tensors = _tensors(path, header.tensors)
    config = _config(path, header.metadata, tensors)
    pieces = place(config, tensors, naming(fields.architecture))
    return TensorSource(path, config, tensors, pieces, metadata=header.metadata)


def _tensors(path: Path, infos: tuple[TensorInfo, ...]) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    tensors: dict[str, StoredTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ModelError(f"{path} is damaged: it has two tensors called {info.name!r}")
        kind = encoding(info.type)
        if kind is None:
            raise ModelError(
                f"tensor {info.name!r} in {path} has the unknown type {_type_name(info.type)}; supported: "
                + ", ".join(supported_types())
            )
        tensor = StoredTensor(info.name, info.shape, kind, path, info.offset)
        tensor.check_inside(size)
        tensors[info.name] = tensor
    return tensors


def _type_name(number: int) -> str:
    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return str(number)


def _config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> TrunkConfig:
    if (embed := tensors.get(NAMES["embed"])) is None:
        raise ModelError(f"the model has no tensor {NAMES['embed']!r}")
    return trunk_config(
        metadata,
        path.stem,
        vocab_size=embed.shape[0],
        tied=NAMES["head"] not in tensors,
        qkv_bias=NAMES["layers.q_bias"].format(i=0) in tensors,
        rope_factors=_rope_factors(tensors.get(ROPE_FREQS)),
    )


def _rope_factors(tensor: StoredTensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}; supported: one divisor a rotary pair")
    with OpenFiles() as files:
        values = tensor.read_rows(files[tensor.path], 0, 1, tensor.shape[0], np.dtype(np.float32))[0]
    factors = tuple(float(value) for value in values)
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelError(f"tensor {tensor.name!r} must hold positive divisors")
    return factors
