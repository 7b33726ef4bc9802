"""Answers in the form of random JSON schemas against free answers to the same questions: speed, and whether they are
valid."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .harness import Say, our_setup, told
from .machine import machine
from .plan import Plan
from .processes import BenchError, Workers
from .report import Row, Summary, report
from .schemas import schemas
from .systems.forms import is_valid

SYSTEM = "forms/umbra"
FREE = "free text"


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report: rows of `umbra` have schemas, those of `free text` do not."""
    before = machine()
    asked = schemas(plan.limit, plan.seed)
    rows: list[Row] = []
    with Workers([SYSTEM]) as workers, workers[SYSTEM].turn() as worker:
        say("loading umbra")
        worker.load(our_setup(plan))
        if plan.max_tokens >= worker.settings["context"]:
            raise BenchError(
                f"answers of {plan.max_tokens} tokens do not fit a context of {worker.settings['context']}"
            )
        for number in range(plan.rounds):
            for system in ("umbra", FREE) if number % 2 == 0 else (FREE, "umbra"):
                say(f"round {number + 1} of {plan.rounds}: {system}")
                for first in range(0, len(asked), plan.sequences):
                    part = asked[first : first + plan.sequences]
                    given = [schema if system == "umbra" else None for schema, _ in part]
                    made = worker.call("in_form", [question for _, question in part], given, plan.max_tokens)
                    rows += [_row(system, number, first + i, given[i], one) for i, one in enumerate(made)]
        versions, settings = told(workers)
    summary = {system: _summary([row for row in rows if row["system"] == system]) for system in ("umbra", FREE)}
    return report(plan, before, versions, {"umbra": settings[SYSTEM]}, rows, summary)


def _row(system: str, number: int, place: int, schema: Any, made: dict[str, Any]) -> Row:
    row = {
        "system": system,
        "round": number + 1,
        "id": f"{place + 1:03d}",
        "category": "free" if schema is None else "schema",
        "tok_s": made["tok_s"],
        "ttft_ms": made["ttft_ms"],
        "tokens_per_pass": made["tokens"] / made["passes"],
        "tokens": made["tokens"],
        "forced": made["forced"],
        "finish": made["finish"],
    }
    return row if schema is None else row | {"valid": is_valid(made["text"], schema)}


def _summary(rows: Sequence[Row]) -> Summary:
    """Rates of all answers together, since those in a form are short: their tokens over their time."""
    timed = [row for row in rows if row["tok_s"]]
    tokens = sum(row["tokens"] for row in timed)
    out: Summary = {"rows": len(rows), "counted": len(timed), "tokens": tokens}
    if timed:
        out["tok_s"] = tokens / sum(row["tokens"] / row["tok_s"] for row in timed)
        out["tokens_per_pass"] = tokens / sum(row["tokens"] / row["tokens_per_pass"] for row in timed)
        out["ttft_ms"] = statistics.median(row["ttft_ms"] for row in timed)
    if all("valid" in row for row in rows):
        out["valid"] = sum(row["valid"] for row in rows) / len(rows)
        out["forced_share"] = sum(row["forced"] for row in rows) / sum(row["tokens"] for row in rows)
    return out
