"""Whether the rate stays flat: tokens/s over windows of a long stream, with the growing KV divided out.

A pass reads all weights and the KV of every position before it, so tokens/s must fall as the context grows. Rates are
therefore multiplied by the bytes of a pass at the middle of their window, over those of the first window: what is left
is how even the engine is. That is right where a pass gives one token; with drafting on, rates follow the text, and are
reported as they are.
"""

from __future__ import annotations

import statistics
from typing import Any

from . import harness
from .harness import Say
from .plan import Plan
from .report import Row


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    content = harness.run(plan, say)
    settings = content["settings"]["systems"]
    for system, entry in content["summary"].items():
        rows = [row for row in content["rows"] if row["system"] == system]
        entry |= spread(rows, settings[system]["pass_bytes"], settings[system]["kv_token_bytes"])
    return content


def spread(rows: list[Row], pass_bytes: int, kv_token_bytes: int) -> dict[str, Any]:
    """`windows`: median tokens/s of each window over all rows; `even_windows`: the same with bytes divided out, over
    their mean; `flat_percent`: how far the furthest of these is from 1; `raw_percent`: the same without dividing."""
    counts = {len(row["windows"]) for row in rows}
    each = range(min(counts, default=0))
    if not each:
        return {}

    def read(row: Row, i: int) -> float:
        return pass_bytes + kv_token_bytes * row["windows"][i]["at"]

    raw = [statistics.median(row["windows"][i]["tok_s"] for row in rows) for i in each]
    even = [statistics.median(row["windows"][i]["tok_s"] * read(row, i) / read(row, 0) for row in rows) for i in each]
    return {
        "windows": [float(f"{rate:.6g}") for rate in raw],
        "even_windows": [float(f"{rate / statistics.mean(even):.6g}") for rate in even],
        "raw_percent": _furthest(raw),
        "flat_percent": _furthest(even),
    }


def _furthest(rates: list[float]) -> float:
    mean = statistics.mean(rates)
    return float(f"{100 * max(abs(rate / mean - 1) for rate in rates):.4g}")
