"""The KV pool: how keys and values are stored.

Letters: H head size, K key/value heads, L layers, P block length (128).

One layout serves every platform: block, layer, head, token, and in the last axis the token's key and then its value.
A block holds all layers, so that it moves as one piece; a token's key and value lie side by side, which makes whole
vector lanes of heads of 64.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from ...configs.engine import BLOCK

DTYPES = ("float32", "bfloat16", "int8")


class KVPool(NamedTuple):
    """Blocks of keys and values. Also the contents of some blocks on their way in or out."""

    values: Any  # [blocks, L, K, P, 2H]: a token's key in the first H entries, its value in the last
    scales: Any = None  # int8 only, [blocks, L, K, 2, P]: what the stored keys (0) and values (1) are multiplied by


SCHEMA = 2
"""Of what the bytes of a pool mean. To be raised whenever the same keys and values become other bytes, so that nobody
reads what an earlier version has stored. 2: keys of int8 pools go through a Hadamard transform."""


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """The types of a pool. KV has this one form from the moment it is written, in every tier.

    int8: each token's key and value of a head has its own scale, the largest magnitude over 127 *rounded to float16*,
    and is divided by that and rounded to the nearest even integer. `scale_dtype` only says how the scale is kept: TPUs
    have no float16, and a float32 holds the same number.
    """

    dtype: str
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"a KV pool of {self.dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        if self.scale_dtype not in ("float16", "float32"):
            raise ValueError(f"KV scales of {self.scale_dtype!r} are not supported; supported: float16, float32")

    @property
    def quantised(self) -> bool:
        return self.dtype == "int8"

    @property
    def name(self) -> str:
        """What the key of a block and the numerics class say about its contents."""
        return f"{self.dtype} scaled per token" if self.quantised else self.dtype

    def pool(self, blocks: int, n_layers: int, n_kv_heads: int, head_dim: int) -> KVPool:
        """The abstract pool."""
        lead = (blocks, n_layers, n_kv_heads)
        values = jax.ShapeDtypeStruct((*lead, BLOCK, 2 * head_dim), np.dtype(self.dtype))
        if not self.quantised:
            return KVPool(values)
        return KVPool(values, jax.ShapeDtypeStruct((*lead, 2, BLOCK), np.dtype(self.scale_dtype)))

    def bytes_per_token(self, n_layers: int, n_kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        scale = 2 * np.dtype(self.scale_dtype).itemsize if self.quantised else 0
        return n_layers * n_kv_heads * (2 * head_dim * np.dtype(self.dtype).itemsize + scale)
