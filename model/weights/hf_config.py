"""`config.json` of a Hugging Face folder <-> `TrunkConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...configs.trunk import GLOBAL, LOCAL, RopeScaling, TrunkConfig
from .errors import ModelError

MODEL_TYPES = ("gemma3", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_LAYER_TYPES = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


class _Fields:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"config.json field {key!r} must be a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3.4e38:
            raise ModelError(f"config.json field {key!r} must be a positive number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json field {key!r} must be true or false, got {value!r}")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        value = self.values.get(key) or default
        if not isinstance(value, str) or value not in choices:
            raise ModelError(f"config.json field {key!r} is {value!r}; supported: {', '.join(choices)}")
        return choices[value]


def trunk_config(config: Mapping[str, Any], name: str) -> TrunkConfig:
    """The decoder that `config.json` describes; of Gemma 3's image models, the text part."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"config.json field 'model_type' is {kind!r}; supported: {', '.join(MODEL_TYPES)}")
    if config.get("quantization_config"):
        raise ModelError(
            "config.json field 'quantization_config' is set; supported: unquantised float32, float16 and bfloat16 "
            "folders, or quantised GGUF files"
        )
    if kind == "gemma3":
        config = config.get("text_config") or {}
        if not isinstance(config, Mapping):
            raise ModelError(f"config.json field 'text_config' must be an object, got {config!r}")
    fields = _Fields(config)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"config.json field 'partial_rotary_factor' is {config['partial_rotary_factor']}; supported: 1"
        )
    family = "gemma3" if kind.startswith("gemma3") else kind
    common = _common(fields, name, family)
    common |= _gemma3(fields, common) if family == "gemma3" else _llama_like(fields, common)
    try:
        return TrunkConfig(**common)
    except ValueError as error:
        raise ModelError(f"config.json describes no usable decoder: {error}") from error


