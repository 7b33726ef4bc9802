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

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile, and the load to work its figures out for."""

    program: Program
    load: assume.Load


def compile_all(jobs: Sequence[Job], mesh: Mesh, chip: Chip, progress: Progress) -> list[dict[str, Any]]:
    """One row per job, in the order of `jobs`; `progress(name, done, total)` after each."""
    rows: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        running = {pool.submit(row, job, mesh, chip): i for i, job in enumerate(jobs)}
        for done, future in enumerate(as_completed(running), start=1):
            rows[running[future]] = future.result()
            progress(jobs[running[future]].program.name, done, len(jobs))
    return [rows[i] for i in range(len(jobs))]


def row(job: Job, mesh: Mesh, chip: Chip) -> dict[str, Any]:
    """Compile one program and read the result. A program the compiler refuses has `compiled` false and `error`."""
    program, load = job.program, job.load
    head = {
        "name": program.name,
        "kind": program.kind,
        "sequences": program.sequences,
        "width": program.width,
        "context": load.tokens,
        "new_tokens": load.new_tokens,
    }
    started = time.perf_counter()
    try:
        program, compiled, l1_mode = program.compile()  # perhaps one without a window of KV on the chip
    except Exception as error:  # the compiler's own types differ by cause
        message = str(error).strip().splitlines()[0]
        # Running out of device memory is the one failure that answers the question whether the program fits.
        fits = False if "RESOURCE_EXHAUSTED" in message else None
        return {**head, "compiled": False, "error": message, "fits": fits}
    seconds = time.perf_counter() - started
    counted = traffic.count(hlo.parse(compiled.as_text()), load.assume(program, mesh, chip.name))
    least = load.min_bytes(program, mesh)
    memory = memory_by_kind(compiled)
    compute_s = counted.flops / chip.flops_per_second
    memory_s = counted.bytes / chip.bytes_per_second
    bound = max(compute_s, memory_s)
    tokens = load.tokens_per_run(program, mesh)
    hbm = memory["arguments"] + memory["outputs"] + memory["temporaries"] - memory["aliased"]
    return {
        **head,
        "compiled": True,
        "compile_s": round(seconds, 2),
        **({"l1_mode": l1_mode} if program.kind == "decode_n" else {}),
        "custom_kernels": sorted(counted.kernels),
        "kernel_calls": {name: round(n) for name, n in sorted(counted.kernels.items())},
        "operations": {kind: round(counted.operations[kind]) for kind in traffic.KINDS},
        "memory": memory,
        "hbm_bytes": hbm,
        "fits": hbm <= chip.hbm_bytes,
        "flops": counted.flops,
        "bytes_accessed": counted.bytes,
        "min_bytes": least,
        "bytes_ratio": counted.bytes / least,
        "collective_bytes": counted.collective_bytes,
        "bound_s": bound,
        "bound_by": "compute" if compute_s > memory_s else "memory",
        "predicted_tok_s": tokens / bound if tokens else None,
        "predicted_tok_s_chip": tokens / bound / mesh.size if tokens else None,
        "assumptions": counted.assumptions,
        "largest": [{"operation": name, "bytes": size} for name, size in counted.by_operation.most_common(LARGEST)],
    }


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
