"""The levels side by side: speed, time to first token, agreement with the trunk, task score and thoughts; and what
subsets of layers trade.

Every way of answering runs every prompt and every task, one at a time and in turns, in one engine: changing the level
between requests compiles nothing. Speed is of prompts continued by a fixed number of tokens, the score of small tasks
with one right answer (tasks.py). Agreement is the share of emitted tokens that the whole trunk alone, drafting off,
would have chosen after the same tokens: 100 % where a level is exact.

Thinking budgets of the levels are scaled down, so that the largest is `--thoughts` tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...configs.levels import DEFAULT_LEVEL, HIGH, LEVELS, LOSSY
from ...configs.prompt_sets import load_prompts
from . import plots
from .harness import Say, our_setup, told
from .machine import machine
from .measures import repeats
from .plan import Plan
from .processes import Worker, Workers
from .report import Row, Summary, median, report
from .systems.levels import Way, stream_of
from .tasks import tasks

SYSTEM = "levels/umbra"
TASK_TOKENS = 48
"""Tokens that an answer to a task may have."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    prompts = load_prompts(plan.prompts, limit=plan.limit)
    with Workers([SYSTEM]) as workers, workers[SYSTEM].turn() as worker:
        say("loading umbra")
        worker.load(our_setup(plan))
        lossy = worker.call("lossy")
        at_levels, with_layers = ways(plan, lossy, worker.settings["thinks"] is not None)
        rows: list[Row] = []
        texts = [(prompt.id, prompt.category, prompt.turns[0]) for prompt in prompts]
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}: prompts")
            rows += _speeds(plan, worker, [*at_levels, *with_layers], texts, number)
        say("tasks")
        rows += _scores(plan, worker, at_levels)
        versions, settings = told(workers)
        summary = {way.name: _summary(way, rows) for way in at_levels}
        layers = [_trade(worker, subset, lossy, rows) for subset in _whole_and_subsets(lossy)]
    content = report(plan, before, versions, {"umbra": settings[SYSTEM]}, rows, summary)
    content |= {"lossy": {key: lossy[key] for key in ("relaxed", "allowed", "n_layers")}, "layers": layers}
    if plan.plots is not None:
        say("plots")
        draw(content, plan.plots)
    return content


def ways(plan: Plan, lossy: Mapping[str, Any], thinks: bool) -> tuple[list[Way], list[Way]]:
    """The ways to answer: every level, with thoughts where it has a budget for them, drafting off, and the lossy
    forms where something was calibrated; and every subset of layers."""
    chosen = [Way("umbra" if name == DEFAULT_LEVEL else f"umbra-{name}", name) for name in LEVELS]
    chosen.append(Way("umbra-off", DEFAULT_LEVEL, draft="off"))
    if thinks and plan.thoughts:
        budgets = {name: round(plan.thoughts * level.thinking / HIGH.thinking) for name, level in LEVELS.items()}
        chosen += [Way(f"umbra-{name}-thinking", name, max(8, n)) for name, n in budgets.items() if n]
    kept = {len(subset["layers"]): tuple(subset["layers"]) for subset in lossy["subsets"]}
    for name, level in LOSSY.items():
        margin = lossy["relaxed"]["margin"] if level.relaxed else 0.0
        layers = kept.get(lossy["allowed"]) if level.layers == "calibrated" else None
        if margin or layers:
            chosen.append(Way(f"umbra-{name}-lossy", name, relax=margin, layers=layers))
    subsets = [Way(f"umbra-{n}-layers", "minimal", layers=layers) for n, layers in kept.items()]
    return chosen, subsets


def _speeds(
    plan: Plan, worker: Worker, some: Sequence[Way], texts: Sequence[tuple[str, str, str]], number: int
) -> list[Row]:
    rows: list[Row] = []
    worker.call("answer", dataclasses.asdict(some[0]), "Hello", 8, True)  # a first request warms caches up
    for i, (name, category, text) in enumerate(texts):
        shift = (i + number) % len(some)
        made = []
        for way in (*some[shift:], *some[:shift]):
            got = worker.call("answer", dataclasses.asdict(way), text, plan.max_tokens, True)
            made.append((way, got))
        alone = worker.call("choices", [(_ids(got), len(got["prompt"])) for _, got in made])
        rows += [
            _row(way, f"{name}", category, number, got, chosen) for (way, got), chosen in zip(made, alone, strict=True)
        ]
    return rows


