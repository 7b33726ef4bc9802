"""Writes models: GGUF files, Hugging Face folders and Orbax folders from any source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ...configs.trunk import GLOBAL, LOCAL, TrunkConfig
from ..params import param_specs
from ..rope import frequencies
from . import gguf as gguf_files
from . import huggingface, orbax, safetensors
from .errors import ModelError
from .hf_config import to_hf
from .placement import interleaved_rows, stored_shape
from .source import Source
from .stored import BFLOAT16
from .text import Text, text_fields, write_text_files

Report = Callable[[str], None]
"""Called with the path of each parameter that is about to be written."""

_FLOAT32 = np.dtype(np.float32)
_GGUF_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def write_gguf(source: Source, text: Text, path: Path, dtype: np.dtype | None, report: Report) -> None:
    """Writes the GGUF file `path`. Matrices are stored in `dtype` (None: the smallest type that holds them unchanged),
    vectors in float32, as llama.cpp wants them."""
    config = source.config
    architecture = _gguf_architecture(config)
    naming = gguf_files.naming(architecture)
    writer = gguf.GGUFWriter(path, architecture)
    matrices = dtype if dtype is not None else source.exact_dtype("layers.q")
    for key, value in {**_gguf_fields(config, architecture), **text_fields(source, text)}.items():
        _add_field(writer, key, value)
    writer.add_file_type(_GGUF_TYPES[matrices.name][1])
    divisors = _rope_divisors(config)
    if divisors is not None:
        _add_tensor(writer, gguf_files.ROPE_FREQS, divisors.shape, _FLOAT32)
    layout = list(_layout(config, naming.names))
    types = {p: _FLOAT32 if len(shape) == 1 else dtype or source.exact_dtype(p) for p, _, _, shape in layout}
    for param, _, name, shape in layout:
        _add_tensor(writer, name, shape, types[param])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors)
    for param, array in _stored_arrays(source, layout, types, report):
        if param in naming.interleaved:
            heads = config.n_heads if param in ("layers.q", "layers.q_bias") else config.n_kv_heads
            array = array[interleaved_rows(heads, len(array))]
        writer.write_tensor_data(np.ascontiguousarray(array))
    writer.close()


def write_huggingface(source: Source, text: Text, folder: Path, dtype: np.dtype | None, report: Report) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into the new folder `folder`."""
    config = source.config
    _refuse_for_huggingface(config)
    offset = huggingface.norm_offset(config.family)
    layout = list(_layout(config, huggingface.names(config.family)))
    common = dtype or source.exact_dtype("layers.q")
    types = {p: dtype or _huggingface_dtype(source, p, common, offset) for p, *_ in layout}
    folder.mkdir(parents=True, exist_ok=True)
    bos_id = text.tokenizer.bos_id if text.tokenizer is not None else None
    described = to_hf(config, common.name, text.eos_ids, bos_id)
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    write_text_files(source, text, folder)

    def arrays() -> Iterator[np.ndarray]:
        read_types = {p: _FLOAT32 if offset and p.endswith("norm") else kind for p, kind in types.items()}
        for param, array in _stored_arrays(source, layout, read_types, report):
            if offset and param.endswith("norm"):
                array = (array - np.float32(offset)).astype(types[param])
            yield array

    shapes = {name: (shape, types[param]) for param, _, name, shape in layout}
    safetensors.write(folder / "model.safetensors", shapes, arrays())


def write_orbax(source: Source, text: Text, folder: Path, dtype: np.dtype | None, report: Report) -> None:
    """Writes an Orbax folder. It keeps the identity of the weights unless `dtype` rounds them."""
    paths = list(param_specs(source.config))
    exact = {path: source.exact_dtype(path) for path in paths}
    types = {path: dtype or exact[path] for path in paths}
    identity = source.weights_id()
    if any(types[path] not in (exact[path], _FLOAT32) for path in paths):
        identity = hashlib.sha256(f"{identity} rounded to {dtype}".encode()).hexdigest()

    def read(path: str, kind: np.dtype) -> np.ndarray:
        report(path)
        return source.read(path, kind)

    orbax.save(folder, source.config, types, read, identity)
    write_text_files(source, text, folder / "tokenizer")


_Layout = tuple[str, int | None, str, tuple[int, ...]]
"""Parameter, layer, tensor name, stored shape."""


