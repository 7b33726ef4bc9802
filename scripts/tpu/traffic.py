"""Bytes a compiled TPU program moves to and from device memory (HBM), counted by walking its instructions.

Rules:

* arrays in on-chip space (`S(1)` and the like) move nothing;
* a fusion reads only what it needs of each operand (a slice of stacked weights, the rows of a gather) and an update in
  place writes only the update;
* a copy reads its source once and writes its target; the second half of an asynchronous pair moves nothing;
* a loop's body counts as often as it runs (`loops`), a conditional as the branch that is assumed, or else as its most
  expensive one;
* a kernel (custom call) moves of each operand and result what its metadata says its blocks amount to, or else reads
  its operands and writes its results once; buffers it updates in place count nothing; what it moves depending on data
  is assumed. Its operations are those it declares, or assumed.

Whatever had to be assumed is listed in `Traffic.assumptions`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import loops
from .flops import flops
from .hlo import Array, Computation, HloError, Instruction, Module

LoopRule = Callable[[str, str], tuple[float, str] | None]
"""(`file.py:function`, op name) of a loop whose count depends on data -> (iterations, why); None: not known."""
BranchRule = Callable[[str, str], tuple[int, str] | None]
"""The same of a conditional -> (index of the branch it takes, why); None: not known."""


class KernelWork(NamedTuple):
    """What one run of a kernel does that depends on data."""

    bytes: float
    """Moved on top of its dense operands and results."""
    flops: float
    """In place of those it declares."""
    why: str


KernelRule = Callable[[str], KernelWork | None]
"""Name of a Pallas kernel -> what it does; None: what its operands and its declaration say."""


@dataclasses.dataclass(frozen=True)
class Assume:
    """What a program does that depends on data."""

    loop: LoopRule = lambda source, op_name: None
    branch: BranchRule = lambda source, op_name: None
    kernel: KernelRule = lambda name: None


_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency",
}  # fmt: skip
_FREE_KERNELS = (
    "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape", "ConcatBitcast",
    "PrepareAsyncCallStart", "PrepareAsyncCallDone",
)  # fmt: skip
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
KINDS = ("kernel", "fusion", "copy", "collective")
"""Kinds of operations: Pallas kernels; fusions and whatever XLA left unfused; copies, slices and transpositions on
their own, synchronous or not; collectives."""
_COPIES = ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "gather")
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode -> operand that holds the new elements."""
_WHOLE = {
    "reduce", "dot", "convolution", "broadcast", "concatenate", "pad", "sort", "reduce-window", "custom-call", "iota",
    "select-and-scatter", "rng-bit-generator", "cholesky", "triangular-solve", "fft",
}  # fmt: skip
"""Opcodes that need all of their operands, however little of the result is used."""


