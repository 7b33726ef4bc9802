"""The simulator of the tiers: fitted to this machine, checked against it, and only then asked about others.

Prompts of several lengths, and loads of several sizes from each tier, are measured here; the profile of this machine is
fitted to some of them and must tell the time to the first token of the others within `TOLERANCE`. Figures of machines
that were not measured are labelled `simulated`, and left out where the check fails.

With a trace: hit ratios by policy and capacity, and what its requests wait for on each machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cache.replay import POLICIES, hit_curves
from ...cache.simulator import PROFILES, Profile, Simulator, TierProfile, fitted, resume_seconds, summarise
from ...cache.traces import TracedRequest, read_trace, reuse_bound
from ...configs.cache import GIB
from ...configs.engine import BLOCK
from ...configs.prompt_sets import load_prompts
from .harness import Say, our_setup
from .machine import machine
from .plan import Plan
from .processes import Worker, Workers
from .report import Row, median, report

HISTORIES = (1024, 2048, 4096, 7680)
"""The first and the last are fitted to, the others predicted."""

TOLERANCE = 0.25
PREFILLS = ((0, 1), (0, 4), (4, 1), (4, 4), (12, 4))
"""(tokens before, prompt tokens), in sixteenths of the longest history: what compute and attention are fitted to."""

NEW = 32
REPEATS = 3
TRACE_BLOCK = 512
"""Tokens of a block of the public traces; an access log of ours has blocks of `BLOCK`."""

CAPACITIES = (1000, 2000, 5000, 10_000, 20_000, 50_000)
TRACED = 2000
"""Requests of a trace that are simulated."""

FORGET = {"memory": (True, False, False), "disk": (True, True, True)}


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure, fit, check, simulate, and give the report."""
    before = machine()
    with Workers(["tiers/umbra"]) as workers:
        worker = workers["tiers/umbra"]
        with worker.turn(), tempfile.TemporaryDirectory(prefix="umbra-simulate-", dir=plan.folder) as folder:
            measured = _measure(plan, worker, folder, say)
        settings, versions = {"umbra": worker.settings}, worker.versions
    profile = _fit(plan, measured)
    rows = _checked(plan, measured, profile)
    worst = max(row["error"] for row in rows if not row["fitted"])
    good = worst <= TOLERANCE
    summary: dict[str, Any] = {"umbra": {"worst_error": worst, "tolerance": TOLERANCE, **_described(profile)}}
    if good:
        for name, other in PROFILES.items():
            summary[f"simulated {name}"] = _resume_times(other, plan.histories)
    if good and plan.plots is not None:
        _draw_resumed(plan.plots, plan.histories, profile)
    if plan.trace is not None:
        say(f"replaying {plan.trace.name}")
        summary |= _traced(plan, profile, good)
    made = report(plan, before, versions, settings, rows, summary)
    return made | {"differences": None if good else f"the simulator is off by {100 * worst:.0f} % on this machine"}


# ---- this machine


