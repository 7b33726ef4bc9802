"""The shadow network: its sizes for any trunk, and how it is trained.

Letters: D model width of the trunk, V its vocabulary, r rank of the shadow, m width of its MLP, Z draft vocabulary.
"""

from __future__ import annotations

import dataclasses

from .trunk import TrunkConfig

SHARE = 0.003
"""A shadow has at most this share of its trunk's parameters."""

PLACES = 8
"""Places of a chain of drafts that a shadow is trained for."""

CONFIDENCE_FEATURES = 3
"""What the confidence looks at beside the hidden vectors: log-probability, margin, entropy."""

TABLE = (17, 3, 15)
"""Entries of the lookup's table in one temperature class: match length, what the shadow says, place."""


@dataclasses.dataclass(frozen=True)
class ShadowConfig:
    """Sizes of a shadow."""

    d_model: int  # D
    rank: int  # r
    mlp: int  # m
    vocab: int  # Z
    temperatures: tuple[float, ...] = (0.0,)
    """The classes for which the gate is calibrated; the first is greedy."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in ("d_model", "rank", "mlp", "vocab"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} of a shadow must be at least 1, got {getattr(self, field)}")
        if not self.temperatures or self.temperatures[0] != 0.0 or min(self.temperatures) < 0:
            raise ValueError(f"temperatures of a shadow start with 0 (greedy), got {self.temperatures}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All trained parameters. The ids of the draft vocabulary are data, not parameters."""
        D, r, m = self.d_model, self.rank, self.mlp
        return {
            "context": (D, r), "project": (D, r), "recur": (r, 2 * r), "markov": (r, r), "up": (r, m), "down": (m, r),
            "gain_hidden": (D,), "gain_embedding": (D,), "gain_state": (r,),
            "gate_u": (r,), "gate_z": (r,), "bias_g": (r,), "bias_c": (r,),
            "start": (r,), "step": (PLACES, r), "scale": (),
            "conf": (2 * r + CONFIDENCE_FEATURES,), "conf_bias": (PLACES,),
            "gate": (len(self.temperatures), PLACES, 2), "lookup": (len(self.temperatures), *TABLE),
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """How many numbers were trained or calibrated."""
        count = 0
        for shape in self.shapes.values():
            size = 1
            for n in shape:
                size *= n
            count += size
        return count

    @classmethod
    def for_trunk(cls, trunk: TrunkConfig, temperatures: tuple[float, ...] = (0.0,), vocab: int = 4096) -> ShadowConfig:
        """The largest shadow that `SHARE` of the trunk's parameters allow: r a multiple of 32, m five sixths of it.

        The parameters are about 2 D r + 4.7 r^2: about r = 192 for a trunk of 135 million, 544 for 1.2 billion, 1,536
        for 8 billion. A trunk that is too small for any gets the smallest, r = 32 (tests run such trunks).
        """
        vocab = min(vocab, trunk.vocab_size)
        best = None
        for rank in range(32, trunk.d_model + 1, 32):
            mlp = max(16, round(rank * 5 / 6 / 16) * 16)
            config = cls(trunk.d_model, rank, mlp, vocab, temperatures, trunk.norm_eps)
            if best is None or config.parameters <= SHARE * trunk_parameters(trunk):
                best = config
        assert best is not None, "every trunk is at least 32 wide"
        return best


def trunk_parameters(trunk: TrunkConfig) -> int:
    """How many parameters a trunk has."""
    D, F, H, V = trunk.d_model, trunk.d_ff, trunk.head_dim, trunk.vocab_size
    heads, kv_heads = trunk.n_heads * H, trunk.n_kv_heads * H
    layer = D * heads * 2 + D * kv_heads * 2 + 3 * D * F + (4 if trunk.sandwich_norms else 2) * D
    layer += (heads + 2 * kv_heads if trunk.qkv_bias else 0) + (2 * H if trunk.qk_norm else 0)
    return trunk.n_layers * layer + V * D * (1 if trunk.tied_embeddings else 2) + D


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What a training run depends on, beside the trunk and prompts from outside."""

    seed: int = 0
    prompts: int = 9000
    """Built-in prompts."""
    tokens: int = 1_000_000
    """Tokens of answers after which no more are generated."""
    max_tokens: int = 192
    """Tokens of one answer."""
    test_tokens: int = 128
    """Tokens of one answer to a prompt that is only measured on."""
    temperatures: tuple[float, ...] = (0.8, 1.0)
    """At which part of the answers is sampled; the gate is calibrated for each."""
    sampled: float = 0.12
    """The share of prompts whose answers are sampled."""

    unroll: int = 6
    """Places of a chain in the loss."""
    thinning: float = 0.75
    """Each place of the unroll is trained on this share of the examples of the place before. Later places count less:
    they matter only when all before them were right. So dropping them is worth its time."""
    teacher: float = 0.5
    """Weight of the trunk's own probabilities (its likeliest tokens) in the loss; the rest is for the chosen token."""
    epochs: float = 4.0
    batch: int = 1024
    """Positions of an optimiser step."""
    learning_rate: float = 2e-3
    warmup: float = 0.04
    """Share of the steps in which the learning rate rises; then it falls to 0 along a cosine."""
    weight_decay: float = 0.05
    clip: float = 1.0
    """Largest norm of a gradient."""

    def __post_init__(self) -> None:
        for field in ("prompts", "tokens", "max_tokens", "batch"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not 1 <= self.unroll <= PLACES:
            raise ValueError(f"unroll must be between 1 and {PLACES}, got {self.unroll}")
        if not self.epochs > 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")
