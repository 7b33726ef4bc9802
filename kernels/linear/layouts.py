"""How a quantised matrix lies in memory, layout by layout: shapes of its parts, and writing rows into them. numpy only.

`weight.py` describes the layouts and forms.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from .groups import GROUP, Groups, quantise_channels, quantise_signed

CHANNELS = 16
"""Output channels of one block of the layout `cpu`."""

FLOAT_FORMS = ("c8", "s4")
"""Forms that are made from float rows; the others from `Groups`."""

Parts = dict[str, tuple[tuple[int, ...], np.dtype]]

_F32 = np.dtype(np.float32)
_INT8 = np.dtype(np.int8)


def part_shapes(form: str, layout: str, out: int, inputs: int) -> Parts:
    """Shape and type of each part of one matrix `[out, inputs]`."""
    if layout == "cpu":
        from . import packing  # which needs this file

        return dict(packing.shapes(form, out, inputs))
    if form == "c8":
        return {"q": ((out, inputs), _INT8), "scale": ((out,), _F32)}
    if form == "s4":
        scales = ((inputs // GROUP, out), np.dtype(ml_dtypes.bfloat16))
        return {"q": ((inputs, out), np.dtype(ml_dtypes.int4)), "scale": scales}
    width = GROUP // 2 if form == "w6k" else GROUP
    parts: Parts = {"q": ((out, inputs), _INT8), "scale": ((out, inputs // width), _F32)}
    return parts | ({"min": parts["scale"]} if form in ("w4", "w8m", "w4k") else {})


def write_rows(parts: Mapping[str, np.ndarray], form: str, layout: str, first: int, rows: Groups | np.ndarray) -> None:
    """Writes output channels from `first` on: `Groups` of the form, or float32 `[n, inputs]` for a float form.

    In the layout `cpu`, `first` must be a multiple of 16, and so must the number of rows unless they are the last.
    """
    if isinstance(rows, Groups):
        if layout == "cpu":
            from . import packing

            packing.pack_into(rows, parts, first // CHANNELS)
            return
        scale, minimum = rows.scales()
        made = {"q": rows.integers(), "scale": scale} | ({} if minimum is None else {"min": minimum})
    elif form == "s4":
        q, scale = quantise_signed(rows)
        parts["q"][:, first : first + len(q)] = q.T
        parts["scale"][:, first : first + len(q)] = scale.T
        return
    else:
        q, scale = quantise_channels(rows)
        made = {"q": q, "scale": scale}
    for name, value in made.items():
        parts[name][first : first + len(value)] = value
