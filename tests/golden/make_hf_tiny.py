"""Writes `hf_<family>/`: tiny random models as Transformers saves them, with the logits it computes in float32.

    python tests/golden/make_hf_tiny.py

Needs the extra `[bench]`. Each folder holds config.json, safetensors and `golden.npz` with `ids` `[T]` int32 and
`logits` `[T, V]` float32. Between them they cover the families, the stored types (float32, float16, bfloat16), one file
and several, tied and untied heads, llama3 and linear rope scaling, biases, and windows shorter than the sequence.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TOKENS = 80
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False), torch.float32),
    "llama3": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        torch.bfloat16,
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=16, sliding_window=24), torch.float16),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), torch.bfloat16),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False), torch.float32),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 4},
            head_dim=16,
            sliding_window=24,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=GEMMA3_ROPE,
        ),
        torch.bfloat16,
    ),
}


def randomise(model: torch.nn.Module, zero_centred_norms: bool) -> None:
    """Weights of a size that makes every part matter: logits of random default weights are almost flat."""
    for name, value in model.named_parameters():
        noise = torch.randn_like(value)
        if "norm" in name:
            value.data = noise * 0.2 + (0.0 if zero_centred_norms else 1.0)
        elif value.ndim == 1:
            value.data = noise * 0.3
        else:
            value.data = noise * value.shape[-1] ** -0.5


def main() -> None:
    torch.manual_seed(0)
    for name, (kind, config, dtype) in MODELS.items():
        folder = Path(__file__).parent / f"hf_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        config._attn_implementation = "eager"
        model = kind(config)
        randomise(model, zero_centred_norms=name == "gemma3")
        model.to(dtype).save_pretrained(folder, max_shard_size="40KB" if name == "qwen3" else "1GB")
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ids = torch.randint(0, config.vocab_size, (TOKENS,))
        with torch.inference_mode():
            logits = model(ids[None]).logits[0]
        np.savez_compressed(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy())
        print(name, transformers.__version__, logits.std().item(), sorted(p.name for p in folder.iterdir()))


if __name__ == "__main__":
    main()