def _scores(plan: Plan, worker: Worker, some: Sequence[Way]) -> list[Row]:
    rows: list[Row] = []
    for task in tasks(plan.tasks):
        for way in some:
            got = worker.call("answer", dataclasses.asdict(way), task.question, TASK_TOKENS, False)
            row = {**_row(way, task.id, f"task {task.kind}", 0, got, None), "right": task.score(got["text"])}
            rows.append({**row, "text": got["text"]})
    return rows


def _ids(got: Mapping[str, Any]) -> list[int]:
    return [*got["prompt"], *got["stream"]["token_ids"]]


def _row(way: Way, name: str, category: str, number: int, got: dict[str, Any], alone: Sequence[int] | None) -> Row:
    stream = stream_of(got)
    tokens = len(stream.token_ids)
    thoughts = got["thought_tokens"]
    row = {
        "system": way.name,
        "round": number + 1,
        "id": name,
        "category": category,
        "level": way.level,
        "budget": way.budget,
        "tokens": tokens,
        "passes": stream.passes or tokens,
        "thought_tokens": thoughts,
        "cached_tokens": stream.cached_tokens,
        "tok_s": stream.tok_s,
        "ttft_ms": stream.ttft * 1e3,
        "tokens_per_pass": tokens / (stream.passes or tokens) if tokens else None,
        "repeats": repeats(stream.token_ids),
    }
    if alone is not None:  # forced conclusions of thoughts are nobody's choice
        pairs = list(zip(stream.token_ids, alone, strict=True))[thoughts:]
        row |= {"judged": len(pairs), "same": sum(a == b for a, b in pairs)}
    return row


def _summary(way: Way, rows: Sequence[Row]) -> Summary:
    """Medians over the prompts, shares over tokens and tasks. Prompts of which a part was cached have no part in the
    time to first token."""
    own = [row for row in rows if row["system"] == way.name]
    speed = [row for row in own if "judged" in row]
    judged = [row for row in own if "right" in row]
    kept = [row for row in speed if not row["repeats"]]
    summary: Summary = {
        "level": way.level,
        "budget": way.budget,
        "ttft_ms": median(row["ttft_ms"] for row in speed if not row["cached_tokens"]),
        "tok_s": median(row["tok_s"] for row in speed),
        "not_repeating_tok_s": median(row["tok_s"] for row in kept),
        "tokens_per_pass": _share(speed, "tokens", "passes"),
        "not_repeating_tokens_per_pass": _share(kept, "tokens", "passes"),
        "agreement": _percent(_share(speed, "same", "judged")),
        "task_score": _percent(statistics.mean(row["right"] for row in judged)) if judged else None,
        "thought_tokens": statistics.mean(row["thought_tokens"] for row in judged) if judged else None,
    }
    return {key: value for key, value in summary.items() if value is not None}


