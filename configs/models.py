"""Named trunks. A new size is one block of data; `python scripts/compile_tpu.py` accepts every name here."""

from __future__ import annotations

import math
import os
from typing import Any

from .trunk import GLOBAL, LOCAL, RopeScaling, TrunkConfig

_LLAMA3_ROPE = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
_LLAMA32_ROPE = RopeScaling("llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
_GEMMA3: dict[str, Any] = dict(
    family="gemma3",
    norm_eps=1e-6,
    activation="gelu_tanh",
    tied_embeddings=True,
    qk_norm=True,
    sandwich_norms=True,
    rope_theta=1_000_000.0,
    rope_theta_local=10_000.0,
    layer_pattern=(LOCAL,) * 5 + (GLOBAL,),
)

_ALL = (
    # Random weights for tests: every feature of the step at a size that runs in milliseconds.
    TrunkConfig(
        name="tiny",
        family="llama",
        vocab_size=512,
        d_model=64,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=128,
        context_length=2048,
        tied_embeddings=True,
    ),
    TrunkConfig(
        name="tiny-gemma",
        vocab_size=512,
        d_model=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=128,
        context_length=2048,
        sliding_window=48,
        embed_scale=8.0,
        **{**_GEMMA3, "layer_pattern": (LOCAL, GLOBAL)},
    ),
    TrunkConfig(
        name="smollm2-135m",
        family="llama",
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        context_length=8192,
        tied_embeddings=True,
        rope_theta=100_000.0,
    ),
    TrunkConfig(
        name="gemma3-270m",
        vocab_size=262144,
        d_model=640,
        n_layers=18,
        n_heads=4,
        n_kv_heads=1,
        head_dim=256,
        d_ff=2048,
        context_length=32768,
        sliding_window=512,
        embed_scale=math.sqrt(640),
        attention_scale=256**-0.5,
        **_GEMMA3,
    ),
    TrunkConfig(
        name="llama-3.1-8b",
        family="llama",
        vocab_size=128256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        context_length=131072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_ROPE,
    ),
    TrunkConfig(
        name="llama-3.2-1b",
        family="llama",
        vocab_size=128256,
        d_model=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        d_ff=8192,
        context_length=131072,
        tied_embeddings=True,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA32_ROPE,
    ),
    TrunkConfig(
        name="llama-2-7b",
        family="llama",
        vocab_size=32000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        head_dim=128,
        d_ff=11008,
        context_length=4096,
    ),
    TrunkConfig(
        name="mistral-7b",
        family="mistral",
        vocab_size=32768,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        context_length=32768,
        rope_theta=1_000_000.0,
    ),
    TrunkConfig(
        name="qwen2.5-0.5b",
        family="qwen2",
        vocab_size=151936,
        d_model=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        head_dim=64,
        d_ff=4864,
        context_length=32768,
        norm_eps=1e-6,
        tied_embeddings=True,
        qkv_bias=True,
        rope_theta=1_000_000.0,
    ),
    TrunkConfig(
        name="qwen3-0.6b",
        family="qwen3",
        vocab_size=151936,
        d_model=1024,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        d_ff=3072,
        context_length=40960,
        norm_eps=1e-6,
        tied_embeddings=True,
        qk_norm=True,
        rope_theta=1_000_000.0,
    ),
    TrunkConfig(
        name="qwen3-8b",
        family="qwen3",
        vocab_size=151936,
        d_model=4096,
        n_layers=36,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=12288,
        context_length=40960,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1_000_000.0,
    ),
)

NAMED: dict[str, TrunkConfig] = {config.name: config for config in _ALL}


def named(name: str) -> TrunkConfig:
    """The configuration called `name`; a `ValueError` lists the known names."""
    if name not in NAMED:
        raise ValueError(f"no configuration is called {name!r}; known: {', '.join(NAMED)}")
    return NAMED[name]


def served_name(spec: str) -> str:
    """The model id clients use: the name itself, or the last part of a path or hub name without `.gguf`."""
    last = os.path.basename(spec.removeprefix("hf:").rstrip("/"))
    return last.removesuffix(".gguf") or "model"
