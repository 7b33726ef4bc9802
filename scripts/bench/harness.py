"""Runs a single-process benchmark: every system in its own process, one at a time, in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ...configs.prompt_sets import load_prompts
from .machine import machine
from .measures import MEASURES, Job, Measure
from .plan import Plan
from .processes import BenchError, Worker, Workers, gguf_path
from .report import Row, report, summarize, with_peers
from .systems.base import Run, Setup

Say = Callable[[str], None]
"""Told what is happening."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    prompts = load_prompts(plan.prompts, limit=None if MEASURES[plan.bench].whole_file else plan.limit)
    with Workers(plan.systems) as workers:
        say("loading umbra")
        ours = workers["umbra"]
        with ours.turn():
            ours.load(Setup(plan.model, plan.quant, plan.threads, plan.mesh, plan.sequences, 0))
            ids = ours.call("encode", [prompt.turns[0] for prompt in prompts])
            file = ours.call("gguf_file") if plan.against else None
        measure = MEASURES[plan.bench](plan, prompts, ids)
        _check_context(measure, ours)
        for worker in workers:
            if worker is not ours:
                say(f"loading {worker.system}")
                path = str(gguf_path(file, plan.model))
                with worker.turn():
                    worker.load(
                        Setup(path, plan.quant, plan.threads, plan.mesh, plan.sequences, _context(measure.context()))
                    )
        rows = _rounds(plan, measure, list(workers), say)
        summary = {
            worker.system: summarize([row for row in rows if row["system"] == worker.system]) for worker in workers
        }
        versions = {name: number for worker in workers for name, number in worker.versions.items()}
        settings = {worker.system: worker.settings for worker in workers}
    return report(plan, before, versions, settings, rows, with_peers(summary, plan.against))


def _context(tokens: int) -> int:
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
    """Every system runs every job once a round; who begins changes from round to round."""
    rows: list[Row] = []
    ours: dict[str, list[int]] = {}  # job -> the first sequence's tokens, to tell how far peers agree
    for number in range(plan.rounds):
        shift = number % len(workers)
        for worker in itertools.chain(workers[shift:], workers[:shift]):
            say(f"round {number + 1} of {plan.rounds}: {worker.system}")
            with worker.turn():
                for job in measure.jobs(-1):
                    _generate(worker, job)
                for job in measure.jobs(number):
                    run = _generate(worker, job)
                    rows.append(
                        {"system": worker.system, "round": number + 1, "id": job.id, "category": job.category}
                        | measure.row(job, run)
                        | {"_ids": run.streams[0].token_ids}
                    )
                    if worker.system == "umbra":
                        ours[f"{number}/{job.id}"] = run.streams[0].token_ids
    for row in rows:
        made, reference = row.pop("_ids"), ours[f"{row['round'] - 1}/{row['id']}"]
        if row["system"] != "umbra":
            row["same_tokens"] = _common(made, reference)
    return rows


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
