"""Functions of single rows in plain JAX: norm, rotation, transform, on whose bits nothing around them has a say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .numerics import ordered_sum, product


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019), float32."""
    mean = product(ordered_sum(product(x, x)), jnp.float32(1.0 / x.shape[-1]))
    return product(x * (1.0 / jnp.sqrt(mean + eps))[..., None], weight.astype(jnp.float32))


def rotate(x: jax.Array, cos_sin: jax.Array) -> jax.Array:
    """`x` `[T, heads, H]` with each pair (i, i + H/2) turned by its angle, of which `cos_sin` `[T, 2, H/2]` holds
    cosine and sine."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([product(low, cos) - product(high, sin), product(high, cos) + product(low, sin)], axis=-1)


def spread(x: jax.Array) -> jax.Array:
    """The Hadamard transform over the last axis, float32, in parts of the largest power of two that divides its size.

    It is orthonormal, so products of two vectors stay the same, and it spreads an entry that is far greater than the
    others over all of them. That costs int8 less: keys of one scale have a quarter of the error (Ashkboos et al. 2024,
    "QuaRot").
    """
    size = x.shape[-1]
    part = size & -size
    lead, step = x.shape[:-1], 1
    while step < part:
        a, b = jnp.moveaxis(x.reshape(*lead, size // (2 * step), 2, step), -2, 0)
        x = jnp.stack([a + b, a - b], axis=-2).reshape(*lead, size)
        step *= 2
    return x * np.float32(part**-0.5)
