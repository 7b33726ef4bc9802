"""The layout of quantised matrices that the native kernels read: blocks of 16 output channels. numpy only.

A block holds its channels' inputs in groups of 32, one after the other, so that a product reads memory in one piece.
Letters: `out` output channels, G = in / 32 groups of a channel.

blocks  uint8 [out/16, G, bytes]    one group of 16 channels: integers, then scales and minima, each for 16 channels
supers  uint8 [out/16, G/8, bytes]  forms of 256 inputs: super-scales, then super-minima, float16 of 16 channels

form  integers                                                             scales        minima        supers
w4    64 bytes for each j = 0..3: inputs 4j..4j+3 of channel 0, 1, ..;     f16           f16
      inputs 4j+16.. in the high half of a byte
w8    64 bytes for each j = 0..7: inputs 4j..4j+3 of channel 0, 1, ..      f16
w8m   as w8                                                                f16           f16
w4k   as w4                                                                u8            u8            f16, f16
w6k   as w8                                                                i8, twice     (for each half of a group) f16

Channels past the matrix's end are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .groups import GROUP, SUPER, Groups
from .layouts import CHANNELS, Parts

FORMS = ("w4", "w8", "w8m", "w4k", "w6k")
"""In the order of `Form` in native/src/linear.h."""

_FOUR_BITS = ("w4", "w4k")
_INTEGERS = {form: CHANNELS * GROUP // (2 if form in _FOUR_BITS else 1) for form in FORMS}
_AFTER = {"w4": 64, "w8": 32, "w8m": 64, "w4k": 32, "w6k": 32}
"""Bytes of scales and minima."""
_SUPERS = {"w4k": 64, "w6k": 32}


def shapes(form: str, out: int, inputs: int) -> Parts:
    """Shape and type of each part of one matrix. Raises `ValueError` if the form cannot have so many inputs."""
    if form not in FORMS:
        raise ValueError(f"form {form!r} cannot be packed for native kernels; supported: {', '.join(FORMS)}")
    unit = SUPER if form in _SUPERS else GROUP
    if inputs % unit:
        raise ValueError(f"a matrix of the form {form} needs a multiple of {unit} inputs, got {inputs}")
    blocks, byte = -(-out // CHANNELS), np.dtype(np.uint8)
    parts: Parts = {"blocks": ((blocks, inputs // GROUP, _INTEGERS[form] + _AFTER[form]), byte)}
    if form in _SUPERS:
        parts["supers"] = ((blocks, inputs // SUPER, _SUPERS[form]), byte)
    return parts


def pack(groups: Groups) -> dict[str, np.ndarray]:
    """The parts of one matrix."""
    parts = {
        name: np.empty(shape, dtype) for name, (shape, dtype) in shapes(groups.form, groups.out, groups.inputs).items()
    }
    pack_into(groups, parts, 0)
    return parts


def pack_into(groups: Groups, parts: Mapping[str, np.ndarray], first_block: int) -> None:
    """Writes output channels from `16 first_block` on; if they are no multiple of 16, zeros behind them."""
    form, rows = groups.form, -(-groups.out // CHANNELS)
    target = parts["blocks"][first_block : first_block + rows]
    size = _INTEGERS[form]
    words = groups.q.reshape(groups.out, target.shape[1], -1).view(np.uint32)  # [out, G, words of four inputs]
    _fill(target[..., :size], words)
    at = size
    for part in (groups.scale, groups.min):
        if part is None:
            continue
        per_group = part.reshape(groups.out, target.shape[1], -1)
        width = CHANNELS * per_group.shape[2] * part.itemsize
        _fill(target[..., at : at + width], per_group)
        at += width
    supers = [part for part in (groups.super_scale, groups.super_min) if part is not None]
    for i, part in enumerate(supers):
        width = CHANNELS * part.itemsize
        _fill(parts["supers"][first_block : first_block + rows, :, i * width : (i + 1) * width], part[..., None])


def _fill(target: np.ndarray, values: np.ndarray) -> None:
    """`values` `[out, G, n]` into bytes `[out/16, G, n 16 itemsize]`: n times one item of each channel."""
    blocks, width = target.shape[:2]
    out, _, count = values.shape
    # A view: the bytes that belong together lie side by side in every group.
    view = np.lib.stride_tricks.as_strided(
        target[..., : values.itemsize].view(values.dtype)[..., 0],
        (blocks, width, count, CHANNELS),
        (*target.strides[:2], CHANNELS * values.itemsize, values.itemsize),
    )
    whole = out // CHANNELS
    blocked = values[: whole * CHANNELS].reshape(whole, CHANNELS, width, count)
    view[:whole] = blocked.transpose(0, 2, 3, 1)
    if whole < blocks:
        rest = out - whole * CHANNELS
        view[whole] = 0
        view[whole, :, :, :rest] = values[whole * CHANNELS :].transpose(1, 2, 0)


def unpack(parts: Mapping[str, np.ndarray], form: str, out: int, inputs: int) -> Groups:
    """The matrix `[out, inputs]` that `pack` made `parts` from."""
    blocks, size, count = parts["blocks"], _INTEGERS[form], inputs // GROUP

    def items(data: np.ndarray, start: int, dtype: Any, n: int) -> np.ndarray:
        """`[out, G, n]` from n times 16 items at byte `start` of each group."""
        dtype = np.dtype(dtype)
        piece = np.ascontiguousarray(data[..., start : start + n * CHANNELS * dtype.itemsize]).view(dtype)
        piece = piece.reshape(*data.shape[:2], n, CHANNELS).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(piece).reshape(-1, data.shape[1], n)[:out]

    words = items(blocks, 0, np.uint32, size // (4 * CHANNELS))
    q = words.view(np.uint8) if form in _FOUR_BITS else words.view(np.int8).reshape(out, inputs)
    if form == "w6k":
        scale = items(blocks, size, np.int8, 2).reshape(out, 2 * count)
        return Groups(form, q, scale, super_scale=items(parts["supers"], 0, np.float16, 1)[..., 0])
    if form == "w4k":
        scale, minimum = (items(blocks, size + at, np.uint8, 1)[..., 0] for at in (0, 16))
        super_scale, super_min = (items(parts["supers"], at, np.float16, 1)[..., 0] for at in (0, 32))
        return Groups(form, q, scale, minimum, super_scale, super_min)
    scale = items(blocks, size, np.float16, 1)[..., 0]
    if form == "w8":
        return Groups(form, q, scale)
    return Groups(form, q, scale, items(blocks, size + 32, np.float16, 1)[..., 0])
