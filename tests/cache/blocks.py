"""Blocks for the tests of tiers: small arrays of made-up contents that follow from the token ids."""

from __future__ import annotations

import hashlib

import numpy as np

from umbra.cache.keys import Identity
from umbra.cache.layout import BlockLayout, Part
from umbra.cache.record import payload_crc

# That of an int8 pool of 2 layers and one head of 8; written down here, so that a process needs no JAX for it.
LAYOUT = BlockLayout(
    "int8 scaled per token float16 L2 K1 H8 P128",
    (Part(np.dtype(np.int8), (2, 1, 128, 16), 2), Part(np.dtype(np.float16), (2, 1, 2, 128), 3)),
)
ALICE = Identity(b"a" * 16, b"m" * 32)
BOB = Identity(b"b" * 16, b"m" * 32)


def tokens(n, seed=0):
    """`n` token ids; sequences of the same seed begin alike."""
    return np.random.default_rng(seed).integers(0, 50_000, n)


def contents(info, layout=LAYOUT):
    """A block's payload: what a model would compute follows from the key."""
    seed = int.from_bytes(hashlib.sha256(info.parent + info.tokens[:4]).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 100, part.shape).astype(part.dtype) for part in layout.parts]
    return layout.pack(arrays, info.n_tokens)


def put_chain(tier, chain, layout=LAYOUT):
    """Put all blocks of a chain; what became of each."""
    results = []
    for info in chain:
        payload = contents(info, layout)
        results.append(tier.put(info, payload, payload_crc(payload)))
    return results
