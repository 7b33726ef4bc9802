"""Single operations: how long they take, and how near that is to what the machine can do.

Every operation runs with our kernels and in plain JAX, in turns. Its bytes are those it cannot avoid (weights and KV
once, activations in and out); its operations are those of its products. The least time is what the larger of both takes
at the machine's measured peak, and `share` is the least time over the time it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .harness import Say, our_setup
from .machine import machine
from .peaks import Peaks, best, measure_peaks
from .plan import Plan
from .processes import Worker, Workers
from .report import Row, Summary, median, report

OPS = ("linear", "embed", "head", "attention", "sample", "table")


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    rows: list[Row] = []
    say("the machine's peaks")
    peaks = [measure_peaks(plan.threads)]
    with Workers([f"kernels/{system}" for system in plan.systems]) as workers:
        for worker in workers:
            say(f"loading {_name(worker)}")
            with worker.turn():
                worker.load(our_setup(plan))
                cases = worker.call("cases", plan.ops, plan.widths, plan.contexts)
        for number, case in enumerate(cases):
            say(f"{number + 1} of {len(cases)}: {label(case)}")
            rows += _measure(plan, list(workers), case)
        versions = {name: number for worker in workers for name, number in worker.versions.items()}
        settings: dict[str, Any] = {_name(worker): worker.settings for worker in workers}
    say("the machine's peaks")
    peaks.append(measure_peaks(plan.threads))
    highest = best(peaks)
    for row in rows:
        row |= shares(row, highest)
    settings["peaks"] = {
        "read_bytes_s": highest.read_bytes_s,
        "int8_ops_s": highest.int8_ops_s,
        "float32_ops_s": highest.float32_ops_s,
        "how": highest.how,
    }
    summary = {system: _summary([row for row in rows if row["system"] == system]) for system in plan.systems}
    return report(plan, before, versions, settings, rows, summary, of="calls_s")


def _name(worker: Worker) -> str:
    return worker.system.removeprefix("kernels/")


def label(case: dict[str, Any]) -> str:
    """An operation and its sizes, for people."""
    rows = f"{case['rows']} row" + ("s" if case["rows"] > 1 else "")
    if case["op"] != "attention":
        return f"{case['op']} {case['name']}, {rows}"
    many = f"{case['sequences']} x " if case["sequences"] > 1 else ""
    layout = ", contiguous" if case["layout"] == "contiguous" else ""
    return f"attention {case['name']}, {many}{rows} at {case['context']}{layout}"


def _measure(plan: Plan, workers: Sequence[Worker], case: dict[str, Any]) -> list[Row]:
    """A row per system, medians over rounds in which the systems take turns."""
    facts: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {worker.system: [] for worker in workers}
    for worker in workers:
        with worker.turn():
            facts[worker.system] = worker.call("begin", case)
    for number in range(plan.rounds):
        shift = number % len(workers)
        for worker in [*workers[shift:], *workers[:shift]]:
            with worker.turn():
                times[worker.system].append(worker.call("seconds"))
    return [_row(_name(worker), case, facts[worker.system], median(times[worker.system]) or 0.0) for worker in workers]


def _row(system: str, case: dict[str, Any], facts: dict[str, Any], seconds: float) -> Row:
    return {
        "system": system,
        "id": label(case),
        "category": case["op"],
        **{key: value for key, value in case.items() if key != "op"},
        "us": seconds * 1e6,
        "bytes": facts["bytes"],
        "bytes_s": facts["bytes"] / seconds,
        "ops": facts["ops"],
        "ops_s": facts["ops"] / seconds,
        "arithmetic": facts["arithmetic"],
        "tok_s": case["rows"] * case.get("sequences", 1) / seconds,
        "ttft_ms": None,
        "tokens_per_pass": None,
    }


def shares(row: Row, peaks: Peaks) -> dict[str, Any]:
    """The least time of an operation over the time it took, and what bounds it."""
    memory = row["bytes"] / peaks.read_bytes_s * 1e6
    peak = peaks.int8_ops_s if row["arithmetic"] == "int8" else peaks.float32_ops_s
    arithmetic = row["ops"] / peak * 1e6 if peak else 0.0
    return {
        "bandwidth_share": memory / row["us"],
        "arithmetic_share": arithmetic / row["us"] if peak else None,
        "bound": "memory" if memory >= arithmetic else "arithmetic",
        "share": max(memory, arithmetic) / row["us"],
    }


def _summary(rows: Sequence[Row]) -> Summary:
    """`calls_s` is the geometric mean over all operations, so that the ratio of two systems is the mean of ratios."""
    product = 1.0
    for row in rows:
        product *= (1e6 / row["us"]) ** (1 / len(rows))
    summary: Summary = {"operations": len(rows), "calls_s": product, "share": median(row["share"] for row in rows)}
    for op in dict.fromkeys(row["category"] for row in rows):
        summary[f"{op}_share"] = median(row["share"] for row in rows if row["category"] == op)
    walks = {(row["context"], row["layout"]): row["us"] for row in rows if row["name"] == "table walk"}
    for context in sorted({context for context, _ in walks}):
        over = walks[context, "pool"] / walks[context, "contiguous"]
        summary[f"table_walk_over_contiguous_at_{context}" if len(walks) > 2 else "table_walk_over_contiguous"] = over
    return summary


def show(content: dict[str, Any], console: Console) -> None:
    """A line per operation, columns for each system; the JSON file has more."""
    systems = list(content["summary"])
    how = content["settings"]["systems"]["peaks"]["how"]
    table = Table(title=f"operations of {content['model']}", caption=how, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for system in systems:
        table.add_column(f"{system}, us", justify="right")
        table.add_column("of peak", justify="right")
    if len(systems) > 1:
        table.add_column("speedup", justify="right")
    by_id: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        by_id.setdefault(row["id"], {})[row["system"]] = row
    for name, made in by_id.items():
        cells = [cell for s in systems for cell in (f"{made[s]['us']:,.1f}", f"{100 * made[s]['share']:.0f} %")]
        more = [f"{made[systems[1]]['us'] / made[systems[0]]['us']:.2f}x"] if len(systems) > 1 else []
        table.add_row(name, *cells, *more)
    console.print(table)
    for system, entry in content["summary"].items():
        for figure, value in entry.items():
            if figure.startswith("table_walk_over_contiguous"):
                at = figure.removeprefix("table_walk_over_contiguous").replace("_", " ")
                console.print(f"{system}: table walk over contiguous KV{at} {value:.2f}x")
