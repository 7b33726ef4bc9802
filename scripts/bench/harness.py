"""Runs a single-process benchmark: every system in its own process, one at a time, in turn."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...configs.prompt_sets import Prompt, load_prompts
from .busy import busy
from .drafts import compare
from .machine import machine
from .measures import MEASURES, Job, Measure
from .plan import Plan
from .processes import BenchError, Worker, Workers, gguf_path
from .report import Row, Summary, percentile, report, summarize, with_peers
from .systems import drafting, is_ours
from .systems.base import Run, Setup

Say = Callable[[str], None]
"""Told what is happening."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    prompts = _prompts(plan)
    with Workers(plan.systems) as workers:
        say("loading umbra")
        ours = workers["umbra"]
        with ours.turn():
            ours.load(our_setup(plan))
            ids = ours.call("encode", [prompt.turns[0] for prompt in prompts])
        measure = MEASURES[plan.bench](plan, prompts, ids)
        _check_context(measure, ours)
        load_others(plan, workers, measure.context(), say)
        rows = _rounds(plan, measure, list(workers), say)
        summary = {
            worker.system: _summary([row for row in rows if row["system"] == worker.system]) for worker in workers
        }
        versions, settings = told(workers)
    for row in rows:
        del row["gaps"]
    content = report(plan, before, versions, settings, rows, with_peers(summary, plan.against))
    return {**content, "drafting": compare(plan, rows)} if plan.bench == "decode" else content


def _prompts(plan: Plan) -> list[Prompt]:
    """The first of the file, or the first of each of its categories."""
    if plan.each is None:
        return load_prompts(plan.prompts, limit=None if MEASURES[plan.bench].whole_file else plan.limit)
    taken: collections.Counter[str] = collections.Counter()
    chosen = []
    for prompt in load_prompts(plan.prompts):
        taken[prompt.category] += 1
        if taken[prompt.category] <= plan.each:
            chosen.append(prompt)
    return chosen


def our_setup(plan: Plan, sequences: int | None = None, system: str = "umbra") -> Setup:
    """What our engine is loaded with: if `sequences` is given, with room for passes of so many tokens, and no more."""
    draft, length = drafting(system, plan.draft)
    return Setup(
        plan.model, plan.quant, plan.threads, plan.mesh, sequences or plan.sequences, 0, plan.kernels, plan.kv,
        plan.embedding, sequences, draft=draft, shadow=plan.shadow, plain=draft == "off" and sequences is None,
        draft_length=length or plan.draft_length, temperature=plan.temperature,
    )  # fmt: skip


def load_others(plan: Plan, workers: Workers, context: int, say: Say, sequences: int | None = None) -> None:
    """Load every system but `umbra`, which is loaded, for sequences of `context` tokens."""
    path: Path | None = None
    for worker in workers:
        if worker.system == "umbra":
            continue
        say(f"loading {worker.system}")
        if is_ours(worker.system):
            setup = our_setup(plan, sequences, worker.system)
        else:
            path = path or file_of(plan, workers["umbra"])
            setup = Setup(str(path), plan.quant, plan.threads, plan.mesh, plan.sequences, context_of(context))
        with worker.turn():
            worker.load(setup)


def file_of(plan: Plan, ours: Worker) -> Path:
    """The GGUF file that peers load."""
    with ours.turn():
        return gguf_path(ours.call("gguf_file"), plan.model)


def told(workers: Workers) -> tuple[dict[str, str], dict[str, Any]]:
    """Versions of all packages, and the settings of every system."""
    versions = {name: number for worker in workers for name, number in worker.versions.items()}
    return versions, {worker.system: worker.settings for worker in workers}


def context_of(tokens: int) -> int:
    """Rounded up to 256, the steps in which peers lay out their caches."""
    return -(-tokens // 256) * 256


def _check_context(measure: Measure, ours: Worker) -> None:
    wanted, there = measure.context(), ours.settings["context"]
    if wanted > there:
        raise BenchError(
            f"the longest sequence needs {wanted} tokens and the context of {measure.plan.model} is {there}; "
            f"use shorter prompts or fewer tokens"
        )


def _rounds(plan: Plan, measure: Measure, workers: Sequence[Worker], say: Say) -> list[Row]:
    """Every system runs every job once a round, and again beside busy processes if asked for. They take turns job by
    job, and who begins changes: what a shared machine has to give drifts within minutes, and must be the same for all
    that is compared."""
    rows: list[Row] = []
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}: {', '.join(worker.system for worker in workers)}")
        for worker in workers:
            with worker.turn():
                for job in measure.jobs(-1):
                    _generate(worker, job)
        for neighbours in (0, plan.busy) if plan.busy else (0,):
            if neighbours:
                say(f"round {number + 1} of {plan.rounds} beside busy processes")
            with busy(neighbours):
                for i, job in enumerate(measure.jobs(number)):
                    shift = (number + i) % len(workers)
                    for worker in itertools.chain(workers[shift:], workers[:shift]):
                        with worker.turn():
                            row = _row(measure, worker, job, number)
                        rows.append({**row, "busy": neighbours} if plan.busy else row)
    ours = {_place(row): row["_ids"] for row in rows if row["system"] == "umbra"}
    for row in rows:
        tokens = row.pop("_ids")  # of the first sequence, to tell how far peers agree
        if row["system"] != "umbra":
            row["same_tokens"] = _common(tokens, ours[_place(row)])
    return rows


def _place(row: Row) -> tuple[Any, ...]:
    return row["round"], row.get("busy"), row["id"]


def _row(measure: Measure, worker: Worker, job: Job, number: int) -> Row:
    run = _generate(worker, job)
    return (
        {"system": worker.system, "round": number + 1, "id": job.id, "category": job.category}
        | measure.row(job, run)
        | {"_ids": run.streams[0].token_ids, "gaps": [gap for stream in run.streams for gap in stream.gaps]}
    )


def _summary(rows: Sequence[Row]) -> Summary:
    """Medians, and percentiles of the time between emissions: over all rows together, since one row has too few."""
    summary = summarize(rows)
    kinds = {"": [row for row in rows if not row.get("busy")], "busy_": [row for row in rows if row.get("busy")]}
    for kind, some in kinds.items():
        gaps = [gap for row in some for gap in row["gaps"]]
        for p in (50, 99):
            if (value := percentile(gaps, p, 1e3)) is not None:
                summary[f"{kind}between_p{p}_ms"] = value
    for p in (50, 99):
        quiet, disturbed = summary.get(f"between_p{p}_ms"), summary.get(f"busy_between_p{p}_ms")
        if quiet and disturbed:
            summary[f"busy_p{p}_ratio"] = disturbed / quiet
    return summary


def _generate(worker: Worker, job: Job) -> Run:
    run = worker.generate(job.prompts, job.max_tokens)
    for stream in run.streams:
        if len(stream.token_ids) != job.max_tokens:
            made = len(stream.token_ids)
            raise BenchError(f"{worker.system} made {made} tokens instead of {job.max_tokens} in {job.id}")
    return run


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
