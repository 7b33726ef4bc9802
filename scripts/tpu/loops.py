"""How often the loops of a compiled program run.

XLA counts a loop's body once. Here the trip count is read from the loop itself: a counter that starts at a constant,
grows by a constant and is compared with a constant. A loop whose bound is data (layers of a subset, blocks of a
sequence, valid rows) has no such count; the caller says what to assume for it.
"""

from __future__ import annotations

import dataclasses
import math
import re

from .hlo import Computation, Instruction, Module

_TRANSPARENT = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done")

_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}

Known = dict[int, int]
"""Elements of a loop's tuple that hold the same known integer in every iteration."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An integer: `offset`, or element `index` of the computation's parameter plus `offset`."""

    index: int | None
    offset: int


def trip_count(module: Module, within: Computation, loop: Instruction, known: Known) -> int | None:
    """Iterations of the `while` instruction `loop` of `within`, or None when they depend on data.

    `known` holds what is known of the parameter tuple of `within` (see `invariants`).
    """
    declared = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.backend)
    if declared:
        return int(declared.group(1))
    condition = module.computations[loop.attribute("condition").lstrip("%")]  # type: ignore[union-attr]
    body = module.computations[loop.attribute("body").lstrip("%")]  # type: ignore[union-attr]
    compared = _comparison(module, condition, condition.instructions[condition.root])
    if compared is None:
        return None
    counter, limit, direction = compared
    inside = invariants(module, within, loop, known)
    if counter.index in inside:
        counter, limit, direction = limit, counter, _MIRRORED.get(direction, "")
    bound = _constant(limit, inside)
    if bound is None or counter.index is None:
        return None
    start = _initial(module, within, loop, counter.index, known)
    step = _step(module, body, counter.index)
    if start is None or not step:
        return None
    return _iterations(start + counter.offset, bound, step, direction)


def invariants(module: Module, within: Computation, loop: Instruction, known: Known) -> Known:
    """What is known of the parameter tuple inside the body of `loop`: elements it hands on unchanged."""
    body = module.computations[loop.attribute("body").lstrip("%")]  # type: ignore[union-attr]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return {}
    inside = {}
    for index in range(len(root.operands)):
        value = evaluate(module, body, body.operand(root, index))
        if value == Value(index, 0):
            start = _initial(module, within, loop, index, known)
            if start is not None:
                inside[index] = start
    return inside


def evaluate(module: Module, within: Computation, instruction: Instruction) -> Value | None:
    """`instruction` as an integer in terms of the parameter tuple of `within`; None when it is anything else."""
    if instruction.opcode in _TRANSPARENT:
        return evaluate(module, within, within.operand(instruction, 0))
    if instruction.opcode == "constant":
        literal = instruction.literal.strip()
        return Value(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if instruction.opcode == "get-tuple-element":
        source = within.operand(instruction, 0)
        index = int(instruction.attribute("index") or 0)
        if source.opcode == "parameter":
            return Value(index, 0)
        return evaluate(module, within, within.operand(source, index)) if source.opcode == "tuple" else None
    if instruction.opcode in ("add", "subtract"):
        a, b = (evaluate(module, within, within.operand(instruction, i)) for i in (0, 1))
        return _sum(a, b, 1 if instruction.opcode == "add" else -1)
    if instruction.opcode == "fusion":
        return _through_fusion(module, within, instruction)
    return None


def _sum(a: Value | None, b: Value | None, sign: int) -> Value | None:
    if a is None or b is None:
        return None
    if b.index is None:
        return Value(a.index, a.offset + sign * b.offset)
    return Value(b.index, a.offset + b.offset) if a.index is None and sign == 1 else None


def _through_fusion(module: Module, within: Computation, fusion: Instruction) -> Value | None:
    """A fusion of one parameter plus a constant, or of constants."""
    inner = module.computations[fusion.called[0]]
    return _inner(module, within, fusion, inner, inner.instructions[inner.root])


def _inner(
    module: Module, within: Computation, fusion: Instruction, inner: Computation, instruction: Instruction
) -> Value | None:
    if instruction.opcode == "parameter":
        return evaluate(module, within, within.operand(fusion, int(instruction.literal)))
    if instruction.opcode in ("add", "subtract"):
        a, b = (_inner(module, within, fusion, inner, inner.operand(instruction, i)) for i in (0, 1))
        return _sum(a, b, 1 if instruction.opcode == "add" else -1)
    if instruction.opcode in _TRANSPARENT:
        return _inner(module, within, fusion, inner, inner.operand(instruction, 0))
    return evaluate(module, inner, instruction) if instruction.opcode == "constant" else None


def _comparison(module: Module, within: Computation, root: Instruction) -> tuple[Value, Value, str] | None:
    """Both sides and direction of a loop's condition, the counter on the left."""
    if root.opcode in _TRANSPARENT:
        return _comparison(module, within, within.operand(root, 0))
    if root.opcode == "compare":
        a, b = (evaluate(module, within, within.operand(root, i)) for i in (0, 1))
        direction = root.attribute("direction") or ""
    elif root.opcode == "fusion":
        inner = module.computations[root.called[0]]
        compare = inner.instructions[inner.root]
        if compare.opcode != "compare":
            return None
        a, b = (_inner(module, within, root, inner, inner.operand(compare, i)) for i in (0, 1))
        direction = compare.attribute("direction") or ""
    else:
        return None
    if a is None or b is None:
        return None
    if a.index is None:
        return (b, a, _MIRRORED[direction]) if direction in _MIRRORED else None
    return a, b, direction


def _constant(value: Value, known: Known) -> int | None:
    if value.index is None:
        return value.offset
    return known[value.index] + value.offset if value.index in known else None


def _initial(module: Module, within: Computation, loop: Instruction, index: int, known: Known) -> int | None:
    start = within.operand(loop, 0)
    if start.opcode != "tuple":
        return None
    value = evaluate(module, within, within.operand(start, index))
    return _constant(value, known) if value else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return None
    value = evaluate(module, body, body.operand(root, index))
    return value.offset if value and value.index == index else None


def _iterations(start: int, bound: int, step: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
    elif direction not in ("LT", "GT", "NE"):
        return None
    return max(0, math.ceil((bound - start) / step))