def _common(fields: _Fields, name: str, family: str) -> dict[str, Any]:
    n_heads, d_model = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    default_head = {"qwen3": 128, "gemma3": 256}.get(family, max(1, d_model // n_heads))
    return dict(
        name=name,
        family=family,
        vocab_size=fields.integer("vocab_size", 262_208 if family == "gemma3" else None),
        d_model=d_model,
        n_layers=fields.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 4 if family == "gemma3" else n_heads),
        head_dim=fields.integer("head_dim", default_head),
        d_ff=fields.integer("intermediate_size"),
        context_length=fields.integer("max_position_embeddings", 131_072 if family == "gemma3" else None),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=family in ("qwen3", "gemma3"),
    )


def _llama_like(fields: _Fields, common: Mapping[str, Any]) -> dict[str, Any]:
    family = common["family"]
    rope = _rope_parameters(fields)
    windows = _layer_pattern(fields, common["n_layers"])
    if windows is None:
        windows = (GLOBAL,)
        window = fields.values.get("sliding_window")
        if family == "mistral" and window is not None:
            windows = (LOCAL,)
        elif fields.flag("use_sliding_window", False) and window is not None:
            first = fields.integer("max_window_layers", 28)
            windows = tuple(LOCAL if i >= first else GLOBAL for i in range(min(common["n_layers"], 100_000)))
    return dict(
        activation=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or fields.flag("attention_bias", False),
        rope_theta=_theta(rope, fields.number("rope_theta", 10_000.0)),
        rope_scaling=_scaling(rope, fields),
        layer_pattern=_shortest(windows),
        sliding_window=fields.integer("sliding_window") if LOCAL in windows else None,
    )


def _gemma3(fields: _Fields, common: Mapping[str, Any]) -> dict[str, Any]:
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError("config.json field 'use_bidirectional_attention' is true; supported: false")
    rope = _rope_parameters(fields)
    nested = "full_attention" in rope or "sliding_attention" in rope
    far, near = (rope.get("full_attention") or {}, rope.get("sliding_attention") or {}) if nested else (rope, {})
    if _scaling(near, fields) is not None:
        raise ModelError("config.json scales the rotary embedding of sliding_attention layers; supported: default")
    pattern = _layer_pattern(fields, common["n_layers"])
    if pattern is None:
        pattern = (LOCAL,) * (fields.integer("sliding_window_pattern", 6) - 1) + (GLOBAL,)
    return dict(
        activation=fields.choice("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=fields.flag("attention_bias", False),
        sandwich_norms=True,
        embed_scale=math.sqrt(common["d_model"]),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        rope_theta=_theta(far, fields.number("rope_theta", 1_000_000.0)),
        rope_theta_local=_theta(near, fields.number("rope_local_base_freq", 10_000.0)),
        rope_scaling=_scaling(far, fields),
        sliding_window=fields.integer("sliding_window", 4096),
        layer_pattern=_shortest(pattern),
    )


def _layer_pattern(fields: _Fields, n_layers: int) -> tuple[str, ...] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != n_layers or not set(map(str, kinds)) <= set(_LAYER_TYPES):
        raise ModelError(
            f"config.json field 'layer_types' must list one of {', '.join(_LAYER_TYPES)} for each of the "
            f"{n_layers} layers, got {str(kinds)[:60]}"
        )
    return tuple(_LAYER_TYPES[kind] for kind in kinds)


def _shortest(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that repeats to `pattern`."""
    for period in range(1, min(len(pattern), 64) + 1):
        if all(kind == pattern[i % period] for i, kind in enumerate(pattern)):
            return pattern[:period]
    return pattern


def _rope_parameters(fields: _Fields) -> Mapping[str, Any]:
    """`rope_parameters` (Transformers 5) or `rope_scaling` (before)."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.values.get(key)
        if value is not None:
            if not isinstance(value, Mapping):
                raise ModelError(f"config.json field {key!r} must be an object, got {value!r}")
            return value
    return {}


def _theta(rope: Mapping[str, Any], default: float) -> float:
    return _Fields(rope).number("rope_theta", default)


def _scaling(rope: Mapping[str, Any], fields: _Fields) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers = _Fields(rope)
    if numbers.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"config.json field 'partial_rotary_factor' is {rope['partial_rotary_factor']}; supported: 1")
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=numbers.number("factor"))
        if kind == "llama3":
            context = fields.values.get("original_max_position_embeddings")
            return RopeScaling(
                "llama3",
                factor=numbers.number("factor"),
                low_freq_factor=numbers.number("low_freq_factor"),
                high_freq_factor=numbers.number("high_freq_factor"),
                original_context=numbers.integer("original_max_position_embeddings", context),
            )
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from error
    raise ModelError(f"config.json scales the rotary embedding by {kind!r}; supported: default, linear, llama3")


def to_hf(config: TrunkConfig, dtype: str, eos_ids: tuple[int, ...], bos_id: int | None) -> dict[str, Any]:
    """The `config.json` that describes `config`; a `ModelError` if Transformers has no such model."""
    c = config
    scaling = c.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        raise ModelError(
            "the model scales its rotary frequencies by a table (rope_freqs.weight), which config.json cannot express; "
            "supported targets: gguf, orbax"
        )
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope |= dict(
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_context,
        )
    out: dict[str, Any] = dict(
        architectures=[_ARCHITECTURES[c.family]],
        model_type="gemma3_text" if c.family == "gemma3" else c.family,
        dtype=dtype,
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.d_ff,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied_embeddings,
        attention_bias=c.qkv_bias,
        rope_theta=c.rope_theta,
        bos_token_id=bos_id,
        eos_token_id=list(eos_ids) or None,
    )
    kinds = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
    if c.family == "gemma3":
        out |= dict(
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=_whole(c.scale**-2),
            attn_logit_softcapping=c.attention_softcap,
            final_logit_softcapping=c.logit_softcap,
            sliding_window=c.sliding_window,
            layer_types=[kinds[kind] for kind in c.layer_types],
            rope_local_base_freq=c.rope_theta_local,
            rope_scaling=rope if scaling is not None else None,
        )
        return out
    out |= dict(hidden_act="silu", rope_scaling=rope if scaling is not None else None)
    if c.sliding_window is not None:
        out |= dict(sliding_window=c.sliding_window, layer_types=[kinds[kind] for kind in c.layer_types])
        out |= dict(use_sliding_window=True) if c.family != "mistral" else {}
    elif c.family == "mistral":
        out |= dict(sliding_window=None)
    return out


def _whole(value: float) -> int:
    """`value` without what a square and a square root in float32 left; Transformers takes only whole numbers here."""
    if abs(value - round(value)) > 1e-6 * value:
        raise ModelError(f"the model's query scale is 1/sqrt({value}), config.json can only express whole numbers")
    return round(value)
