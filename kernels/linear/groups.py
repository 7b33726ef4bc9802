"""Quantised matrices on the host: the one form from which every layout is packed. numpy only.

Letters: `out` output channels, `in` inputs, G = in / 32 groups.

form  q                   scale         min           super_scale, super_min   value
w4    uint8 [out, G, 16]  f16 [out, G]  f16 [out, G]                           scale q + min
w8    int8 [out, in]      f16 [out, G]                                         scale q
w8m   int8 [out, in]      f16 [out, G]  f16 [out, G]                           scale q + min
w4k   uint8 [out, G, 16]  u8 [out, G]   u8 [out, G]   f16 [out, in/256] both   (super_scale scale) q - super_min min
w6k   int8 [out, in]      i8 [out, 2G]                f16 [out, in/256]        (super_scale scale) q

They hold GGUF's Q4_0 and Q4_1 (w4), Q8_0 and Q5_0 (w8), Q5_1 (w8m), Q4_K (w4k) and Q6_K (w6k). A TPU has two forms of
its own, made from floats: c8, int8 with a float32 scale per output channel, and s4, -8 to 7 with a bfloat16 scale per
group.

Integers of 4 bits lie as in GGUF: byte i of a group holds element i in its low half and element i + 16 in its high one.
Every value is exact in float32 up to one rounding, the same that GGUF's own definition has.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

GROUP = 32
SUPER = 256
"""Inputs that share a super-scale."""

_OPTIONAL = ("min", "super_scale", "super_min")
_F16_MAX = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class Groups:
    """A matrix `[out, in]`, or some of its output channels."""

    form: str
    q: np.ndarray
    scale: np.ndarray
    min: np.ndarray | None = None
    super_scale: np.ndarray | None = None
    super_min: np.ndarray | None = None

    @property
    def out(self) -> int:
        return self.q.shape[0]

    @property
    def inputs(self) -> int:
        return self.q.shape[1] * GROUP if self.q.ndim == 3 else self.q.shape[1]

    def rows(self, which: slice | np.ndarray) -> Groups:
        """The output channels `which`, in that order."""
        others = {name: None if (part := getattr(self, name)) is None else part[which] for name in _OPTIONAL}
        return Groups(self.form, self.q[which], self.scale[which], **others)

    def integers(self) -> np.ndarray:
        """int8 `[out, in]`."""
        return unpacked(self.q) if self.q.ndim == 3 else self.q

    def scales(self) -> tuple[np.ndarray, np.ndarray | None]:
        """float32 `[out, in/32 or in/16]`: what integers are multiplied by, and what is then added. Exact."""
        scale = self.scale.astype(np.float32)
        minimum = None if self.min is None else self.min.astype(np.float32)
        if self.super_scale is not None:
            scale *= np.repeat(self.super_scale.astype(np.float32), scale.shape[1] // self.super_scale.shape[1], 1)
        if self.super_min is not None and minimum is not None:
            minimum *= -np.repeat(self.super_min.astype(np.float32), minimum.shape[1] // self.super_min.shape[1], 1)
        return scale, minimum

    def values(self) -> np.ndarray:
        """float32 `[out, in]`."""
        scale, minimum = self.scales()
        values = self.integers().reshape(*scale.shape, -1).astype(np.float32)
        values *= scale[..., None]
        if minimum is not None:
            values += minimum[..., None]
        return values.reshape(self.out, self.inputs)


def unpacked(q: np.ndarray) -> np.ndarray:
    """int8 `[out, in]` from 4-bit integers `[out, G, 16]`."""
    both = np.concatenate([q & np.uint8(15), q >> np.uint8(4)], axis=-1)
    return both.view(np.int8).reshape(len(q), -1)


def packed(q: np.ndarray) -> np.ndarray:
    """uint8 `[out, G, 16]` from integers 0 to 15 `[out, in]`."""
    halves = q.view(np.uint8).reshape(len(q), -1, 2, GROUP // 2)
    return halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))


def quantise(values: np.ndarray, bits: int) -> Groups:
    """Finite float32 `[out, in]` in groups of 32: w8 (`bits` 8) or w4 (4). A `ValueError` says why it is impossible.

    8 bits: the largest magnitude of a group becomes 127. 4 bits: 16 levels from scale and minimum, fitted to the group
    by least squares once after the first rounding.
    """
    groups = values.reshape(len(values), -1, GROUP)
    if bits == 8:
        return _eight_bits(groups, values.shape)
    return _four_bits(groups)


def _eight_bits(groups: np.ndarray, shape: tuple[int, ...]) -> Groups:
    largest = np.abs(groups).max(-1)
    _check(largest, 127)
    scale = _rounded_up(largest / np.float32(127))
    divisor = scale.astype(np.float32)
    divisor[divisor == 0] = 1
    q = np.rint(groups / divisor[..., None]).astype(np.int8)
    return Groups("w8", q.reshape(shape), scale)


def _four_bits(groups: np.ndarray) -> Groups:
    low, high = groups.min(-1), groups.max(-1)
    _check(np.maximum(np.abs(low), np.abs(high)), 2)
    scale, minimum = (high - low) / np.float32(15), low
    q = _levels(groups, scale, minimum)
    fitted = _fit(groups, q)
    scale = np.where(np.isfinite(fitted[0]) & (fitted[0] > 0), fitted[0], scale)
    minimum = np.where(scale == fitted[0], fitted[1], minimum)
    half_scale, half_minimum = scale.astype(np.float16), minimum.astype(np.float16)
    q = _levels(groups, half_scale.astype(np.float32), half_minimum.astype(np.float32))
    return Groups("w4", packed(q.astype(np.uint8).reshape(len(groups), -1)), half_scale, half_minimum)


def _levels(groups: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Nearest levels, float32."""
    divisor = np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint((groups - minimum[..., None]) / divisor[..., None]), 0, 15)


def _fit(groups: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the least squared error for the levels `q`."""
    mean_q, mean_x = q.mean(-1), groups.mean(-1)
    with np.errstate(all="ignore"):
        scale = ((q * groups).mean(-1) - mean_q * mean_x) / ((q * q).mean(-1) - mean_q * mean_q)
        return scale, mean_x - scale * mean_q


def quantise_channels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 `[out, in]` and float32 scales `[out]`: the largest magnitude of a channel becomes 127."""
    largest = np.abs(values).max(-1)
    _check(largest, 1)
    scale = largest / np.float32(127)
    divisor = np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint(values / divisor[:, None]), -127, 127).astype(np.int8), scale


def quantise_signed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 `[out, in]` from -8 to 7 and scales `[out, G]`, numbers of bfloat16 in float32: the value of a group that is
    largest in magnitude becomes -8."""
    groups = values.reshape(len(values), -1, GROUP)
    at = np.abs(groups).argmax(-1)
    extreme = np.take_along_axis(groups, at[..., None], -1)[..., 0]
    _check(extreme, 1)
    scale = (extreme / np.float32(-8)).astype(ml_dtypes.bfloat16).astype(np.float32)
    divisor = np.where(scale != 0, scale, np.float32(1))
    q = np.clip(np.rint(groups / divisor[..., None]), -8, 7).astype(np.int8)
    return q.reshape(values.shape), scale


def _check(largest: np.ndarray, levels: int) -> None:
    if not np.all(np.abs(largest) <= _F16_MAX * levels):
        raise ValueError("its values are not finite or too large")


def _rounded_up(x: np.ndarray) -> np.ndarray:
    """Non-negative float32 as float16, never below: the largest value of a group is not cut off."""
    half = x.astype(np.float16)
    return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(np.inf)), half)
