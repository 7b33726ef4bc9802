"""Fill the figures of README.md from reports.

    python -m umbra.scripts.bench.readme decode.json prefill.json batch.json serve.json tpu-*.json

Each report replaces what stands between `<!-- measured: NAME -->` and `<!-- end -->`: benchmark reports by their name,
the reports of compile_tpu.py together as `tpu`. Figures that no report is given for stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
SHOWN = {"llama.cpp": "llama.cpp", "transformers-float32": "Transformers float32", "transformers-bfloat16": "bfloat16"}


def main(argv: Sequence[str] | None = None) -> int:
    paths = [Path(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    if not paths:
        print("readme: give the JSON files that bench.py and compile_tpu.py wrote", file=sys.stderr)
        return 2
    reports = [json.loads(path.read_text()) for path in paths]
    text = README.read_text()
    for name, value in figures(reports).items():
        text, found = replace(text, name, value)
        if not found:
            print(f"readme: README.md has no place marked {name!r}", file=sys.stderr)
            return 1
    README.write_text(text)
    return 0


def figures(reports: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The text for each mark."""
    benches = {report["bench"]: report for report in reports if "bench" in report}
    compiled = [report for report in reports if "topology" in report]
    made = {name: RENDER[name](report) for name, report in benches.items()}
    if "serve" in benches:
        made["start"] = start(benches["serve"])
    if benches:
        made["machine"] = machine(list(benches.values()))
    if compiled:
        made["tpu"] = "\n" + tpu(compiled) + "\n"
    return made


def replace(text: str, name: str, value: str) -> tuple[str, bool]:
    mark = f"<!-- measured: {name} -->"
    result, n = re.subn(re.escape(mark) + ".*?<!-- end -->", lambda _: f"{mark}{value}<!-- end -->", text, flags=re.S)
    return result, n > 0


def speeds(report: dict[str, Any]) -> str:
    """Our median tokens per second, and the peers' with the ratio."""
    summary, ratio = report["summary"], report["ratio"]
    peers = [
        f"{label} {summary[name]['tok_s']:,.0f} (ours is {ratio[name]:.2f}x)"
        for name, label in SHOWN.items()
        if name in ratio
    ]
    return "; ".join([f"**{summary['umbra']['tok_s']:,.1f} tokens/s**", *peers, rounds(report)])


def rounds(report: dict[str, Any]) -> str:
    """How the figures of a report came about."""
    count, turns = report["settings"]["rounds"], ", systems taking turns" if len(report["summary"]) > 1 else ""
    return f"medians of {count} rounds{turns}" if count > 1 else "one round"


def serving(report: dict[str, Any]) -> str:
    """Latencies and throughput of every server."""
    parts = []
    for name, entry in report["summary"].items():
        first, between = percentiles(entry, "ttft"), percentiles(entry, "between")
        parts.append(
            f"{name}: first token {first} (p50 / p90 / p99), between tokens {between}, "
            f"{entry['requests_s']:.2f} requests/s, {entry['errors']:.0f} errors"
        )
    return "; ".join([*parts, rounds(report)])


def percentiles(entry: dict[str, Any], figure: str) -> str:
    """p50, p90 and p99 of a time; `-` where no request had one."""
    values = [entry.get(f"{figure}{p}_ms") for p in ("", "_p90", "_p99")]
    return " / ".join("-" if value is None else f"{value:,.0f}" for value in values) + " ms"


def start(report: dict[str, Any]) -> str:
    """Two starts with a cache of their own, or one with the user's."""
    ours = report["summary"]["umbra"]
    if "second_start_s" not in ours:
        return f"**{ours['start_s']:.1f} s** (one start, with whatever was compiled before)"
    return f"**{ours['second_start_s']:.1f} s** (the first, with nothing compiled: {ours['first_start_s']:.1f} s)"


def machine(reports: Sequence[dict[str, Any]]) -> str:
    """The machine of the first report, and the versions of all: each names only the systems that it measured."""
    m = reports[0]["machine"]
    v = {name: version for report in reports for name, version in report["versions"].items()}
    wide = next(
        (flag for flag in ("avx512_vnni", "avx512f", "avx2") if flag in m["flags"]), "no vector extension named"
    )
    versions = ", ".join(
        f"{name} {v[name]}" for name in ("jax", "llama-cpp-python", "transformers", "torch") if name in v
    )
    return f"{m['cpu']}, {m['cores']} cores, {wide}, {m['memory_gib']:.0f} GiB; {versions}."


def tpu(reports: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the step programs."""
    rows = [
        "| model, topology, mesh | program | GiB a chip | MB moved, over the least | bound | tokens/s at most |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        mesh = ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
        for row in report["programs"]:
            if row["kind"] not in ("prefill", "decode", "decode_n"):
                continue
            rows.append(
                f"| {report['model']}, {report['topology']}, {mesh} | {row['name']} | {row['hbm_bytes'] / 2**30:.2f} "
                f"| {row['bytes_accessed'] / 1e6:,.0f}, {row['bytes_ratio']:.2f}x | {row['bound_s'] * 1e3:.2f} ms "
                f"| {row['predicted_tok_s']:,.0f} |"
            )
    return "\n".join(rows)


RENDER = {"decode": speeds, "prefill": speeds, "batch": speeds, "serve": serving}

if __name__ == "__main__":
    sys.exit(main())
