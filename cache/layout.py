"""A block's contents as bytes. The only module of the cold tiers that knows that a block is keys and values.

Bytes are the pool's own, in its own order, so a full block is copied and never converted. A tail of n tokens keeps only
those: what lies behind them in the pool's block may belong to somebody else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..configs.engine import BLOCK

if TYPE_CHECKING:
    from ..kernels.attention import KVFormat


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a block: its shape with all `BLOCK` tokens, and which axis they lie along."""

    dtype: np.dtype
    shape: tuple[int, ...]
    token_axis: int

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        return (*self.shape[: self.token_axis], tokens, *self.shape[self.token_axis + 1 :])

    def nbytes(self, tokens: int) -> int:
        return math.prod(self.shape_of(tokens)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The arrays of a block, one after the other."""

    codec: str
    """Says which form the bytes have; stored with every block and compared when it is read."""
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, kv: KVFormat, n_layers: int, n_kv_heads: int, head_dim: int) -> BlockLayout:
        """The layout of a pool's blocks."""
        pool = kv.pool(1, n_layers, n_kv_heads, head_dim)
        parts = [Part(np.dtype(pool.values.dtype), tuple(pool.values.shape[1:]), 2)]
        if pool.scales is not None:
            parts.append(Part(np.dtype(pool.scales.dtype), tuple(pool.scales.shape[1:]), 3))
        scales = f" {kv.scale_dtype}" if kv.quantised else ""
        return cls(f"{kv.name}{scales} L{n_layers} K{n_kv_heads} H{head_dim} P{BLOCK}", tuple(parts))

    @functools.cached_property
    def block_bytes(self) -> int:
        return self.nbytes(BLOCK)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the first `tokens` tokens of a block."""
        return sum(part.nbytes(tokens) for part in self.parts)

    def pack(self, arrays: Sequence[np.ndarray], tokens: int = BLOCK) -> bytes:
        """The bytes of a block's first `tokens` tokens.

        Raises `ValueError` if the arrays are not a block of this layout.
        """
        if len(arrays) != len(self.parts):
            raise ValueError(f"a block of {self.codec} has {len(self.parts)} arrays, got {len(arrays)}")
        pieces = []
        for array, part in zip(arrays, self.parts, strict=True):
            if array.shape != part.shape or array.dtype != part.dtype:
                raise ValueError(f"expected {part.dtype} of shape {part.shape}, got {array.dtype} of {array.shape}")
            held = array if tokens == BLOCK else array[(slice(None),) * part.token_axis + (slice(tokens),)]
            pieces.append(np.ascontiguousarray(held).view(np.uint8).reshape(-1).data)
        return b"".join(pieces)

    def unpack(self, payload: bytes | memoryview | np.ndarray, tokens: int = BLOCK) -> tuple[np.ndarray, ...]:
        """The arrays of a block, as views of `payload` if it is full; behind a tail's tokens they are zero.

        Raises `ValueError` if `payload` has another length.
        """
        data = np.frombuffer(payload, np.uint8)
        if len(data) != self.nbytes(tokens):
            raise ValueError(f"{tokens} tokens of {self.codec} have {self.nbytes(tokens)} bytes, got {len(data)}")
        arrays, at = [], 0
        for part in self.parts:
            size = part.nbytes(tokens)
            held = data[at : at + size].view(part.dtype).reshape(part.shape_of(tokens))
            at += size
            if tokens < BLOCK:
                whole = np.zeros(part.shape, part.dtype)
                whole[(slice(None),) * part.token_axis + (slice(tokens),)] = held
                held = whole
            arrays.append(held)
        return tuple(arrays)
