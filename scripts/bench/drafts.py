"""Drafting in figures: per category, without answers that repeat themselves, and against other ways of drafting."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table

from .plan import Plan
from .report import median

Row = dict[str, Any]
Figures = dict[str, float | int | None]


def compare(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """For the report of `decode`: for each of our systems figures of all prompts and of every category, and how they
    compare. Rows beside busy processes are left out.

    `ratio` is the median over prompts and rounds of ours over the other's tokens/s, of all and per category.
    `gate_over_best_fixed` is ours over the fastest of the fixed draft lengths, in tokens/s over all prompts together.
    """
    quiet = [row for row in rows if not row.get("busy")]
    kept = _not_repeating(quiet)
    content: dict[str, Any] = {"systems": {}, "ratio": {}}
    for system in plan.drafting:
        own = [row for row in quiet if row["system"] == system]
        categories = {c: figures(some, kept) for c, some in _by_category(own).items()}
        content["systems"][system] = {"all": figures(own, kept), "categories": categories}
        means = [value for entry in categories.values() if (value := entry["tokens_per_pass"]) is not None]
        content["systems"][system]["mean_of_categories"] = statistics.mean(means) if means else None
    ours = {_key(row): row for row in quiet if row["system"] == "umbra"}
    for system in dict.fromkeys(row["system"] for row in quiet if row["system"] != "umbra"):
        pairs = [(ours[_key(row)], row) for row in quiet if row["system"] == system]
        content["ratio"][system] = {
            "all": _ratio(pairs),
            "not_repeating": _ratio([pair for pair in pairs if _key(pair[0]) in kept]),
            "categories": {
                category: _ratio([pair for pair in pairs if pair[0]["category"] == category])
                for category in dict.fromkeys(row["category"] for row in ours.values())
            },
        }
    fixed = {
        system: content["systems"][system]["all"]["pooled_tok_s"] for system in plan.drafting if "-fixed-" in system
    }
    if fixed:
        best = max(fixed, key=lambda system: fixed[system])
        content["best_fixed"] = best
        content["gate_over_best_fixed"] = content["systems"]["umbra"]["all"]["pooled_tok_s"] / fixed[best]
    return content


def figures(rows: Sequence[Row], kept: Set[tuple[int, str]]) -> Figures:
    """Of some rows: tokens per pass and tokens/s of all tokens together (`tok_s` is the median of a row); the same of
    answers up to their end; and of the rows in `kept`, which are those that do not repeat themselves."""
    some = [row for row in rows if _key(row) in kept]
    return {
        "rows": len(rows),
        "tokens_per_pass": _pooled(rows, "tokens", "passes"),
        "answer_tokens_per_pass": _pooled(rows, "answer_tokens", "answer_passes"),
        "tok_s": median(row["tok_s"] for row in rows),
        "pooled_tok_s": _pooled(rows, "tokens", "decode_s"),
        "fastest_tok_s": max((row["tok_s"] for row in rows if row["tok_s"]), default=None),
        "not_repeating_rows": len(some),
        "not_repeating_tokens_per_pass": _pooled(some, "tokens", "passes"),
        "not_repeating_tok_s": median(row["tok_s"] for row in some),
    }


def show(content: Mapping[str, Any], console: Console) -> None:
    """Tokens per pass and tokens/s per category: a row per category, columns for each of our systems."""
    systems, ratio = content["systems"], content["ratio"]
    categories = systems["umbra"]["categories"]
    if len(categories) < 2:
        return
    table = Table(
        title="tokens per pass (without answers that repeat themselves), tokens/s",
        caption="in brackets: umbra over it, median over prompts",
    )
    table.add_column("category")
    for system in systems:
        table.add_column(system, justify="right")
    for category in categories:
        cells = [_cell(entry["categories"][category], ratio.get(s), category) for s, entry in systems.items()]
        table.add_row(category, *cells)
    table.add_section()
    table.add_row("all", *(_cell(entry["all"], ratio.get(system), None) for system, entry in systems.items()))
    means = (f"{entry['mean_of_categories']:.2f}" for entry in systems.values())
    table.add_row("mean of categories", *means)
    console.print(table)
    if "best_fixed" in content:
        console.print(
            f"the gate over the best fixed length ({content['best_fixed']}): {content['gate_over_best_fixed']:.3f}"
        )


def markdown(content: Mapping[str, Any]) -> str:
    """The same for README: of our default, with the ratio to drafting off where that was measured."""
    ours, off = content["systems"]["umbra"], content["ratio"].get("umbra-off")
    lines = [
        "| category | tokens per pass | up to the answer's end | not repeating | tokens/s | over drafting off |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in {**ours["categories"], "**all**": ours["all"]}.items():
        over = None if off is None else off["categories"].get(name, off["all"])
        kept = f"{_number(entry['not_repeating_tokens_per_pass'])} ({entry['not_repeating_rows']} of {entry['rows']})"
        lines.append(
            f"| {name} | {_number(entry['tokens_per_pass'])} | {_number(entry['answer_tokens_per_pass'])} | {kept} "
            f"| {entry['tok_s']:,.0f} | {'-' if over is None else f'{over:.2f}x'} |"
        )
    parts = [f"Mean of the categories {ours['mean_of_categories']:.2f} tokens per pass"]
    parts += [f"fastest request {ours['all']['fastest_tok_s']:,.0f} tokens/s"]
    if "best_fixed" in content:
        length = content["best_fixed"].rpartition("-")[2]
        parts.append(f"the gate is {content['gate_over_best_fixed']:.2f}x the best fixed length ({length})")
    for system, entry in content["systems"].items():
        if system != "umbra":
            per_pass = f"{entry['all']['tokens_per_pass']:.2f} tokens per pass"
            alone = entry["all"]["not_repeating_tokens_per_pass"]
            parts.append(
                f"{system.removeprefix('umbra-')}: {per_pass}, not repeating {_number(alone)}, "
                f"ours is {content['ratio'][system]['all']:.2f}x in tokens/s"
            )
    return "\n" + "\n".join(lines) + "\n\n" + "; ".join(parts) + ".\n"


def _not_repeating(rows: Sequence[Row]) -> set[tuple[int, str]]:
    """Rounds and ids of our answers that do not repeat themselves: the same answers whatever drafted them."""
    return {_key(row) for row in rows if row["system"] == "umbra" and not row["repeats"]}


def _key(row: Row) -> tuple[int, str]:
    return row["round"], row["id"]


def _by_category(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row)
    return groups


def _pooled(rows: Sequence[Row], what: str, per: str) -> float | None:
    """The sum of one figure over the sum of another, over rows that have both."""
    there = [row for row in rows if row.get(what) and row.get(per)]
    return sum(row[what] for row in there) / sum(row[per] for row in there) if there else None


def _ratio(pairs: Sequence[tuple[Row, Row]]) -> float | None:
    there = [(a["tok_s"], b["tok_s"]) for a, b in pairs if a["tok_s"] and b["tok_s"]]
    return statistics.median(a / b for a, b in there) if there else None


def _cell(entry: Figures, ratio: Mapping[str, Any] | None, category: str | None) -> str:
    per_pass = f"{_number(entry['tokens_per_pass'])} ({_number(entry['not_repeating_tokens_per_pass'])})"
    over = None if ratio is None else ratio["all"] if category is None else ratio["categories"].get(category)
    return f"{per_pass}, {entry['tok_s']:,.0f}" + (f" [{over:.2f}]" if over else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
