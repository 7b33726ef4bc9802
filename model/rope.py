"""Rotary position embeddings from two small tables.

The angle of position p is split as p = 128 j + i, and cosine and sine of the sum follow from those of the parts. Both
parts are tabulated in float64 on the host, so that angles are accurate at any position (a float32 product of position
and frequency is off by 1e-3 rad at position 30,000) and no device computes a cosine.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ..configs.engine import BLOCK
from ..configs.trunk import RopeScaling, TrunkConfig
from ..kernels.numerics import product
from ..kernels.rows import rotate

__all__ = ["cos_sin", "frequencies", "rotate"]


def frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of each of the H/2 rotated pairs, float64."""
    freqs = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / np.asarray(scaling.factors, np.float64)
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between blended.
    wavelength = 2 * math.pi / freqs
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = freqs * (np.clip(smooth, 0, 1) + (1 - np.clip(smooth, 0, 1)) / scaling.factor)
    return blended


@functools.lru_cache(maxsize=8)
def _tables(theta: float, head_dim: int, scaling: RopeScaling | None, context: int) -> tuple[np.ndarray, np.ndarray]:
    freqs = frequencies(theta, head_dim, scaling)

    def cos_sin(positions: np.ndarray) -> np.ndarray:
        angles = positions[:, None] * freqs
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)  # [positions, 2, H/2]

    return cos_sin(np.arange(-(-context // BLOCK)) * BLOCK), cos_sin(np.arange(BLOCK))


def cos_sin(config: TrunkConfig, positions: jax.Array, context: int, *, local: bool) -> jax.Array:
    """Cosine and sine `[T, 2, H/2]` of the angles at `positions` `[T]`, for local or global layers."""
    if local and config.rope_theta_local is not None:
        coarse, fine = _tables(config.rope_theta_local, config.head_dim, None, context)
    else:
        coarse, fine = _tables(config.rope_theta, config.head_dim, config.rope_scaling, context)
    at = jnp.maximum(positions, 0)
    a, b = jnp.asarray(coarse)[at // BLOCK], jnp.asarray(fine)[at % BLOCK]
    cos = product(a[:, 0], b[:, 0]) - product(a[:, 1], b[:, 1])
    sin = product(a[:, 1], b[:, 0]) + product(a[:, 0], b[:, 1])
    return jnp.stack([cos, sin], axis=1)
