"""What a pass costs: of several tokens over one token, at a long context over a short one; and what drafting adds.

A row of a report is one round: the median time of passes of one width, or of one token at two contexts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from ...configs.prompt_sets import load_prompts
from .harness import Say, load_others, our_setup, told
from .machine import machine
from .peaks import Peaks, best, measure_peaks
from .plan import Plan
from .processes import BenchError, Worker, Workers
from .report import Row, Summary, median, report

REPEATS = 30
"""Passes of each kind in a round."""

SHORT = 128
"""Tokens of the short context."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    peaks: list[Peaks] = []
    rows: list[Row] = []
    with Workers(plan.systems) as workers:
        say("loading umbra")
        ours = workers["umbra"]
        with ours.turn():
            ours.load(our_setup(plan, sequences=max(plan.widths)))
            encoded = ours.call("encode", [prompt.turns[0] for prompt in load_prompts(plan.prompts)])
        load_others(plan, workers, 0, say, sequences=max(plan.widths))
        ids = _ids(plan, encoded, ours.settings["context"])
        kv_bytes = {worker.system: _fill(worker, ids, say) for worker in workers}
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}: memory bandwidth")
            peaks.append(measure_peaks(plan.threads))
            shift = number % len(plan.systems)
            ordered = list(workers)
            for worker in itertools.chain(ordered[shift:], ordered[:shift]):
                say(f"round {number + 1} of {plan.rounds}: {worker.system}")
                with worker.turn():
                    made = [*_at_length(plan, worker, ids, kv_bytes[worker.system]), *_of_widths(plan, worker, ids)]
                rows += [{"system": worker.system, "round": number + 1, **row} for row in made]
        versions, settings = told(workers)
    bandwidth = best(peaks).read_bytes_s
    summary = {s: _summary([row for row in rows if row["system"] == s], bandwidth) for s in plan.systems}
    settings["peaks"] = {"read_bytes_s": bandwidth, "how": peaks[0].how}
    return report(plan, before, versions, settings, rows, summary)


def _ids(plan: Plan, encoded: Sequence[Sequence[int]], context: int) -> list[int]:
    """Tokens for the long context and one pass behind it."""
    if plan.prompt_tokens + 1 > context:
        raise BenchError(
            f"a pass behind {plan.prompt_tokens} tokens needs a context of {plan.prompt_tokens + 1}; that of "
            f"{plan.model} is {context}; use a smaller --context"
        )
    flat = [token for ids in encoded for token in ids]
    return (flat * -(-(plan.prompt_tokens + 1) // len(flat)))[: plan.prompt_tokens + 1]


def _fill(worker: Worker, ids: list[int], say: Say) -> int:
    """Have a worker compute the KV of the long context; bytes of it that a pass reads."""
    say(f"prefilling {len(ids) - 1} tokens: {worker.system}")
    with worker.turn():
        return int(worker.call("fill", ids[:-1]))


def _at_length(plan: Plan, worker: Worker, ids: list[int], kv_bytes: int) -> list[Row]:
    # What is at the short position is overwritten by the same token with the same KV.
    short = min(SHORT, plan.prompt_tokens // 2)
    at = [short, plan.prompt_tokens]
    near, far = (statistics.median(times) for times in worker.call("decode_at", ids, at, REPEATS))
    row = {"context": plan.prompt_tokens, "short_context": short, "short_ms": near * 1e3, "kv_bytes": kv_bytes}
    return [_row("context", f"1 token after {plan.prompt_tokens}", 1, far) | row | {"added_ms": (far - near) * 1e3}]


def _of_widths(plan: Plan, worker: Worker, ids: list[int]) -> list[Row]:
    short = min(SHORT, plan.prompt_tokens // 2)
    made = worker.call("passes", ids[: short + max(plan.widths)], plan.widths, REPEATS)
    one = statistics.median(made.pop("decode"))
    rows = [_row("pass", "plain decode of 1 token", 1, one)]
    for width, times in made.items():
        seconds = statistics.median(times)
        rows.append(_row("pass", f"pass of {width} tokens", int(width), seconds) | {"over_one": seconds / one})
    drafting = worker.call("draft_seconds", ids[:short], REPEATS)
    if drafting is not None:
        seconds = statistics.median(drafting)
        rows.append(_row("draft", "drafting 4 tokens", 4, seconds) | {"over_pass": seconds / one})
    return rows


def _row(category: str, name: str, width: int, seconds: float) -> Row:
    return {
        "id": name,
        "category": category,
        "width": width,
        "ms": seconds * 1e3,
        "tok_s": width / seconds,
        "ttft_ms": None,
        "tokens_per_pass": float(width),
    }


def _summary(rows: Sequence[Row], bandwidth: float) -> Summary:
    """Medians over rounds. `tok_s` is of plain decoding."""
    plain = [row for row in rows if row["category"] == "pass" and "over_one" not in row]
    summary: Summary = {"tok_s": median(row["tok_s"] for row in plain), "plain_ms": median(r["ms"] for r in plain)}
    wide = [row for row in rows if "over_one" in row]
    for width in dict.fromkeys(row["width"] for row in wide):
        some = [row for row in wide if row["width"] == width]
        summary[f"pass_{width}_ms"] = median(row["ms"] for row in some)
        summary[f"pass_{width}_over_1"] = median(row["over_one"] for row in some)
    far = [row for row in rows if row["category"] == "context"]
    added, read = median(row["added_ms"] for row in far), far[0]["kv_bytes"] / bandwidth * 1e3
    assert added is not None
    if drafting := [row for row in rows if row["category"] == "draft"]:
        summary["draft_4_ms"] = median(row["ms"] for row in drafting)
        summary["draft_4_over_1"] = median(row["over_pass"] for row in drafting)
    summary |= {"context_added_ms": added, "context_read_ms": read, "context_over_read": added / read}
    return summary
