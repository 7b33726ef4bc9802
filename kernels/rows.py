"""Functions of single rows in plain JAX: the norm and the rotation, on whose bits nothing around them has a say."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
