"""GGUF's quantised blocks as integer groups, bit for bit: no float is computed on the way.

The blocks are those of ggml (ggml-common.h); their values are defined by `gguf.quants`. Every type here has a form in
kernels/linear/groups.py that holds each of its values exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...kernels.linear.groups import Groups, packed
from .errors import ModelError
from .stored import StoredTensor

Unpack = Callable[[np.ndarray], Groups]
"""From blocks `[rows, blocks of a row, bytes of a block]`."""


def _half(raw: np.ndarray) -> np.ndarray:
    """float16 `[rows, blocks]` from two bytes of each block."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0]


def _q4_0(raw: np.ndarray) -> Groups:
    scale = _half(raw[..., :2])
    return Groups("w4", raw[..., 2:], scale, _times_minus_eight(scale))


def _times_minus_eight(scale: np.ndarray) -> np.ndarray:
    """Exact unless it overflows: only the exponent changes."""
    if not np.all(np.abs(scale.astype(np.float32)) * 8 <= np.finfo(np.float16).max):
        raise ValueError("has scales beyond what its integers can be given in; supported: --quant none")
    return scale * np.float16(-8)


def _q4_1(raw: np.ndarray) -> Groups:
    return Groups("w4", raw[..., 4:], _half(raw[..., :2]), _half(raw[..., 2:4]))


def _fives(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Integers 0 to 31 `[rows, in]`: four bits of `low`, as in Q4_0, and one of the 32-bit words `high`."""
    both = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=-1)
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return (both | (fifth << np.uint8(4))).view(np.int8).reshape(len(low), -1)


def _q5_0(raw: np.ndarray) -> Groups:
    return Groups("w8", _fives(raw[..., 6:], raw[..., 2:6]) - np.int8(16), _half(raw[..., :2]))


def _q5_1(raw: np.ndarray) -> Groups:
    return Groups("w8m", _fives(raw[..., 8:], raw[..., 4:8]), _half(raw[..., :2]), _half(raw[..., 2:4]))


def _q8_0(raw: np.ndarray) -> Groups:
    return Groups("w8", raw[..., 2:].view(np.int8).reshape(len(raw), -1), _half(raw[..., :2]))


def _q4_k(raw: np.ndarray) -> Groups:
    rows = len(raw)
    scale, minimum = _six_bits(raw[..., 4:16])
    # A byte holds two neighbouring groups of 32; we want the two halves of one group.
    q = raw[..., 16:].reshape(rows, -1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None]
    q = packed((q & np.uint8(15)).reshape(rows, -1))
    return Groups("w4k", q, scale, minimum, _half(raw[..., :2]), _half(raw[..., 2:4]))


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima, uint8 `[rows, groups]`, from the 12 bytes of a block that hold 8 of each."""
    first, second, rest = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    top = np.uint8(0x30)
    scale = np.concatenate([first & np.uint8(63), (rest & np.uint8(15)) | ((first >> np.uint8(2)) & top)], -1)
    minimum = np.concatenate([second & np.uint8(63), (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & top)], -1)
    return scale.reshape(len(raw), -1), minimum.reshape(len(raw), -1)


def _q6_k(raw: np.ndarray) -> Groups:
    rows = len(raw)
    low = raw[..., :128].reshape(rows, -1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    high = raw[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    low = (low & np.uint8(15)).reshape(rows, -1)
    high = (high & np.uint8(3)).reshape(rows, -1)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).reshape(rows, -1)
    return Groups("w6k", q, scale, super_scale=_half(raw[..., 208:]))


UNPACK: dict[str, tuple[str, Unpack]] = {
    "Q4_0": ("w4", _q4_0),
    "Q4_1": ("w4", _q4_1),
    "Q5_0": ("w8", _q5_0),
    "Q5_1": ("w8m", _q5_1),
    "Q8_0": ("w8", _q8_0),
    "Q4_K": ("w4k", _q4_k),
    "Q6_K": ("w6k", _q6_k),
}
"""GGUF type -> the form that holds it, and how."""


def form_of(tensor: StoredTensor) -> str | None:
    """The form that holds a tensor's values exactly; None if there is none."""
    found = UNPACK.get(tensor.encoding.name)
    return found[0] if found else None


def groups_of(tensor: StoredTensor, raw: np.ndarray) -> Groups:
    """Rows of a tensor that has a form, from their bytes `[rows, bytes of a row]`."""
    blocks = raw.reshape(len(raw), -1, tensor.encoding.block_bytes)
    try:
        return UNPACK[tensor.encoding.name][1](blocks)
    except ValueError as error:
        raise ModelError(f"tensor {tensor.name!r} in {tensor.path} {error}") from error
