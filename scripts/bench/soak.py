"""Many requests with tiers on and off: the same ids, nothing lost, nothing leaked.

Requests share beginnings and go on with each other's answers; some are cancelled; the device's pool holds little more
than what runs, so that what they share goes down and comes up again. After every part the engine is started anew, on
the same folder. Ids are compared with those of an engine without tiers; of a cancelled request, those that came.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from typing import Any

from ...configs.cache import GIB
from .harness import Say, our_setup
from .machine import machine
from .plan import Plan
from .processes import BenchError, Worker, Workers
from .report import Row, report

PART = 250
"""Requests of one call: between parts everything comes to rest and is checked."""

CONTEXT = 1024
ANSWER = 16
CANCELLED = 0.1


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    rng = random.Random(plan.seed)
    rows: list[Row] = []
    totals: dict[str, Any] = {}
    with (
        Workers(["tiers/umbra"]) as workers,
        tempfile.TemporaryDirectory(prefix="umbra-soak-", dir=plan.folder) as folder,
    ):
        worker = workers["tiers/umbra"]
        with worker.turn():
            say(f"loading {plan.model}")
            worker.load(our_setup(plan))
            texts = _Texts(rng, worker.call("vocabulary"))
            for start in range(0, plan.limit, PART):
                prompts = [texts.prompt() for _ in range(min(PART, plan.limit - start))]
                say(f"requests {start + 1} to {start + len(prompts)} of {plan.limit}")
                alone = _part(worker, plan, None, prompts, [0.0] * len(prompts))
                cancel = [rng.uniform(0.0, 0.5) if rng.random() < CANCELLED else 0.0 for _ in prompts]
                ours = _part(worker, plan, folder, prompts, cancel)
                rows.append(_row(start, prompts, alone, ours, cancel))
                _add(totals, ours["stats"])
                for prompt, answer in zip(prompts, alone["answers"], strict=True):
                    texts.answered(prompt, answer)
        settings = {"umbra": worker.settings}
        versions = worker.versions
    differing = sum(row["differing"] for row in rows)
    summary = {
        "requests": sum(row["requests"] for row in rows), "cancelled": sum(row["cancelled"] for row in rows),
        "differing": differing, **totals,
    }  # fmt: skip
    made = report(plan, before, versions, settings, rows, {"umbra": summary})
    return made | {"differences": f"{differing} of {summary['requests']} answers differ" if differing else None}


class _Texts:
    """Prompts that begin like others, or go on with an answer."""

    def __init__(self, rng: random.Random, vocabulary: int) -> None:
        self._rng, self._vocabulary = rng, vocabulary
        self._heads = [self._some(rng.randrange(100, 500)) for _ in range(40)]
        self._answered: list[list[int]] = []

    def _some(self, n: int) -> list[int]:
        return [self._rng.randrange(1, self._vocabulary) for _ in range(n)]

    def prompt(self) -> list[int]:
        if self._answered and self._rng.random() < 0.4:
            before = self._rng.choice(self._answered)
        else:
            before = self._rng.choice(self._heads)
        return [*before, *self._some(self._rng.randrange(1, 100))]

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        longer = [*prompt, *answer]
        if len(longer) < CONTEXT - 200:
            self._answered = [*self._answered[-200:], longer]


def _part(
    worker: Worker, plan: Plan, folder: str | None, prompts: Sequence[Sequence[int]], cancel: Sequence[float]
) -> dict[str, Any]:
    """One engine's answers to a part, and its counts; leaks are errors. The pool holds two contexts of all slots'."""
    started = worker.call("start", folder, {"disk_quota": 2 * GIB, "load_margin": 1e-9}, CONTEXT, 2.0, plan.sequences)
    worker.settings |= started
    try:
        answers = worker.call("soak", prompts, ANSWER, plan.sequences, cancel)
        worker.call("check")
        return {"answers": answers, "stats": worker.call("stats")}
    finally:
        worker.call("stop")


def _row(
    start: int, prompts: Sequence[Sequence[int]], alone: dict[str, Any], ours: dict[str, Any], cancel: Sequence[float]
) -> Row:
    differing = 0
    for want, got, cancelled in zip(alone["answers"], ours["answers"], cancel, strict=True):
        if len(want) != ANSWER:
            raise BenchError(f"without tiers an answer has {len(want)} tokens instead of {ANSWER}")
        differing += got != (want[: len(got)] if cancelled else want)
    return {
        "system": "umbra", "id": f"from {start + 1}", "category": "soak", "requests": len(prompts),
        "cancelled": sum(wait > 0 for wait in cancel), "differing": differing,
        "prompt_tokens": sum(map(len, prompts)), "disk_hit_tokens": ours["stats"]["tiers"]["disk"]["hit_tokens"],
        "preemptions": ours["stats"]["engine"]["preemptions"], "tok_s": None, "ttft_ms": None, "tokens_per_pass": None,
    }  # fmt: skip


def _add(totals: dict[str, Any], stats: dict[str, Any]) -> None:
    disk = stats["tiers"]["disk"]
    for name, value in (
        ("disk_hit_tokens", disk["hit_tokens"]), ("disk_written_bytes", disk["written_bytes"]),
        ("blocks_lost", sum(disk["lost"].values())), ("leases_left", stats["leases"]),
        ("preemptions", stats["engine"]["preemptions"]),
    ):  # fmt: skip
        totals[name] = totals.get(name, 0) + value
