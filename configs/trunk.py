"""The trunk as data: every supported decoder family is one `TrunkConfig`, never a subclass.

Shape letters: D model width, F feed-forward width, H head size, K key/value heads, L layers, N query heads,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

GLOBAL = "global"
LOCAL = "local"

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to reach contexts longer than those of pre-training.

    `linear` divides every frequency by `factor`. `llama3` divides only the low frequencies and blends between
    `low_freq_factor` and `high_freq_factor` wavelengths of the original context (Llama 3.1 model card).
    `factors` is the per-frequency divisor some GGUF files carry (`rope_freqs.weight`); it replaces the formula.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "factors"):
            raise ValueError(f"rope scaling {self.kind!r} is not supported; supported: linear, llama3, factors")
        if self.kind != "factors" and not self.factor >= 1.0:
            raise ValueError(f"rope scaling factor must be at least 1, got {self.factor}")


@dataclasses.dataclass(frozen=True)
class TrunkConfig:
    """Everything that distinguishes one decoder from another, apart from its weights."""

    name: str
    family: str
    vocab_size: int  # V
    d_model: int  # D
    n_layers: int  # L
    n_heads: int  # N
    n_kv_heads: int  # K
    head_dim: int  # H
    d_ff: int  # F
    context_length: int
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    """Gemma 3: a norm after attention and after the feed-forward, besides those before."""
    embed_scale: float = 1.0
    """The embedding is multiplied by this (Gemma: the square root of D)."""
    attention_scale: float | None = None
    """Factor on query-key products; None means 1/sqrt(H)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Tokens a local layer sees, itself included."""
    layer_pattern: tuple[str, ...] = (GLOBAL,)
    """Repeated over the layers: Gemma 3 is five local layers, then a global one."""
    rope_theta_local: float | None = None
    """Rotary base of local layers; None means `rope_theta` (and its scaling)."""

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "d_ff",
            "context_length",
        ):
            if getattr(self, field) <= 0:
                raise ValueError(f"{self.name}: {field} must be positive, got {getattr(self, field)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.name}: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"{self.name}: head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(
                f"{self.name}: activation {self.activation!r} is not supported; supported: silu, gelu_tanh"
            )
        if not set(self.layer_pattern) <= {GLOBAL, LOCAL}:
            raise ValueError(f"{self.name}: layer_pattern may hold 'global' and 'local', got {self.layer_pattern}")
        if LOCAL in self.layer_pattern and not self.sliding_window:
            raise ValueError(f"{self.name}: local layers need sliding_window")

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.attention_scale if self.attention_scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """'global' or 'local' for each of the L layers."""
        return tuple(self.layer_pattern[i % len(self.layer_pattern)] for i in range(self.n_layers))
