"""Going on with a conversation: from each tier, and after the process was killed, against computing it all again.

A conversation of a given length is stored; then a new turn of a few tokens arrives. `uncached_ms` is the time to the
first token when the history is on the device already: what has to be computed in any case. `over_uncached_ms` is what
a tier adds to it. Every way must give the same ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...configs.cache import GIB
from ...configs.prompt_sets import load_prompts
from .harness import Say, our_setup
from .machine import machine
from .plan import Plan
from .processes import BenchError, Worker
from .report import Row, Summary, median, report
from .systems.tiered import drop_pages

NEW_TOKENS = 16
"""Of an answer, to compare ids."""

WAYS = ("recompute", "device", "memory", "disk, in the page cache", "disk", "disk, after kill -9")
FORGET = {
    "memory": (True, False, False),
    "disk, in the page cache": (True, True, False),
    "disk": (True, True, True),
}
"""What is emptied before the new turn arrives: device, host memory, pages of the disk."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="umbra-resume-", dir=plan.folder) as folder:
        for number in range(plan.rounds):
            rows += _round(plan, Path(folder), number, say)
    settings = {"umbra": rows[0]["settings"]}
    for row in rows:
        row.pop("settings", None)
    ways = {way: _summary([row for row in rows if row["system"] == way]) for way in WAYS}
    base, floor = ways["recompute"]["ttft_ms"], ways["device"]["ttft_ms"]
    for entry in ways.values():
        entry |= {"over_uncached_ms": entry["ttft_ms"] - floor, "faster_than_recompute": base / entry["ttft_ms"]}
    different = sorted({row["system"] for row in rows if not row["same_ids"]})
    summary = {"umbra": {"conversations": plan.rounds, "uncached_ms": floor, "recompute_ms": base}, **ways}
    made = report(plan, before, settings["umbra"].pop("versions"), settings, rows, summary)
    return made | {"differences": f"other ids from {', '.join(different)}" if different else None}


def _summary(rows: Sequence[Row]) -> Summary:
    return {
        "rows": len(rows),
        "ttft_ms": median(row["ttft_ms"] for row in rows),
        "arrange_ms": median(row["arrange_ms"] for row in rows),
        "cached_tokens": median(float(row["cached_tokens"]) for row in rows),
    }


def _round(plan: Plan, folder: Path, number: int, say: Say) -> list[Row]:
    """One conversation: stored, continued in every way, and once more by a process that finds it on the disk."""
    rows = []
    worker = Worker("tiers/umbra")
    try:
        with worker.turn():
            history, turn = _open(plan, worker, folder, number, say)
            say(f"round {number + 1} of {plan.rounds}: computing {len(history)} tokens")
            worker.call("ask", history, 1, "alice", "conversation")
            worker.call("settle")
            for way in WAYS[:-1]:
                say(f"round {number + 1} of {plan.rounds}: {way}")
                if way in FORGET:
                    worker.call("forget", *FORGET[way])
                who, keep = ("bob", "nothing") if way == "recompute" else ("alice", "blocks")
                rows.append(_row(way, number, len(history), worker.call("ask", history + turn, NEW_TOKENS, who, keep)))
            worker.call("settle")
            settings = {**worker.settings, "versions": worker.versions}
    finally:
        worker.close()  # by SIGKILL
    drop_pages(folder)
    worker = Worker("tiers/umbra")
    try:
        with worker.turn():
            _open(plan, worker, folder, number, say)
            answer = worker.call("ask", history + turn, NEW_TOKENS, "alice", "blocks")
            rows.append(_row(WAYS[-1], number, len(history), answer))
    finally:
        worker.close()
    for row in rows:
        row["same_ids"] = row["ids"] == rows[0]["ids"]
    for row in rows:
        del row["ids"]
    rows[0]["settings"] = settings
    return rows


def _open(plan: Plan, worker: Worker, folder: Path, number: int, say: Say) -> tuple[list[int], list[int]]:
    """Start an engine; the conversation of this round and its new turn."""
    say(f"round {number + 1} of {plan.rounds}: loading {plan.model}")
    worker.load(our_setup(plan))
    needed = plan.prompt_tokens + plan.new_tokens + NEW_TOKENS
    if worker.settings["context"] < needed:
        raise BenchError(f"{needed} tokens are more than the context of {plan.model}, {worker.settings['context']}")
    cache = {"disk_quota": 64 * GIB, "memory": 4 * GIB, "disk_reserve": 0}
    worker.settings |= worker.call("start", str(folder), cache, needed, 3.0, 2)
    encoded = worker.call("encode", [prompt.turns[0] for prompt in load_prompts(plan.prompts)])
    shift = number * 7 % len(encoded)
    flat = [token for ids in encoded[shift:] + encoded[:shift] for token in ids]
    text = (flat * -(-(plan.prompt_tokens + plan.new_tokens) // len(flat)))[: plan.prompt_tokens + plan.new_tokens]
    return text[: plan.prompt_tokens], text[plan.prompt_tokens :]


def _row(way: str, number: int, history: int, answer: dict[str, Any]) -> Row:
    return {
        "system": way, "id": f"conversation {number + 1}", "category": "resume", "round": number + 1,
        "history": history, "ttft_ms": answer["ttft"] * 1e3, "arrange_ms": answer["cache"] * 1e3,
        "cached_tokens": sum(answer["cached"].values()), "cached_by_tier": answer["cached"],
        "ids": answer["ids"], "tok_s": None, "tokens_per_pass": None,
    }  # fmt: skip
