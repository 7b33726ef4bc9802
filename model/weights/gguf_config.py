"""GGUF metadata -> `TrunkConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...configs.trunk import GLOBAL, LOCAL, RopeScaling, TrunkConfig
from .errors import ModelError

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")

_GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose query scale is not the head size; GGUF files tell it by its number of layers alone."""


class Fields:
    """Typed access to the metadata of one architecture; errors name the field."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"GGUF field 'general.architecture' is {self.architecture!r}; supported: {', '.join(ARCHITECTURES)}"
            )

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"GGUF field {key!r} must be a text, got {_shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number under `<architecture>.<key>`; an array of one repeated value counts as that value."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"GGUF field {self._name(key)!r} must be a positive whole number, got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; stored float32 values are read as their shortest decimal, so 1e-6 is 1e-6."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < 3.4e38):
            raise ModelError(f"GGUF field {self._name(key)!r} must be a positive number, got {_shown(value)}")
        return float(str(np.float32(value)))

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self._name(key) in self.metadata else None

    def has(self, key: str) -> bool:
        return self._name(key) in self.metadata

    def raw(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self._name(key), default)

    def refuse(self, key: str, allowed: Callable[[Any], bool], supported: str) -> None:
        """Raises unless the field is absent or `allowed`."""
        if self.has(key) and not allowed(self.raw(key)):
            raise ModelError(f"GGUF field {self._name(key)!r} is {_shown(self.raw(key))}; supported: {supported}")

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _scalar(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self._name(key), default)
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise ModelError(
                    f"GGUF field {self._name(key)!r} differs between layers, got {_shown(value)}; "
                    "supported: one value for all layers"
                )
            value = value[0].item()
        if value is None:
            raise ModelError(f"GGUF field {self._name(key)!r} is missing")
        return value


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def trunk_config(
    metadata: Mapping[str, Any],
    name: str,
    *,
    vocab_size: int,
    tied: bool,
    qkv_bias: bool,
    rope_factors: tuple[float, ...] = (),
) -> TrunkConfig:
    """The configuration of the decoder. What only the tensors tell is passed in: rows of the embedding, whether there
    is an output matrix, whether projections have biases, and the divisors in `rope_freqs.weight`."""
    fields = Fields(metadata)
    fields.refuse("expert_count", lambda n: n == 0, "0 (no mixture of experts)")
    n_heads = fields.integer("attention.head_count")
    d_model = fields.integer("embedding_length")
    head_dim = _head_dim(fields, d_model, n_heads)
    family = fields.architecture
    common: dict[str, Any] = dict(
        name=name,
        family=family,
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=fields.integer("block_count"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=fields.integer("feed_forward_length"),
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings=tied,
        qkv_bias=qkv_bias,
        qk_norm=family in ("qwen3", "gemma3"),
        rope_theta=fields.number("rope.freq_base", 1_000_000.0 if family == "gemma3" else 10_000.0),
        rope_scaling=_rope_scaling(fields, rope_factors),
    )
    if family == "gemma3":
        common |= _gemma3(fields, common)
    try:
        return TrunkConfig(**common)
    except ValueError as error:
        raise ModelError(f"the GGUF metadata describes no usable decoder: {error}") from error


def _head_dim(fields: Fields, d_model: int, n_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", max(1, d_model // n_heads))
    if not fields.has("attention.key_length") and d_model % n_heads:
        raise ModelError(f"GGUF fields give {d_model} as model width and {n_heads} heads, which does not divide evenly")
    fields.refuse("attention.value_length", lambda n: n == head_dim, f"{head_dim}, the size of the keys")
    fields.refuse("rope.dimension_count", lambda n: n == head_dim, f"{head_dim}, the whole head")
    return head_dim


def _rope_scaling(fields: Fields, factors: tuple[float, ...]) -> RopeScaling | None:
    if factors:
        return RopeScaling("factors", factors=factors)
    kind = fields.raw("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(
            f"GGUF field '{fields.architecture}.rope.scaling.type' is {_shown(kind)}; supported: none, linear, "
            "and divisors in rope_freqs.weight"
        )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if factor < 1:
        raise ModelError(f"GGUF field '{fields.architecture}.rope.scaling.factor' must be at least 1, got {factor}")
    return RopeScaling("linear", factor=factor) if factor != 1 else None


def _gemma3(fields: Fields, common: Mapping[str, Any]) -> dict[str, Any]:
    scale = common["head_dim"] ** -0.5
    if common["n_layers"] == _GEMMA3_27B_LAYERS:
        scale = (common["d_model"] / common["n_heads"]) ** -0.5
    return dict(
        activation="gelu_tanh",
        sandwich_norms=True,
        embed_scale=math.sqrt(common["d_model"]),
        attention_scale=fields.number("attention.scale", scale) if fields.has("attention.scale") else scale,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        sliding_window=fields.integer("attention.sliding_window"),
        layer_pattern=_pattern(fields, common["n_layers"]),
        rope_theta_local=fields.number("rope.freq_base_swa", 10_000.0),
    )


def _pattern(fields: Fields, n_layers: int) -> tuple[str, ...]:
    """An int n means n-1 local layers, then a global one; an array holds one flag per layer, true for local."""
    value = fields.raw("attention.sliding_window_pattern", 6)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.size == n_layers:
        return tuple(LOCAL if flag else GLOBAL for flag in value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1000:
        raise ModelError(
            f"GGUF field '{fields.architecture}.attention.sliding_window_pattern' must be a period or one flag for "
            f"each of the {n_layers} layers, got {_shown(value)}"
        )
    return (LOCAL,) * (value - 1) + (GLOBAL,)
