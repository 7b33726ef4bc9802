"""What README says of the server and of the cache (`readme.py`)."""

from __future__ import annotations

from typing import Any


def scenario(report: dict[str, Any]) -> str:
    """Figures of a scenario of `bench.py serve`, each with what it is of."""
    return {"concurrent": concurrent, "questions": questions, "overhead": overhead, "events": events}[
        report["settings"]["scenario"]
    ](report)


def concurrent(report: dict[str, Any]) -> str:
    """A Markdown table by clients and server."""
    lines = [
        "| clients | server | first token p50 / p90 / p95 / p99 | between tokens p50 / p90 / p99 | requests/s "
        "| tokens/s | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for clients in report["settings"]["clients"]:
        for name, entry in report["summary"].items():
            first = _times(entry, [f"ttft{p}_ms@{clients}" for p in ("", "_p90", "_p95", "_p99")])
            between = _times(entry, [f"between{p}_ms@{clients}" for p in ("", "_p90", "_p99")])
            lines.append(
                f"| {clients} | {name} | {first} | {between} | {entry[f'requests_s@{clients}']:.2f} "
                f"| {entry[f'tok_s@{clients}']:,.0f} | {entry['errors']:.0f} |"
            )
    return "\n" + "\n".join(lines) + "\n"


def questions(report: dict[str, Any]) -> str:
    """Times to the first token by the number of words."""
    words = [key.partition("@")[2] for key in report["summary"]["umbra"] if key.startswith("ttft_ms@")]
    parts = []
    for name, entry in report["summary"].items():
        times = " / ".join(f"{entry[f'ttft_ms@{n}']:,.1f}" for n in words)
        parts.append(f"{name}: {times} ms")
    flat = f"of umbra the slowest length is {report['summary']['umbra']['flat']:.2f}x the fastest"
    return f"{'; '.join(parts)} for {' / '.join(words)} words; {flat}"


def overhead(report: dict[str, Any]) -> str:
    """The server over the bare engine."""
    ours, engine = report["summary"]["umbra"], report["summary"]["engine"]
    parts = [f"{n} streams {ours[f'tok_s@{n}'] / engine[f'tok_s@{n}']:.2f}x" for n in report["settings"]["clients"]]
    return f"tokens/s with {', '.join(parts)}; first token {ours['ttft_more_ms']:+.1f} ms"


def events(report: dict[str, Any]) -> str:
    """The rate to one client."""
    ours, source = report["summary"]["umbra"], report["settings"]["rate"]
    return f"**{ours['tok_s']:,.0f} tokens/s** to one client of a source of {source:,.0f}"


def capacity(report: dict[str, Any]) -> str:
    """A very long conversation, stored and brought up."""
    made, gb = report["summary"]["umbra"], 1e9
    peaks = f"{made['store_peak_bytes'] / 1e6:,.0f} and {made['recall_peak_bytes'] / 1e6:,.0f}"
    return (
        f"{made['tokens']:,} tokens, {made['store_disk_bytes'] / gb:.1f} GB: stored in {made['store_seconds']:.0f} s; "
        f"after kill -9 the engine starts in {made['ready_s']:.1f} s, lists it in {made['recall_list_ms']:.0f} ms, "
        f"finds it in {made['recall_match_ms']:.0f} ms and has it read back in **{made['recall_seconds']:.1f} s**; "
        f"memory grew by {peaks} MB (allowed: {made['allowed_bytes'] / 1e6:,.0f})"
    )


def resuming(report: dict[str, Any]) -> str:
    """A Markdown table by where the conversation is read from."""
    lines = [
        f"| {report['settings']['prompt_tokens']:,} tokens from | first token | over the uncached part alone "
        "| faster than recomputing |",
        "|---|---|---|---|",
    ]
    for name, entry in report["summary"].items():
        if name != "umbra":
            lines.append(
                f"| {name} | {entry['ttft_ms']:,.0f} ms | {entry['over_uncached_ms']:+,.0f} ms "
                f"| {entry['faster_than_recompute']:.1f}x |"
            )
    return "\n" + "\n".join(lines) + "\n"


def tiers(report: dict[str, Any]) -> str:
    """Reading blocks, and what writing costs."""
    ours = report["summary"]["umbra"]
    return (
        f"a block from disk {ours['read_disk_p50_ms']:.2f} / {ours['read_disk_p95_ms']:.2f} ms (p50 / p95; reading its "
        f"bytes alone {ours['plain_read_disk_p50_ms']:.2f} / {ours['plain_read_disk_p95_ms']:.2f}); writing back costs "
        f"{100 * ours['write_cost_of_1']:.1f} % of tokens/s with one stream, {100 * ours['write_cost_of_8']:.1f} % "
        f"with eight; upkeep on the step {1e3 * ours['upkeep_of_1_ms']:.0f} us a token"
    )


def simulated(report: dict[str, Any]) -> str:
    """How far off the simulator is, and hit ratios where there was a trace."""
    summary = report["summary"]
    off = f"off by at most {100 * summary['umbra']['worst_error']:.0f} % on this machine"
    if "hits lru2" not in summary:
        return off
    parts = [
        f"{label} {summary[f'hits {policy}'][f'at_{blocks}']:.3f} at {blocks:,} blocks"
        for label, policy, blocks in (("device tier", "lru2", 5000), ("memory tier", "s3fifo", 20_000))
    ]
    return f"{off}; hit ratio on the trace: {', '.join(parts)}"


def soaked(report: dict[str, Any]) -> str:
    """How many answers differ."""
    ours = report["summary"]["umbra"]
    return (
        f"{ours['requests']:,.0f} requests, {ours['cancelled']:,.0f} of them cancelled: {ours['differing']:.0f} "
        "answers differ, nothing leaked"
    )


def in_form(report: dict[str, Any]) -> str:
    """Answers in a form against free text."""
    ours, ratio = report["summary"]["umbra"], report["ratio"]
    return (
        f"{100 * ours['valid']:.0f} % of {ours['rows']:.0f} valid; {ours['tok_s']:,.0f} tokens/s, "
        f"{next(iter(ratio.values())):.2f}x free text"
    )


def _times(entry: dict[str, Any], names: list[str]) -> str:
    return " / ".join("-" if (value := entry.get(name)) is None else f"{value:,.0f}" for name in names) + " ms"
