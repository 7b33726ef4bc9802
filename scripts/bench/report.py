"""From rows to medians, ratios, the JSON file and the table on the terminal."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...model.files import write_text
from .plan import Plan
from .systems import PEERS

Row = dict[str, Any]
Summary = dict[str, Any]

FIGURES = ("tok_s", "decode_tok_s", "ttft_ms", "tokens_per_pass", "same_tokens")
"""Figures of a row that the summary has the median of."""

BETTER_WHEN_SMALLER = ("ttft_ms", "between_ms")


def median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def summarize(rows: Sequence[Row]) -> Summary:
    """Medians over the rows of one system: short rows are left out, and of `ttft_ms` those with cached tokens."""
    counted = [row for row in rows if not row.get("short")]
    summary: Summary = {"rows": len(rows), "counted": len(counted)}
    for figure in FIGURES:
        usable = [row for row in counted if figure != "ttft_ms" or not row.get("cached_tokens")]
        if (value := median(row.get(figure) for row in usable)) is not None:
            summary[figure] = value
    categories = dict.fromkeys(row["category"] for row in counted)
    if len(categories) > 1:
        summary["categories"] = {c: median(row["tok_s"] for row in counted if row["category"] == c) for c in categories}
    return summary


def with_peers(
    summary: dict[str, Summary], against: Sequence[str], best: str = "tok_s", largest: bool = True
) -> dict[str, Summary]:
    """Add, for each peer measured in several variants, an entry under its own name: the variant that is best."""
    result = dict(summary)
    for peer in against:
        variants = {system: summary[system] for system in PEERS[peer] if summary.get(system, {}).get(best) is not None}
        if peer not in result and variants:
            pick: Callable[..., str] = max if largest else min
            name = pick(variants, key=lambda system: variants[system][best])
            result[peer] = {**variants[name], "variant": name}
    return result


def ratios(summary: dict[str, Summary], figure: str) -> dict[str, float]:
    """Ours / peer for one figure."""
    ours = summary["umbra"].get(figure)
    return {
        system: ours / theirs[figure]
        for system, theirs in summary.items()
        if system != "umbra" and ours is not None and theirs.get(figure)
    }


def report(
    plan: Plan,
    machine: dict[str, Any],
    versions: dict[str, str],
    system_settings: dict[str, Any],
    rows: Sequence[Row],
    summary: dict[str, Summary],
) -> dict[str, Any]:
    """The report as written by `--json`. `ratio` is of `tok_s`; `ratios` of every figure."""
    figures = {key for entry in summary.values() for key, value in entry.items() if isinstance(value, float)}
    return _rounded(
        {
            "bench": plan.bench,
            "model": plan.model,
            "machine": machine,
            "versions": {"python": platform.python_version(), **versions},
            "settings": {**plan.settings(), "systems": system_settings},
            "rows": list(rows),
            "summary": summary,
            "ratio": ratios(summary, "tok_s"),
            "ratios": {figure: ratios(summary, figure) for figure in sorted(figures) if ratios(summary, figure)},
        }
    )


def _rounded(value: Any) -> Any:
    """Floats to six significant digits: more were never measured."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def save(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def show(content: dict[str, Any], console: Console) -> None:
    """The summary as a table: a row per system, a column per figure, and how many times ours is the peer's."""
    entries = content["summary"]
    figures = [
        key for key in dict.fromkeys(key for entry in entries.values() for key in entry)
        if all(not isinstance(entry.get(key), dict | str | list) for entry in entries.values())
        and key not in ("rows", "counted")
    ]  # fmt: skip
    machine = content["machine"]
    title = f"{content['bench']}, {content['model']}: medians of {content['settings']['rounds']} rounds"
    caption = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']} at the start"
    table = Table(title=title, caption=caption)
    table.add_column("system")
    for figure in figures:
        table.add_column(figure, justify="right")
    table.add_column("ours / this (tok_s)", justify="right")
    for system, entry in entries.items():
        name = f"{system} = {entry['variant'].removeprefix(system + '-')}" if "variant" in entry else system
        ratio = content["ratio"].get(system)
        table.add_row(
            name, *(_cell(entry.get(figure)) for figure in figures), f"{ratio:.2f}" if ratio is not None else ""
        )
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) and value >= 10 else f"{value:,.3g}"
