"""Noise for sampling: a function of seed, absolute position and vocabulary id, and of nothing else.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written out so
that every backend can give the same bits. Key: (low word of the seed, position); counter: (vocabulary id, high word
of the seed). The first output word becomes the noise, so one draft or one row can compute any part of it alone.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..numerics import log, log1m

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_BELOW_ONE = np.float32(1 - 2.0**-24)


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """One block of the cipher per element: uint32 words that broadcast together -> two uint32 words."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(_PARITY))
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation) | x1 >> np.uint32(32 - rotation)) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x0, x1


def gumbel(seed: Array, position: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise for one row: seed uint32[2] (low, high), position int32 -> float32 [V], always finite."""
    return gumbel_of(seed, position, lax.iota(jnp.uint32, vocab_size))


def gumbel_of(seed: Array, position: Array, ids: Array) -> Array:
    """The noise of the tokens `ids` (uint32, any shape) alone.

    With u = (word + 1/2) / 2^32 the noise is -log(-log(1 - u)): its upper tail, which decides rare events, has the
    full resolution of 2^-32 (largest value 22.9, smallest -2.8).
    """
    key = (seed[0], lax.bitcast_convert_type(jnp.asarray(position, jnp.int32), jnp.uint32))
    word, _ = threefry2x32(key, (ids, jnp.broadcast_to(seed[1], ids.shape)))
    # Both products are by powers of two and so exact. Words near 2^32 round up to it, hence the minimum.
    uniform = word.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return -log(-log1m(jnp.minimum(uniform, _BELOW_ONE)))


def seed_words(seed: int) -> np.ndarray:
    """A seed of up to 64 bits, negative ones modulo 2^64, as uint32[2] (low, high)."""
    seed %= 1 << 64
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request with several: the seed itself for the first one (0).

    Later ones encrypt (choice, 2^32 - 1) under the seed as the key.
    """
    if choice == 0:
        return seed % (1 << 64)
    low, high = seed_words(seed)
    with np.errstate(over="ignore"):
        x0, x1 = threefry2x32((low, high), (np.uint32(choice), np.uint32(0xFFFFFFFF)))  # type: ignore[arg-type]
    return int(x0) | int(x1) << 32