def _layout(config: TrunkConfig, names: Any) -> Iterator[_Layout]:
    for path, spec in param_specs(config).items():
        if path.startswith("layers."):
            for layer in range(config.n_layers):
                yield path, layer, names[path].format(i=layer), stored_shape(path, spec.shape[1:])
        else:
            yield path, None, names[path], stored_shape(path, spec.shape)


def _stored_arrays(
    source: Source, layout: list[_Layout], types: dict[str, np.dtype], report: Report
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of `layout` in its order, in memory one parameter at a time."""
    loaded: tuple[str, np.ndarray] = ("", np.empty(0))
    for param, layer, _, shape in layout:
        if loaded[0] != param:
            report(param)
            loaded = (param, source.read(param, types[param]))
        yield param, (loaded[1] if layer is None else loaded[1][layer]).reshape(shape)


def _huggingface_dtype(source: Source, path: str, common: np.dtype, offset: float) -> np.dtype:
    """The type that holds the stored form of a parameter unchanged. Norms stored around zero are exact in the type of
    the other weights if they came from it."""
    exact = source.exact_dtype(path)
    if not offset or not path.endswith("norm") or exact == common:
        return exact
    around_zero = source.read(path, _FLOAT32) - np.float32(offset)
    return common if np.array_equal(around_zero.astype(common).astype(_FLOAT32), around_zero) else _FLOAT32


def _refuse_for_huggingface(config: TrunkConfig) -> None:
    if config.qkv_bias and config.family != "qwen2":
        raise ModelError(
            f"the model has biases on queries, keys and values, which Transformers' {config.family} has only together "
            "with one on the output; supported targets: gguf, orbax"
        )
    if config.sliding_window is not None and config.family == "llama":
        raise ModelError("Transformers' llama knows no sliding window; supported targets: gguf, orbax")


def _gguf_architecture(config: TrunkConfig) -> str:
    architecture = "llama" if config.family == "mistral" else config.family
    if architecture != "gemma3" and config.sliding_window is not None:
        raise ModelError(
            f"the model has a sliding window, which GGUF files of the architecture {architecture} cannot express; "
            "supported targets: hf, orbax"
        )
    return architecture


def _gguf_fields(config: TrunkConfig, architecture: str) -> dict[str, Any]:
    c = config
    fields: dict[str, Any] = {
        "block_count": c.n_layers,
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "feed_forward_length": c.d_ff,
        "vocab_size": c.vocab_size,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": c.rope_theta,
    }
    if c.rope_scaling is not None and c.rope_scaling.kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.rope_scaling.factor}
    if architecture == "gemma3":
        fields["attention.sliding_window"] = c.sliding_window
        if c.layer_pattern != (LOCAL,) * 5 + (GLOBAL,):
            fields["attention.sliding_window_pattern"] = [kind == LOCAL for kind in c.layer_types]
        if c.attention_scale is not None:
            fields["attention.scale"] = c.attention_scale
        if c.rope_theta_local is not None:
            fields["rope.freq_base_swa"] = c.rope_theta_local
        if c.attention_softcap is not None:
            fields["attn_logit_softcapping"] = c.attention_softcap
        if c.logit_softcap is not None:
            fields["final_logit_softcapping"] = c.logit_softcap
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    return {"general.name": c.name, **named}


def _rope_divisors(config: TrunkConfig) -> np.ndarray | None:
    """The content of `rope_freqs.weight`: what each frequency is divided by."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "linear":
        return None
    plain = frequencies(config.rope_theta, config.head_dim, None)
    return (plain / frequencies(config.rope_theta, config.head_dim, scaling)).astype(np.float32)


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = gguf.GGUFValueType
    if isinstance(value, np.ndarray | list):
        floats = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if values:
            of = kind.FLOAT32 if floats else {bool: kind.BOOL, int: kind.INT32, str: kind.STRING}[type(values[0])]
            writer.add_key_value(key, values, kind.ARRAY, of)
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kind.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kind.UINT32 if value >= 0 else kind.INT32)
    else:
        writer.add_key_value(key, value, kind.FLOAT32 if isinstance(value, float) else kind.STRING)


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    size = int(np.prod(shape)) * dtype.itemsize
    # The writer wants a numpy type it knows; what counts is the GGUF type beside it.
    plain = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    writer.add_tensor_info(name, shape, plain, size, _GGUF_TYPES[dtype.name][0])
