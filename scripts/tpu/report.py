"""Compiles the engine's programs for a TPU topology and says what each would cost there."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def compile_all(
    programs: list[Program], load: assume.Load, mesh: Mesh, chip: Chip, itemsize: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row per program, in the order of `programs`; `progress(name, done, total)` after each."""
    rows: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        jobs = {pool.submit(row, p, load, mesh, chip, itemsize): p.name for p in programs}
        for done, job in enumerate(as_completed(jobs), start=1):
            rows[jobs[job]] = job.result()
            progress(jobs[job], done, len(jobs))
    return [rows[p.name] for p in programs]


def row(program: Program, load: assume.Load, mesh: Mesh, chip: Chip, itemsize: int) -> dict[str, Any]:
    """Compile one program and read the result. A program the compiler refuses has `compiled` false and `error`."""
    head = {
        "name": program.name,
        "kind": program.kind,
        "sequences": program.sequences,
        "width": program.width,
    }
    started = time.perf_counter()
    try:
        compiled = program.jit().lower(*program.args).compile()
    except Exception as error:  # the compiler's own types differ by cause
        message = str(error).strip().splitlines()[0]
        # Running out of device memory is the one failure that answers the question whether the program fits.
        fits = False if "RESOURCE_EXHAUSTED" in message else None
        return {**head, "compiled": False, "error": message, "fits": fits}
    seconds = time.perf_counter() - started
    counted = traffic.count(hlo.parse(compiled.as_text()), load.assume(program))
    least = assume.min_bytes(load, program, mesh, itemsize)
    memory = memory_by_kind(compiled)
    compute_s = counted.flops / chip.flops_per_second
    memory_s = counted.bytes / chip.bytes_per_second
    bound = max(compute_s, memory_s)
    tokens = assume.tokens_per_run(load, program, mesh)
    hbm = memory["arguments"] + memory["outputs"] + memory["temporaries"] - memory["aliased"]
    return {
        **head,
        "compiled": True,
        "compile_s": round(seconds, 2),
        "custom_kernels": sorted(counted.kernels),
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
