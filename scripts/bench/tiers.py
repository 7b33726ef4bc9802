"""The tiers at work: how long a block takes from the disk, and what writing blocks costs while answers are made.

Reads. Blocks of the model's own size are written, and read and verified one by one in random order, from the disk and
from the system's page cache. Plain reads of the same bytes stand beside them.

Writing. The same streams are decoded by an engine without tiers and by one that writes every sealed block to the disk,
in turns; prompts are new each time, so that nothing is found.
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
from .processes import Worker
from .report import Row, Summary, median, percentile, report

PROMPT = 64
"""Tokens of a prompt while writing is measured."""

CACHE = {"disk_quota": 16 * GIB, "disk_reserve": 0}


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    rows: list[Row] = []
    context = PROMPT + plan.max_tokens
    with tempfile.TemporaryDirectory(prefix="umbra-cache-", dir=plan.folder) as folder:
        workers = {"off": Worker("tiers/umbra"), "on": Worker("tiers/umbra")}
        try:
            for name, worker in workers.items():
                say(f"loading {plan.model}, tiers {name}")
                with worker.turn():
                    worker.load(our_setup(plan))
                    started = worker.call(
                        "start", folder if name == "on" else None, CACHE, context, plan.sequences, plan.sequences
                    )
                    worker.settings |= started
            for number in range(plan.rounds):
                rows += _reads(plan, workers["on"], number, say)
                rows += _writes(plan, workers, number, say)
            with workers["on"].turn():
                workers["on"].call("check")
                stats = workers["on"].call("stats")
            settings = {f"tiers {name}": worker.settings for name, worker in workers.items()}
            versions = workers["on"].versions
        finally:
            for worker in workers.values():
                worker.close()
    summary = {"umbra": {**_read_summary(rows), **_write_summary(rows, stats)}}
    return report(plan, before, versions, settings, rows, summary)


def _reads(plan: Plan, worker: Worker, number: int, say: Say) -> list[Row]:
    rows = []
    for cached in (False, True):
        where = "page cache" if cached else "disk"
        say(f"round {number + 1} of {plan.rounds}: {plan.limit} blocks from the {where}")
        with worker.turn():
            made = worker.call("block_reads", plan.limit, cached)
        for how, seconds in made.items():
            rows.append(
                {
                    "system": "umbra" if how == "ours" else how, "id": where, "category": "read", "round": number + 1,
                    "block_bytes": worker.settings["block_bytes"], "reads": len(seconds),
                    "p50_ms": percentile(seconds, 50, 1e3), "p95_ms": percentile(seconds, 95, 1e3),
                    "tok_s": None, "ttft_ms": None, "tokens_per_pass": None,
                }
            )  # fmt: skip
    return rows


def _writes(plan: Plan, workers: dict[str, Worker], number: int, say: Say) -> list[Row]:
    rng = random.Random(number)
    rows = []
    with workers["off"].turn():
        vocabulary = workers["off"].call("vocabulary")
    for streams in dict.fromkeys((1, plan.sequences)):
        prompts = [[rng.randrange(1, vocabulary) for _ in range(PROMPT)] for _ in range(streams)]
        order = ["off", "on"] if number % 2 else ["on", "off"]
        for name in order:
            say(f"round {number + 1} of {plan.rounds}: {streams} streams, tiers {name}")
            with workers[name].turn():
                made = workers[name].call("decode_rate", prompts, plan.max_tokens, "alice")
                workers[name].call("settle")
            rows.append(
                {
                    "system": "umbra", "id": f"{streams} streams, tiers {name}", "category": "write", "tiers": name,
                    "round": number + 1, "streams": streams, "tok_s": made["tok_s"],
                    "upkeep_ms": made["upkeep_s"] * 1e3, "ttft_ms": None, "tokens_per_pass": None,
                }
            )  # fmt: skip
    return rows


def _read_summary(rows: Sequence[Row]) -> Summary:
    summary: Summary = {}
    for row in rows:
        if row["category"] != "read":
            continue
        name = f"{'read' if row['system'] == 'umbra' else 'plain_read'}_{row['id'].replace(' ', '_')}"
        same = [other for other in rows if (other["system"], other["id"]) == (row["system"], row["id"])]
        for figure in ("p50_ms", "p95_ms"):
            summary[f"{name}_{figure}"] = median(other[figure] for other in same)
    return summary


def _write_summary(rows: Sequence[Row], stats: dict[str, Any]) -> Summary:
    """`write_cost`: the share of tokens/s lost, the median over rounds of neighbouring runs. `upkeep`: what the
    engine's thread spends on the tiers, per token."""
    summary: Summary = {}
    written = [row for row in rows if row["category"] == "write"]
    for streams in dict.fromkeys(row["streams"] for row in written):
        rates = {
            name: [r["tok_s"] for r in written if r["streams"] == streams and r["tiers"] == name]
            for name in ("off", "on")
        }
        for name, values in rates.items():
            summary[f"tok_s_of_{streams}_tiers_{name}"] = median(values)
        summary[f"write_cost_of_{streams}"] = median(
            1 - on / off for off, on in zip(rates["off"], rates["on"], strict=True)
        )
        on = [row for row in written if row["streams"] == streams and row["tiers"] == "on"]
        summary[f"upkeep_of_{streams}_ms"] = median(row["upkeep_ms"] for row in on)
    disk = stats["tiers"]["disk"]
    summary["written_bytes"] = float(disk["written_bytes"])
    summary["write_amplification"] = stats["write_amplification"]
    summary["seal_lag_p95_s"] = stats["seal_lag_p95"]
    summary["refused"] = stats["writes"].get("queue_full", 0)
    return summary
