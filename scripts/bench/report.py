"""From rows to medians, ratios, the JSON file and the table on the terminal."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...configs.files import write_text
from .expected import judge
from .plan import Plan
from .systems import PEERS

Row = dict[str, Any]
Summary = dict[str, Any]

FIGURES = ("tok_s", "decode_tok_s", "answer_tok_s", "ttft_ms", "tokens_per_pass", "same_tokens")
"""Figures of a row that the summary has the median of."""

DIFFERENCES = ("perplexity_change",)
"""Figures that may be 0 or negative, so that a ratio of them means nothing."""


def median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def percentile(values: Sequence[float], p: float, scale: float = 1.0) -> float | None:
    """Linear interpolation between the closest ranks, times `scale`; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return scale * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def summarize(rows: Sequence[Row]) -> Summary:
    """Medians over the undisturbed rows of one system: short rows are left out, and of `ttft_ms` those with cached
    tokens."""
    counted = [row for row in rows if not row.get("short") and not row.get("busy")]
    summary: Summary = {"rows": len(rows), "counted": len(counted)}
    for figure in FIGURES:
        usable = [row for row in counted if figure != "ttft_ms" or not row.get("cached_tokens")]
        if (value := median(row.get(figure) for row in usable)) is not None:
            summary[figure] = value
    categories = dict.fromkeys(row["category"] for row in counted)
    if len(categories) > 1:
        summary["categories"] = {c: median(row["tok_s"] for row in counted if row["category"] == c) for c in categories}
    return summary


def with_peers(summary: dict[str, Summary], against: Sequence[str]) -> dict[str, Summary]:
    """Add, for each peer measured in several variants, an entry under its own name: the variant of most tokens/s."""
    result = dict(summary)
    for peer in against:
        speeds = {system: summary[system]["tok_s"] for system in PEERS[peer] if summary[system].get("tok_s")}
        if len(PEERS[peer]) > 1 and speeds:
            name = max(speeds, key=lambda system: speeds[system])
            result[peer] = {**summary[name], "variant": name}
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
    of: str = "tok_s",
) -> dict[str, Any]:
    """The report as written by `--json`. `ratio` is ours / peer of the figure `of`; `ratios` of every figure."""
    figures = {key for entry in summary.values() for key, value in entry.items() if isinstance(value, float)}
    figures -= set(DIFFERENCES)
    return _rounded(
        {
            "bench": plan.bench,
            "model": plan.model,
            "machine": machine,
            "versions": {"python": platform.python_version(), **versions},
            "settings": {**plan.settings(), "systems": system_settings},
            **judge(plan, machine, summary),
            "rows": list(rows),
            "summary": summary,
            "ratio": ratios(summary, of),
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
    """The summary as a table: a row per figure, a column per system, ours / peer in parentheses."""
    entries = content["summary"]
    machine = content["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']} at the start"
    table = Table(
        title=f"{content['bench']}, {content['model']}{_rounds(content)}",
        caption=f"{where}; in parentheses: ours / peer",
    )
    table.add_column("")
    for system, entry in entries.items():
        variant = entry.get("variant", "").removeprefix(f"{system}-")
        table.add_column(f"{system} = {variant}" if variant else system, justify="right")
    for figure in dict.fromkeys(key for entry in entries.values() for key in entry):
        if figure in ("categories", "variant"):
            continue
        ratio = content["ratios"].get(figure, {})
        cells = [
            _cell(entry.get(figure)) + (f" ({ratio[system]:.2f})" if system in ratio else "")
            for system, entry in entries.items()
        ]
        table.add_row(figure, *cells)
    console.print(table)
    if content["void"]:
        console.print(f"VOID: {content['void']}", highlight=False, markup=False)


def _rounds(content: dict[str, Any]) -> str:
    rounds = content["settings"].get("rounds")
    return f": medians of {rounds} rounds" if rounds else ""


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:,.1f}" if isinstance(value, float) and value >= 10 else f"{value:,.3g}"
