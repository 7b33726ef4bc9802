"""The text of a compiled XLA program as data: computations, instructions, shapes with their layout and memory space.

Only what counting needs is read; the format is that of `Compiled.as_text()` (XLA's HLO text with layouts).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

HBM = 0
"""Memory space of an array without `S(n)` in its layout. `S(1)` is on-chip vector memory, `S(5)` the host's."""

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_CLOSING = re.compile(r"^\}(?!\})")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")


class HloError(ValueError):
    """The text is not a compiled program as this reader knows it."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array: element type, dimensions, and how the layout places it."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = HBM

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes it occupies, padding to its tile included (a bf16 row of 64 fills 128 lanes)."""
        if self.dtype in ("token", "opaque"):
            return 0.0
        order = self.minor_to_major or tuple(reversed(range(len(self.dims))))
        physical = [self.dims[i] for i in reversed(order)]
        for back, tile in enumerate(reversed(self.tile), start=1):
            if back <= len(physical):
                physical[-back] = -(-physical[-back] // tile) * tile
        return math.prod(physical) * self.bits / 8

    @property
    def bits(self) -> int:
        if self.dtype.startswith("f8"):
            return 8
        if self.dtype.startswith("f4"):
            return 4
        if self.dtype not in _BITS:
            raise HloError(f"element type {self.dtype!r} is not known; known: {', '.join(_BITS)}, f8*, f4*")
        return _BITS[self.dtype]

    @property
    def hbm_bytes(self) -> float:
        return self.bytes if self.space == HBM else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation: its result (a tuple's arrays in order, nested ones flattened), operands by name, attributes."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    backend: str

    @property
    def result(self) -> Array:
        return self.results[0]

    def attribute(self, key: str) -> str | None:
        """The text of `key=...`: inside its braces or quotes, or up to the next comma."""
        match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|([^,\s]+))", self.attributes)
        return next((g for g in match.groups() if g is not None), None) if match else None

    def numbers(self, key: str) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attribute(key) or ""))

    @property
    def called(self) -> tuple[str, ...]:
        """Computations it runs: a fusion's, a call's, or a conditional's branches in order."""
        for key in ("calls", "to_apply", "branch_computations"):
            if text := self.attribute(key):
                return tuple(name.lstrip("%") for name in re.split(r",\s*", text.strip()))
        both = (self.attribute("true_computation"), self.attribute("false_computation"))
        return tuple(name.lstrip("%") for name in both if name)

    @property
    def branches(self) -> tuple[str, ...]:
        """A conditional's branches in the order of their index: the one for false, then the one for true."""
        return self.called[::-1] if self.attribute("true_computation") else self.called

    @property
    def metadata(self) -> dict[str, str]:
        """What the author of a Pallas kernel wrote beside it (`pl.pallas_call(metadata=...)`)."""
        match = re.search(r"kernel_metadata=\{([^{}]*)\}", self.attributes)
        return dict(re.findall(r'"([^"]*)":\s*"([^"]*)"', match.group(1))) if match else {}

    @property
    def op_name(self) -> str:
        """Where in the Python program it comes from, for example `jit(step)/while/body/dot_general`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str
    frames: dict[int, str]
    """Stack frame id -> `file.py:function` of the innermost Python frame."""

    def source(self, instruction: Instruction) -> str:
        """`file.py:function` that made this instruction, or an empty string."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.frames.get(int(match.group(1)), "") if match else ""


def parse(text: str) -> Module:
    """The module in `text`; `HloError` when there is no entry computation or a line cannot be read."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in _lines(text):
        if not name:
            if header := _HEADER.match(line):
                name, root, instructions = header.group(2), "", {}
                entry = name if header.group(1) else entry
        elif _CLOSING.match(line):
            computations[name] = Computation(name, instructions, root)
            name = ""
        elif match := _NAME.match(line):
            instruction = _instruction(match.group(2), line[match.end() :])
            instructions[instruction.name] = instruction
            root = instruction.name if match.group(1) else root
    if not entry:
        raise HloError("the text has no ENTRY computation; expected the output of Compiled.as_text()")
    return Module(computations, entry, _frames(text))


def _lines(text: str) -> Iterator[str]:
    """The lines of `text`, with those of an instruction that goes on over several (a kernel's metadata) as one."""
    whole = ""
    for line in text.splitlines():
        if whole and line and not line[0].isspace() and not _CLOSING.match(line) and not _HEADER.match(line):
            whole += line
            continue
        if whole:
            yield whole
            whole = ""
        if _NAME.match(line):
            whole = line
        else:
            yield line
    if whole:
        yield whole


def _instruction(name: str, text: str) -> Instruction:
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    open_at = text.find("(", shape_end)
    if shape_end <= 0 or open_at < 0:
        raise HloError(f"instruction {name} cannot be read: {text[:120]!r}")
    close_at = _closing(text, open_at)
    inside = text[open_at + 1 : close_at]
    attributes, _, backend = text[close_at + 1 :].partition("backend_config=")
    return Instruction(
        name=name,
        opcode=text[shape_end:open_at].strip(),
        results=tuple(_array(m) for m in _ARRAY.finditer(text[:shape_end])),
        operands=tuple(_OPERAND.findall(inside)),
        literal=inside,
        attributes=attributes,
        backend=backend,
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i
    raise HloError(f"unbalanced parentheses: {text[:120]!r}")


def _array(match: re.Match[str]) -> Array:
    dtype, dims, layout = match.group(1), match.group(2), match.group(3) or ""
    order, _, placement = layout.partition(":")
    tile = _TILE.search(placement)
    space = _SPACE.search(placement)
    return Array(
        dtype=dtype,
        dims=tuple(int(d.lstrip("<=")) for d in dims.split(",") if d),
        minor_to_major=tuple(int(d) for d in order.split(",") if d),
        tile=tuple(int(t) for t in tile.group(1).split(",") if t.isdigit()) if tile else (),
        space=int(space.group(1)) if space else HBM,
    )


def _frames(text: str) -> dict[int, str]:
    """The tables that stand before the computations: files, functions, locations, frames."""

    def table(title: str) -> list[str]:
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return found.group(1).splitlines() if found else []

    def names(title: str) -> dict[int, str]:
        return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1].strip('"') for line in table(title)}

    def fields(line: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}

    files, functions = names("FileNames"), names("FunctionNames")
    places = {}
    for line in table("FileLocations"):
        f = fields(line)
        file = files.get(f.get("file_name_id", 0), "").rsplit("/", 1)[-1]
        places[int(line.split(" ", 1)[0])] = f"{file}:{functions.get(f.get('function_name_id', 0), '')}"
    frames = {}
    for line in table("StackFrames"):
        frames[int(line.split(" ", 1)[0])] = places.get(fields(line).get("file_location_id", 0), "")
    return frames