def _measure(plan: Plan, worker: Worker, folder: str, say: Say) -> dict[str, Any]:
    """Seconds to the first token: `prefills` by (before, tokens), `resumed` by (tier, history); of a step; of loads."""
    say(f"loading {plan.model}")
    worker.load(our_setup(plan))
    longest = max(plan.histories) + NEW + 128
    part = max(plan.histories) // 16
    cache = {"disk_quota": 64 * GIB, "memory": 4 * GIB, "disk_reserve": 0, "load_margin": 1e-9}
    worker.settings |= worker.call("start", folder, cache, longest, 3.0, 2)
    encoded = worker.call("encode", [prompt.turns[0] for prompt in load_prompts(plan.prompts)])
    flat = [token for ids in encoded for token in ids]
    text = (flat * -(-longest // len(flat)))[:longest]
    prefills: dict[tuple[int, int], list[float]] = {(before * part, n * part): [] for before, n in PREFILLS}
    resumed: dict[tuple[str, int], list[float]] = {}
    loads: dict[tuple[str, int], list[float]] = {}
    steps = []
    for number in range(REPEATS):
        say(f"prompts, {number + 1} of {REPEATS}")
        for before, tokens in prefills:
            who = f"{number} {before} {tokens}"
            if before:
                worker.call("ask", text[: before + 1], 1, who, "nothing")
            prefills[before, tokens].append(worker.call("ask", text[: before + tokens], 1, who, "nothing")["ttft"])
        answer = worker.call("ask", text[:64], 65, f"step {number}", "nothing")
        steps.append(answer["decode"] / 64)
        for history in plan.histories:
            say(f"conversations of {history}, {number + 1} of {REPEATS}")
            who = f"resume {number} {history}"
            worker.call("ask", text[: history + 1], 1, who, "blocks")
            for tier, what in FORGET.items():
                worker.call("forget", *what)
                answer = worker.call("ask", text[: history + NEW], 1, who, "nothing")
                resumed.setdefault((tier, history), []).append(answer["ttft"])
                loads.setdefault((tier, history), []).append(answer["cache"])
    return {
        "prefills": {each: median(seconds) for each, seconds in prefills.items()},
        "resumed": {each: median(seconds) for each, seconds in resumed.items()},
        "loads": {each: median(seconds) for each, seconds in loads.items()},
        "step": median(steps), "block_bytes": worker.settings["block_bytes"],
    }  # fmt: skip


def _fit(plan: Plan, measured: dict[str, Any]) -> Profile:
    kv_bytes = measured["block_bytes"] / BLOCK
    tiers = [TierProfile("device", 2 * GIB, 0.0, 20e9)]
    for tier, capacity in (("memory", 4 * GIB), ("disk", 64 * GIB)):
        ends = (min(plan.histories), max(plan.histories))
        short, long = (measured["loads"][tier, history] for history in ends)
        blocks = [history // BLOCK for history in ends]
        per_block = max((long - short) / (blocks[1] - blocks[0]), 1e-6) if blocks[1] > blocks[0] else short / blocks[0]
        tiers.append(
            TierProfile(tier, capacity, max(short - per_block * blocks[0], 0.0), measured["block_bytes"] / per_block)
        )
    prefills = [(before, tokens, seconds) for (before, tokens), seconds in measured["prefills"].items()]
    return fitted("here", prefills, step=measured["step"], kv_bytes=kv_bytes, tiers=tuple(tiers), slots=2)


def _checked(plan: Plan, measured: dict[str, Any], profile: Profile) -> list[Row]:
    """Measured and simulated times to the first token."""
    rows = []
    for (tier, history), seconds in measured["resumed"].items():
        index = next(i for i, each in enumerate(profile.tiers) if each.name == tier)
        told = resume_seconds(profile, history, NEW, index)
        rows.append(
            _row(
                f"{history} tokens from {tier}",
                history,
                seconds,
                told,
                history in (min(plan.histories), max(plan.histories)),
            )
        )
    for (before, tokens), seconds in measured["prefills"].items():
        told = profile.prefill_seconds(tokens, before)
        rows.append(_row(f"{tokens} tokens after {before}", before + tokens, seconds, told, True))
    return rows


def _row(name: str, tokens: int, measured: float, simulated: float, was_fitted: bool) -> Row:
    return {
        "system": "umbra", "id": name, "category": "fit" if was_fitted else "check", "tokens": tokens,
        "ttft_ms": measured * 1e3, "simulated_ms": simulated * 1e3, "error": abs(simulated / measured - 1),
        "fitted": was_fitted, "tok_s": None, "tokens_per_pass": None,
    }  # fmt: skip


def _described(profile: Profile) -> dict[str, float]:
    out = {"compute_tok_s": profile.compute, "step_ms": profile.floor * 1e3}
    for tier in profile.tiers[1:]:
        out |= {f"{tier.name}_latency_ms": tier.latency * 1e3, f"{tier.name}_bytes_s": tier.bandwidth}
    return out


# ---- others


def _resume_times(profile: Profile, histories: Sequence[int]) -> dict[str, float]:
    """Milliseconds to the first token of a new turn, from each tier and recomputed."""
    out: dict[str, float] = {}
    for history in histories:
        out[f"recompute_{history}_ms"] = 1e3 * resume_seconds(profile, history, NEW, None)
        for i, tier in enumerate(profile.tiers):
            out[f"{tier.name}_{history}_ms"] = 1e3 * resume_seconds(profile, history, NEW, i)
    return out


def _traced(plan: Plan, here: Profile, good: bool) -> dict[str, Any]:
    assert plan.trace is not None
    requests = read_trace(plan.trace)
    block = _block_tokens(requests)
    curves = hit_curves(requests, CAPACITIES)
    out: dict[str, Any] = {
        f"hits {name}": {f"at_{capacity}": ratio for capacity, ratio in zip(CAPACITIES, curves[name], strict=True)}
        for name in POLICIES
    }
    out["hits without end"] = {f"at_{capacity}": reuse_bound(requests) for capacity in CAPACITIES}
    some = requests[:TRACED]
    profiles = {"here": here, **(PROFILES if good else {})}
    waits = {
        name: summarise(some, Simulator(profile, block).run(some))
        for name, profile in profiles.items()
        if name != "here"
    }
    for name, each in waits.items():
        entry = out.setdefault(f"simulated {name} on the trace", {})
        entry |= {
            "ttft_p50_ms": each.ttft_p50 * 1e3,
            "ttft_p95_ms": each.ttft_p95 * 1e3,
            "load_p50_ms": each.load_p50 * 1e3,
        }
        entry |= {f"from_{tier}": share for tier, share in each.cached.items()}
    if plan.plots is not None:
        _draw(plan.plots, curves, reuse_bound(requests))
    return out


def _block_tokens(requests: Sequence[TracedRequest]) -> int:
    """Of a block: what makes the lengths of prompts agree with their numbers of blocks."""
    fits = [request.input_length <= len(request.blocks) * BLOCK for request in requests[:100] if request.blocks]
    return BLOCK if fits and all(fits) else TRACE_BLOCK


def _draw(folder: Path, curves: dict[str, list[float]], bound: float) -> None:
    from .plots import lines

    some = [(name, CAPACITIES, values) for name, values in curves.items()]
    some.append(("no limit", CAPACITIES, [bound] * len(CAPACITIES)))
    lines(folder / "hits.png", "Prefix hits by capacity", "blocks", {"share of blocks found": some})


def _draw_resumed(folder: Path, histories: Sequence[int], here: Profile) -> None:
    from .plots import Line, lines

    panels: dict[str, list[Line]] = {}
    for name, profile in {"this machine (fitted)": here, **PROFILES}.items():
        title = name if profile.measured else f"{name} (simulated)"
        ways = [("recomputed", None), *((tier.name, i) for i, tier in enumerate(profile.tiers))]
        panels[title] = [
            (way, histories, [1e3 * resume_seconds(profile, history, NEW, tier) for history in histories])
            for way, tier in ways
        ]
    lines(folder / "resume.png", f"ms to the first token of a new turn of {NEW} tokens", "tokens before", panels)