def _trade(worker: Worker, subset: Mapping[str, Any], lossy: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What one subset of layers gives and costs; the whole trunk has no losses."""
    n = len(subset["layers"])
    name = "umbra-minimal" if n == lossy["n_layers"] else f"umbra-{n}-layers"
    own = [row for row in rows if row["system"] == name and "judged" in row]
    kept = {
        key: subset.get(key) for key in ("agreement", "perplexity_change", "loss", "bound", "passed", "speed_bound")
    }
    return {
        "layers": n,
        **kept,
        "tok_s": median(row["tok_s"] for row in own),
        "tokens_per_pass": _share(own, "tokens", "passes"),
        "ms_per_pass": _ms_per_pass(own),
        "weight_mb": worker.call("weight_bytes", n) / 1e6,
    }


def _whole_and_subsets(lossy: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    whole = {
        "layers": list(range(lossy["n_layers"])), "agreement": 1.0, "perplexity_change": 0.0, "loss": 0.0, "bound": 0.0,
        "passed": True, "speed_bound": 1.0,
    }  # fmt: skip
    return [whole, *lossy["subsets"]]


def _ms_per_pass(rows: Sequence[Row]) -> float | None:
    """Milliseconds of a pass: drafts are not equally good for every subset, so tokens/s alone would mislead."""
    return median(1e3 * row["tokens_per_pass"] / row["tok_s"] for row in rows if row["tok_s"])


def _share(rows: Sequence[Row], what: str, per: str) -> float | None:
    total = sum(row[per] for row in rows)
    return sum(row[what] for row in rows) / total if total else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100.0 * value


def draw(content: Mapping[str, Any], folder: Path) -> None:
    """Pictures of the levels and of what subsets of layers trade, as `levels.png` and `layers.png`."""
    names = list(content["summary"])
    figures = {
        "time to first token, ms": "ttft_ms",
        "tokens/s": "tok_s",
        "tokens per pass": "tokens_per_pass",
        "agreement, %": "agreement",
        "task score, %": "task_score",
        "thought tokens": "thought_tokens",
    }
    shown = {label: [content["summary"][name].get(key) for name in names] for label, key in figures.items()}
    labels = [name.removeprefix("umbra-").replace("umbra", DEFAULT_LEVEL) for name in names]
    plots.bars(folder / "levels.png", f"levels of {content['model']}", labels, shown)
    trades = content["layers"]
    if len(trades) < 2:
        return
    kept = [trade["layers"] for trade in trades]
    panels = {
        "agreement, %": [("", kept, [100 * trade["agreement"] for trade in trades])],
        "perplexity change, %": [("", kept, [100 * trade["perplexity_change"] for trade in trades])],
        "ms a pass": [("", kept, [trade["ms_per_pass"] or 0.0 for trade in trades])],
        "tokens/s": [("", kept, [trade["tok_s"] or 0.0 for trade in trades])],
        "weights, MB": [("", kept, [trade["weight_mb"] for trade in trades])],
    }
    plots.lines(folder / "layers.png", f"layers of {content['model']}", "layers kept", panels)


def markdown(content: Mapping[str, Any]) -> str:
    """README's table of levels."""
    lines = [
        "| level | first token | tokens/s | tokens per pass | not repeating | agreement | task score | thoughts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in content["summary"].items():
        label = name.removeprefix("umbra-").replace("umbra", f"{DEFAULT_LEVEL} (default)").replace("-", ", ")
        cells = [
            _cell(entry.get("ttft_ms"), "{:,.0f} ms"),
            _cell(entry.get("tok_s"), "{:,.0f}"),
            _cell(entry.get("tokens_per_pass"), "{:.2f}"),
            _cell(entry.get("not_repeating_tokens_per_pass"), "{:.2f}"),
            _cell(entry.get("agreement"), "{:.1f} %"),
            _cell(entry.get("task_score"), "{:.0f} %"),
            _cell(entry.get("thought_tokens"), "{:.0f}"),
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    relaxed = content["lossy"]["relaxed"]
    if relaxed["margin"]:
        note = (
            f"Relaxed acceptance (opt-in): a margin of {relaxed['margin']:g} nats, at most "
            f"{100 * relaxed['bound']:.1f} % other tokens with {100 * relaxed['confidence']:.0f} % confidence "
            f"({relaxed['prompts']} prompts)."
        )
    else:
        note = "Relaxed acceptance is not calibrated for this trunk."
    settings = content["settings"]["systems"]["umbra"]
    if settings.get("thinks") == "generic":
        note += " The trunk was not trained to think: thoughts show the mechanism only."
    return "\n" + "\n".join(lines) + f"\n\n{note}\n"


def layers_markdown(content: Mapping[str, Any]) -> str | None:
    """README's table of layer subsets."""
    if len(content["layers"]) < 2:
        return None
    lines = [
        "| layers | agreement | perplexity | other tokens at most | ms a pass | gain at most | tokens/s | weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for trade in content["layers"]:
        lines.append(
            f"| {trade['layers']} | {100 * trade['agreement']:.1f} % | {100 * trade['perplexity_change']:+.1f} % "
            f"| {100 * trade['bound']:.1f} % | {_cell(trade['ms_per_pass'], '{:.2f}')} | {trade['speed_bound']:.2f}x "
            f"| {_cell(trade['tok_s'], '{:,.0f}')} | {trade['weight_mb']:.0f} MB |"
        )
    allowed, n = content["lossy"]["allowed"], content["lossy"]["n_layers"]
    used = "all layers are used" if allowed == n else f"{allowed} of {n} layers are allowed at the lossy minimal level"
    return "\n" + "\n".join(lines) + f"\n\nBy the bound, {used}.\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