@dataclasses.dataclass
class Traffic:
    """Totals of one run of the program on one chip."""

    bytes: float = 0.0
    flops: float = 0.0
    collective_bytes: float = 0.0
    """Bytes of results of collectives: what passes between chips, up to the factor of the algorithm."""
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    """Pallas kernels by name: how often each runs."""
    operations: Counter[str] = dataclasses.field(default_factory=Counter)
    """Operations the device starts, by kind (`KINDS`): how often they run. Scalar arithmetic is left out."""
    by_operation: Counter[str] = dataclasses.field(default_factory=Counter)
    """HBM bytes by the operation of the Python program that caused them."""
    assumptions: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, other: Traffic, times: float) -> None:
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        self.collective_bytes += times * other.collective_bytes
        for name in ("kernels", "operations", "by_operation"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key, value in theirs.items():
                mine[key] += times * value
        self.assumptions.update(other.assumptions)

    def less(self, part: Traffic) -> Traffic:
        """What is left without `part`, which is counted in the same program."""
        left = Traffic(assumptions=dict(self.assumptions))
        left.add(self, 1)
        left.add(Traffic(part.bytes, part.flops, part.collective_bytes, part.kernels, part.operations), -1)
        left.kernels = +left.kernels  # without those that only `part` runs
        left.by_operation = Counter({name: n - part.by_operation[name] for name, n in self.by_operation.items()})
        return left


def count(module: Module, assume: Assume = Assume()) -> Traffic:  # noqa: B008
    """Traffic of one run of the module's entry computation."""
    return _Walker(module, assume).computation(module.computations[module.entry], {})


class _Walker:
    def __init__(self, module: Module, assume: Assume) -> None:
        self.module = module
        self.assume = assume

    def computation(self, within: Computation, known: loops.Known) -> Traffic:
        total = Traffic()
        for instruction in within.instructions.values():
            if instruction.opcode not in _FREE:
                self._instruction(total, within, instruction, known)
        return total

    def _instruction(self, total: Traffic, within: Computation, ins: Instruction, known: loops.Known) -> None:
        if ins.opcode == "while":
            self._loop(total, within, ins, known)
        elif ins.opcode == "conditional":
            self._conditional(total, ins)
        elif ins.opcode in ("call", "call-start"):
            total.add(self.computation(self.module.computations[ins.called[0]], {}), 1)
        elif ins.opcode == "custom-call":
            self._kernel(total, within, ins)
        elif not ins.opcode.endswith(("-done", "-update")):
            self._operation(total, within, ins)

    def _loop(self, total: Traffic, within: Computation, ins: Instruction, known: loops.Known) -> None:
        times: float | None = loops.trip_count(self.module, within, ins, known)
        if times is None:
            source = self.module.source(ins)
            where = source or ins.op_name or ins.name
            assumed = self.assume.loop(source, ins.op_name)
            times, why = assumed or (1.0, "unknown, counted once")
            total.assumptions[f"loop {where}"] = f"{times:g} iterations: {why}"
        inside = loops.invariants(self.module, within, ins, known)
        for key in ("condition", "body"):
            called = self.module.computations[(ins.attribute(key) or "").lstrip("%")]
            total.add(self.computation(called, inside), times)

    def _conditional(self, total: Traffic, ins: Instruction) -> None:
        source = self.module.source(ins)
        where = f"conditional {source or ins.op_name or ins.name}"
        if assumed := self.assume.branch(source, ins.op_name):
            taken, why = assumed
            total.add(self.computation(self.module.computations[ins.branches[taken]], {}), 1)
            total.assumptions[where] = f"branch {taken}: {why}"
            return
        branches = [self.computation(self.module.computations[name], {}) for name in ins.branches]
        total.add(max(branches, key=lambda t: t.bytes), 1)
        total.assumptions[where] = "counted as its most expensive branch"

    def _kernel(self, total: Traffic, within: Computation, ins: Instruction) -> None:
        target = ins.attribute("custom_call_target") or ""
        if target in _FREE_KERNELS:
            return
        pallas = target == "tpu_custom_call"
        name = re.sub(r"\.\d+$", "", ins.name) if pallas else target
        total.operations["kernel" if pallas else "fusion"] += 1
        if pallas:
            total.kernels[name] += 1
        assumed = self.assume.kernel(name)
        total.flops += _declared_flops(ins) if assumed is None else assumed.flops
        in_place = _aliased_operands(ins)
        operands = [within.operand(ins, i) for i in range(len(ins.operands))]
        reads, writes = _declared_moves(ins, len(operands))
        moved = 0.0
        for i, operand in enumerate(operands):
            if i not in in_place:
                moved += _moved_of(operand.results, reads, i)
        aliased_results = _aliased_results(ins)
        for i, result in enumerate(ins.results):
            if i not in aliased_results:
                moved += _moved_of((result,), writes, i)
        if assumed is not None:
            moved += assumed.bytes
            total.assumptions[f"kernel {name}"] = (
                f"{assumed.bytes:,.0f} bytes besides its dense operands: {assumed.why}"
            )
        elif in_place:
            total.assumptions[f"kernel {name}"] = "buffers it updates in place count nothing"
        self._moved(total, ins, moved)

    def _operation(self, total: Traffic, within: Computation, ins: Instruction) -> None:
        owner, root = within, ins
        if ins.opcode == "async-start":
            owner = self.module.computations[ins.called[0]]
            root = owner.instructions[owner.root]
            if root.opcode == "custom-call":
                return self._kernel(total, owner, root)
        base = root.opcode.removesuffix("-start")
        sources = [within.operand(ins, i).result for i in range(len(ins.operands))]
        results = _targets(root) if root.opcode.endswith("-start") else root.results
        reads, writes = self._needs(owner, root, base, results)
        moved = sum(read * _per_element(a) for read, a in zip(reads, sources, strict=False))
        moved += sum(write * _per_element(a) for write, a in zip(writes, results, strict=True))
        if base in _COLLECTIVES:
            total.collective_bytes += sum(a.bytes for a in results)
        if kind := _kind(base, results):
            total.operations[kind] += 1
        total.flops += self._flops(owner, root)
        self._moved(total, ins, moved)

    def _moved(self, total: Traffic, ins: Instruction, moved: float) -> None:
        total.bytes += moved
        if moved:
            total.by_operation[ins.op_name or ins.opcode] += moved  # type: ignore[assignment]

    def _needs(
        self, within: Computation, ins: Instruction, base: str, results: Sequence[Array]
    ) -> tuple[list[float], list[float]]:
        """Elements read of each operand and written of each result."""
        if base == "fusion":
            inner = self.module.computations[ins.called[0]]
            reads = self._fusion_reads(inner, float(results[0].elements), in_place=True)
            return reads, self._fusion_writes(inner, results)
        operands = [float(within.operand(ins, i).result.elements) for i in range(len(ins.operands))]
        if base in _SLICES:
            return [min(operands[0], float(results[0].elements)), *operands[1:]], [float(results[0].elements)]
        if base in _UPDATES:
            return [0.0, *operands[1:]], [operands[_UPDATES[base]]]
        return operands, [float(a.elements) for a in results]

    def _fusion_writes(self, inner: Computation, results: Sequence[Array]) -> list[float]:
        root = inner.instructions[inner.root]
        if root.opcode == "fusion":
            return self._fusion_writes(self.module.computations[root.called[0]], results)
        outputs = _outputs(inner)
        if len(outputs) != len(results):  # one operation with several results, such as a variadic reduction
            return [float(a.elements) for a in results]
        return [self._written(inner, o, float(a.elements)) for o, a in zip(outputs, results, strict=True)]

    def _written(self, inner: Computation, ins: Instruction, full: float) -> float:
        ins = _behind_views(inner, ins)
        if ins.opcode in _UPDATES:
            return float(inner.operand(ins, _UPDATES[ins.opcode]).result.elements)
        if ins.opcode == "fusion":
            nested = self.module.computations[ins.called[0]]
            return self._written(nested, nested.instructions[nested.root], full)
        return full

    def _fusion_reads(self, inner: Computation, wanted: float, *, in_place: bool) -> list[float]:
        """Elements needed of each parameter when `wanted` elements of the root are."""
        needs = {name: _Need(float(sum(a.elements for a in i.results))) for name, i in inner.instructions.items()}
        root = inner.instructions[inner.root]
        outputs = _outputs(inner)
        for output in outputs:
            whole = len(root.results) > 1
            needs[output.name].at_least(needs[output.name].full if whole else wanted)
        updated = {_behind_views(inner, output).name for output in outputs} if in_place else set()
        for name in reversed(inner.instructions):
            ins = inner.instructions[name]
            wanted_here = needs[name].elements
            if ins.opcode in ("parameter", "tuple") or not wanted_here:
                continue
            self._pass_on(inner, ins, wanted_here, needs, name in updated)
        return [needs[p.name].elements for p in inner.parameters]

    def _pass_on(
        self, inner: Computation, ins: Instruction, wanted: float, needs: dict[str, _Need], in_place: bool
    ) -> None:
        operands = [needs[name] for name in ins.operands]
        if ins.opcode in _SLICES:
            operands[0].more(wanted)
            _all(operands[1:])
        elif ins.opcode in _UPDATES:
            if not in_place:
                operands[0].at_least(wanted)
            _all(operands[1:])
        elif ins.opcode == "fusion":
            nested = self.module.computations[ins.called[0]]
            for need, elements in zip(operands, self._fusion_reads(nested, wanted, in_place=in_place), strict=True):
                need.more(elements)
        elif ins.opcode in _WHOLE:
            _all(operands)
        else:
            for need in operands:
                need.at_least(wanted if need.full > 1 else 1.0)

    def _flops(self, within: Computation, ins: Instruction) -> float:
        if ins.opcode != "fusion":
            return flops(within, ins)
        inner = self.module.computations[ins.called[0]]
        return sum(self._flops(inner, i) for i in inner.instructions.values())


class _Need:
    """How many elements of one array inside a fusion are used: slices add up, whole uses overlap."""

    def __init__(self, full: float) -> None:
        self.full = full
        self._once = 0.0
        self._slices = 0.0

    def at_least(self, elements: float) -> None:
        self._once = max(self._once, elements)

    def more(self, elements: float) -> None:
        self._slices += elements

    @property
    def elements(self) -> float:
        return min(self.full, max(self._once, self._slices))


def _all(needs: Sequence[_Need]) -> None:
    for need in needs:
        need.at_least(need.full)


def _outputs(inner: Computation) -> list[Instruction]:
    """What makes the results of a fused computation, in order."""
    root = inner.instructions[inner.root]
    return [inner.operand(root, i) for i in range(len(root.operands))] if root.opcode == "tuple" else [root]


def _behind_views(within: Computation, ins: Instruction) -> Instruction:
    while ins.opcode in ("bitcast", "reshape"):
        ins = within.operand(ins, 0)
    return ins


def _targets(start: Instruction) -> tuple[Array, ...]:
    """The array an asynchronous start writes: `copy-start` is (target, source, ...), others (source, target, ...)."""
    if start.opcode == "copy-start" or len(start.results) == 1:
        return start.results[:1]
    return start.results[1:2]


def _per_element(array: Array) -> float:
    return array.hbm_bytes / array.elements if array.elements else 0.0


def _kind(opcode: str, results: Sequence[Array]) -> str | None:
    """The kind of an operation; None for arithmetic on scalars, which costs the device next to nothing."""
    if opcode in _COLLECTIVES:
        return "collective"
    if all(a.elements <= 1 for a in results):
        return None
    return "copy" if opcode in _COPIES else "fusion"


def _declared_moves(ins: Instruction, operands: int) -> tuple[list[float] | None, list[float] | None]:
    """Bytes that a kernel says it moves of each operand and of each result, if they are in HBM."""
    metadata = ins.metadata
    if "reads" not in metadata or "writes" not in metadata:
        return None, None
    reads, writes = ([float(n) for n in metadata[key].split(",")] for key in ("reads", "writes"))
    if len(reads) != operands or len(writes) != len(ins.results):
        raise HloError(
            f"kernel {ins.name} declares {len(reads)} reads and {len(writes)} writes; "
            f"it has {operands} operands and {len(ins.results)} results"
        )
    return reads, writes


def _moved_of(arrays: Sequence[Array], declared: list[float] | None, index: int) -> float:
    if declared is None:
        return sum(a.hbm_bytes for a in arrays)
    return declared[index] if any(a.hbm_bytes for a in arrays) else 0.0


def _declared_flops(ins: Instruction) -> float:
    """What the kernel's author estimated (`pl.CostEstimate`): its inside cannot be counted from outside."""
    found = re.search(r'"cost_estimate":\{"flops":"(\d+)"', ins.backend)
    return float(found.group(1)) if found else 0.0


def _aliased_operands(ins: Instruction) -> set[int]:
    return {operand for _, operand in _aliases(ins)}


def _aliased_results(ins: Instruction) -> set[int]:
    return {result for result, _ in _aliases(ins)}


def _aliases(ins: Instruction) -> list[tuple[int, int]]:
    """(result, operand) pairs that share a buffer, from `output_to_operand_aliasing={{}: (1, {}), {1}: (2, {})}`."""
    _, found, text = ins.attributes.partition("output_to_operand_aliasing=")
    if not found:
        return []
    pairs = re.findall(r"\{(\d*)\}:\s*\((\d+),", text)
    return [(int(result or 0), int(operand)) for result, operand in pairs]
