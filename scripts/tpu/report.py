"""Compiles the engine's programs for a TPU topology and says what each would cost there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from jax.sharding import Mesh

from ...configs.machine import cores
from ...serving.engine.programs import Program
from . import assume, hlo, traffic
from .chips import Chip

LARGEST = 8
"""Operations listed by the bytes they move."""

TOKENS_PER_PASS = (1.0, 2.0, 2.3, 3.0, 5.0)
"""Tokens of a sequence that a pass with drafts is assumed to bring: none of the drafts accepted, or some."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a compiled program is assumed to do, and what that is called: the program's kind, `verify` for a decode pass
    with drafted tokens, or `draft` for the part of it that drafts."""

    kind: str
    load: assume.Load


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile, and what to work its figures out for."""

    program: Program
    cases: tuple[Case, ...]


def compile_all(jobs: Sequence[Job], mesh: Mesh, chip: Chip, progress: Progress) -> list[dict[str, Any]]:
    """The rows of all jobs, in the order of `jobs`; `progress(name, done, total)` after each job."""
    found: dict[int, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        running = {pool.submit(rows, job, mesh, chip): i for i, job in enumerate(jobs)}
        for done, future in enumerate(as_completed(running), start=1):
            found[running[future]] = future.result()
            progress(jobs[running[future]].program.name, done, len(jobs))
    return [row for i in range(len(jobs)) for row in found[i]]


def rows(job: Job, mesh: Mesh, chip: Chip) -> list[dict[str, Any]]:
    """Compile one program and read the result: a row for each case. Those of a program that the compiler refuses have
    `compiled` false and `error`."""
    program = job.program
    heads = [
        {
            "name": program.name,
            "kind": case.kind,
            "sequences": program.sequences,
            "width": program.width,
            "context": case.load.tokens,
            "new_tokens": case.load.new_tokens,
            "drafted": case.load.drafted(program),
        }
        for case in job.cases
    ]
    started = time.perf_counter()
    try:
        program, compiled, l1_mode = program.compile()  # perhaps one without a window of KV on the chip
    except Exception as error:  # the compiler's own types differ by cause
        message = str(error).strip().splitlines()[0]
        # Running out of device memory is the one failure that answers the question whether the program fits.
        fits = False if "RESOURCE_EXHAUSTED" in message else None
        return [{**head, "compiled": False, "error": message, "fits": fits} for head in heads]
    seconds = time.perf_counter() - started
    memory = memory_by_kind(compiled)
    hbm = memory["arguments"] + memory["outputs"] + memory["temporaries"] - memory["aliased"]
    shared = {
        "compiled": True,
        "compile_s": round(seconds, 2),
        **({"l1_mode": l1_mode} if program.kind == "decode_n" else {}),
        "memory": memory,
        "hbm_bytes": hbm,
        "fits": hbm <= chip.hbm_bytes,
    }
    module = hlo.parse(compiled.as_text())
    return [
        {**head, **shared, **_figures(case, program, module, mesh, chip)}
        for head, case in zip(heads, job.cases, strict=True)
    ]


def _figures(case: Case, program: Program, module: hlo.Module, mesh: Mesh, chip: Chip) -> dict[str, Any]:
    """What the program costs in one case."""
    load = case.load

    def counted_with(drafts: bool) -> traffic.Traffic:
        how = dataclasses.replace(load, drafts=drafts)
        return traffic.count(module, how.assume(program, mesh, chip.name))

    counted = counted_with(True)
    drafting = counted.less(counted_with(False)) if load.drafted(program) else traffic.Traffic()
    if case.kind == "draft":
        counted, least, tokens = drafting, load.min_draft_bytes(program), None
    else:
        least, tokens = load.min_bytes(program, mesh), load.tokens_per_run(program, mesh)
    compute_s = counted.flops / chip.flops_per_second
    memory_s = counted.bytes / chip.bytes_per_second
    bound = max(compute_s, memory_s)
    return {
        "custom_kernels": sorted(counted.kernels),
        "kernel_calls": {name: round(n) for name, n in sorted(counted.kernels.items())},
        "operations": {kind: round(counted.operations[kind]) for kind in traffic.KINDS},
        "flops": counted.flops,
        "bytes_accessed": counted.bytes,
        "draft_flops": drafting.flops,
        "draft_bytes": drafting.bytes,
        "min_bytes": least,
        "bytes_ratio": counted.bytes / least,
        "collective_bytes": counted.collective_bytes,
        "bound_s": bound,
        "bound_by": "compute" if compute_s > memory_s else "memory",
        "predicted_tok_s": tokens / bound if tokens else None,
        "predicted_tok_s_chip": tokens / bound / mesh.size if tokens else None,
        **({"accepted": _accepted(load, program, mesh, bound)} if case.kind == "verify" else {}),
        "assumptions": counted.assumptions,
        "largest": [{"operation": name, "bytes": size} for name, size in counted.by_operation.most_common(LARGEST)],
    }


def _accepted(load: assume.Load, program: Program, mesh: Mesh, bound: float) -> list[dict[str, float]]:
    """Tokens per second and chip by the tokens that a pass brings a sequence; with all drafts accepted at the end."""
    a_second = program.sequences * mesh.shape["data"] / bound / mesh.size
    each = [n for n in TOKENS_PER_PASS if n < load.new_tokens]
    return [{"tokens_per_pass": n, "tok_s_chip": n * a_second} for n in [*each, float(load.new_tokens)]]


def memory_by_kind(compiled: Any) -> dict[str, int]:
    """Bytes of device memory of one chip, as the compiler laid them out."""
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
