"""Floating-point operations of one HLO instruction: products and sums of products (what the matrix unit does)."""

from __future__ import annotations

import math
import re

import numpy as np

from .hlo import Array, Computation, Instruction

_WINDOW_FIELDS = ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")


def flops(within: Computation, instruction: Instruction) -> float:
    """Two for every multiply-add of a dot, a convolution, or a sum over products; 0 for anything else."""
    if instruction.opcode == "dot":
        lhs = within.operand(instruction, 0).result
        contracted = math.prod(lhs.dims[i] for i in instruction.numbers("lhs_contracting_dims"))
        return 2.0 * instruction.result.elements * contracted
    if instruction.opcode == "convolution":
        lhs, rhs = (within.operand(instruction, i).result for i in (0, 1))
        return _convolution(instruction, lhs, rhs)
    if instruction.opcode == "reduce" and _is_product(within, within.operand(instruction, 0)):
        return 2.0 * within.operand(instruction, 0).result.elements
    return 0.0


def _is_product(within: Computation, instruction: Instruction) -> bool:
    while instruction.opcode in ("convert", "bitcast", "copy", "reshape"):
        instruction = within.operand(instruction, 0)
    return instruction.opcode == "multiply"


def _convolution(instruction: Instruction, lhs: Array, rhs: Array) -> float:
    """Multiply-adds at valid positions only: XLA writes batched products as convolutions over dilated inputs."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        return 0.0
    lhs_labels, rhs_labels, out_labels = labels.groups()
    groups = int(instruction.attribute("feature_group_count") or 1)
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    batch = lhs.dims[lhs_labels.index("b")] / batch_groups
    inputs = lhs.dims[lhs_labels.index("f")] / groups
    outputs = rhs.dims[rhs_labels.index("o")]
    window = _window(instruction.attribute("window") or "")
    positions = 1
    for spatial in (c for c in lhs_labels if c.isdigit()):
        dim = {key: values[int(spatial)] for key, values in window.items() if int(spatial) < len(values)}
        lhs_size = lhs.dims[lhs_labels.index(spatial)]
        positions *= _valid(lhs_size, instruction.result.dims[out_labels.index(spatial)], dim)
    return 2.0 * batch * inputs * outputs * positions


def _window(text: str) -> dict[str, list[str]]:
    fields = dict(part.split("=", 1) for part in text.split() if "=" in part)
    return {key: fields[key].split("x") for key in _WINDOW_FIELDS if key in fields}


def _valid(lhs_size: int, out_size: int, dim: dict[str, str]) -> int:
    """Pairs (output position, window position) of one spatial dimension that meet a real input element."""
    size, stride = int(dim.get("size", 1)), int(dim.get("stride", 1))
    low = int(dim.get("pad", "0_0").split("_")[0])
    lhs_dilate, rhs_dilate = int(dim.get("lhs_dilate", 1)), int(dim.get("rhs_dilate", 1))
    at = np.arange(out_size)[:, None] * stride - low + np.arange(size)[None] * rhs_dilate
    inside = (at >= 0) & (at < (lhs_size - 1) * lhs_dilate + 1) & (at % lhs_dilate == 0)
    return int(inside.sum())
