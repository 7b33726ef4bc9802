"""Fill the figures of README.md from reports.

    python -m umbra.scripts.bench.readme decode.json prefill.json batch.json serve.json tpu-*.json

Each report replaces what stands between `<!-- measured: NAME -->` and `<!-- end -->`: benchmark reports by their name,
the reports of compile_tpu.py together as `tpu`. Figures that no report is given for stay as they are. Some reports fill
several marks: `decode` with --busy also `busy`, with several categories `drafts`, `passes` also `context`, `kernels`
also `walk`, `quality` also `embedding`, `serve` also `start`, `levels` also `layers`. A `batch` of other than 8 streams
fills `batch16` (or whatever their number is), a `decode` of other prompts `decode:NAME` and `drafts:NAME`, NAME being
that of the prompt file without its ending, a scenario of `serve` `serve:SCENARIO`, a `soak` of another model than the
default `soak:MODEL`, a `kv` of other weights `kv:QUANT`, an `exact` with --drafting-only
`exact:drafting`.
A report that is void, or of a run with differences, is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...configs.prompt_sets import DEFAULT
from . import drafts, levels
from . import readme_served as served
from .machine import WIDEST

README = Path(__file__).parents[2] / "README.md"
FEWEST_NEEDLES = 20
"""So many say something."""
CONTEXT = 1024
"""Of reports of compile_tpu.py, if they are not of another one."""
ANSWERS_DIFFER = 0.1
"""Share by which the rate up to the end of an answer must differ to be shown: behind it the model babbles."""
SHOWN = {
    "llama.cpp": "llama.cpp",
    "llama.cpp-q4_0": "llama.cpp requantised to Q4_0",
    "transformers-float32": "Transformers float32",
    "transformers-bfloat16": "bfloat16",
    "umbra-xla": "without our kernels",
    "umbra-off": "without drafting",
}


def main(argv: Sequence[str] | None = None) -> int:
    paths = [Path(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    if not paths:
        print("readme: give the JSON files that bench.py and compile_tpu.py wrote", file=sys.stderr)
        return 2
    reports = [json.loads(path.read_text()) for path in paths]
    for path, report in zip(paths, reports, strict=True):
        for wrong in ("void", "differences"):
            if report.get(wrong):
                print(f"readme: {path} is of a run that is not as it should be: {report[wrong]}", file=sys.stderr)
                return 1
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
    benches = {_mark(report): report for report in reports if "bench" in report}
    compiled = [report for report in reports if "topology" in report]
    made = {}
    for name, report in benches.items():
        made[name] = RENDER[report["bench"]](report)
        _, _, prompts = name.partition(":")
        for more, render in ALSO.get(report["bench"], {}).items():
            if (value := render(report)) is not None:
                made[f"{more}:{prompts}" if prompts else more] = value
    if benches:
        made["machine"] = machine(list(benches.values()))
    if compiled:
        made["tpu"] = "\n" + tpu(compiled) + "\n"
    return made


def _mark(report: dict[str, Any]) -> str:
    settings = report["settings"]
    sequences, prompts = settings.get("sequences", 8), Path(settings.get("prompts", DEFAULT)).stem
    if report["bench"] == "decode" and prompts != DEFAULT.stem:
        return f"decode:{prompts}"
    if report["bench"] == "serve" and settings.get("scenario", "arrivals") != "arrivals":
        return f"serve:{settings['scenario']}"
    if report["bench"] == "soak" and report["model"] != "smollm2":
        return f"soak:{report['model']}"
    if report["bench"] == "kv" and settings.get("quant", "auto") != "auto":
        return f"kv:{settings['quant']}"
    if report["bench"] == "exact" and settings.get("drafting_only"):
        return "exact:drafting"
    return f"batch{sequences}" if report["bench"] == "batch" and sequences != 8 else str(report["bench"])


def replace(text: str, name: str, value: str) -> tuple[str, bool]:
    mark = f"<!-- measured: {name} -->"
    result, n = re.subn(re.escape(mark) + ".*?<!-- end -->", lambda _: f"{mark}{value}<!-- end -->", text, flags=re.S)
    return result, n > 0


def speeds(report: dict[str, Any]) -> str:
    """Our median tokens per second, and the peers' with the ratio."""
    return f"{_speeds(report, 'tok_s', 1)}; {rounds(report)}"


def answers(report: dict[str, Any]) -> str:
    """The same, and again up to where the model would have ended its answers, if that makes a difference."""
    ours = report["summary"]["umbra"]
    if abs(ours.get("answer_tok_s", ours["tok_s"]) / ours["tok_s"] - 1) < ANSWERS_DIFFER:
        return speeds(report)
    return f"{speeds(report)}. Up to the answers' ends: {_speeds(report, 'answer_tok_s')}"


def streams(report: dict[str, Any]) -> str:
    """Tokens per second of several streams together: all of them, and those made while all streams decode."""
    if "decode_tok_s" not in report["summary"]["umbra"]:
        return speeds(report)
    return f"prompts included: {speeds(report)}. While all decode: {_speeds(report, 'decode_tok_s')}"


def _speeds(report: dict[str, Any], figure: str, digits: int = 0) -> str:
    summary, ratio = report["summary"], report["ratio"] if figure == "tok_s" else report["ratios"].get(figure, {})
    peers = [
        f"{label} {summary[name][figure]:,.0f} (ours is {ratio[name]:.2f}x)"
        for name, label in SHOWN.items()
        if name in ratio
    ]
    return "; ".join([f"**{summary['umbra'][figure]:,.{digits}f} tokens/s**", *peers])


def busy(report: dict[str, Any]) -> str | None:
    """Times between tokens beside busy processes, over those without."""
    parts = []
    for name, entry in report["summary"].items():
        if "busy_p50_ratio" not in entry or "variant" in entry:
            continue
        times = [f"{entry[f'{kind}between_p{p}_ms']:,.1f}" for p in (50, 99) for kind in ("", "busy_")]
        parts.append(
            f"{SHOWN.get(name, name)}: p50 {times[0]} to {times[1]} ms ({entry['busy_p50_ratio']:.2f}x), "
            f"p99 {times[2]} to {times[3]} ms ({entry['busy_p99_ratio']:.2f}x)"
        )
    return "; ".join([*parts, rounds(report)]) if parts else None


def widths(report: dict[str, Any]) -> str:
    """The cost of passes of several tokens over plain decoding of one."""
    ours = report["summary"]["umbra"]
    wide = [f"{w}: {ours[f'pass_{w}_over_1']:.2f}x" for w in report["settings"]["widths"]]
    drafting = f"; drafting 4 tokens {100 * ours['draft_4_over_1']:.1f} %" if "draft_4_over_1" in ours else ""
    return f"{ours['plain_ms']:.2f} ms for one token; of " + ", ".join(wide) + f"{drafting}; {rounds(report)}"


def context(report: dict[str, Any]) -> str:
    """What a long context adds to a pass."""
    ours = report["summary"]["umbra"]
    return (
        f"{ours['context_added_ms']:.2f} ms for {report['settings']['prompt_tokens']:,} tokens, "
        f"{ours['context_over_read']:.2f}x the {ours['context_read_ms']:.2f} ms that reading their KV takes at the "
        f"{report['settings']['systems']['peaks']['read_bytes_s'] / 1e9:.1f} GB/s measured in the same run"
    )


def operations(report: dict[str, Any]) -> str:
    """A Markdown table of single operations."""
    peaks = report["settings"]["systems"]["peaks"]
    known = [
        f"{value / 1e9:,.0f} {unit}"
        for key, unit in (("read_bytes_s", "GB/s"), ("int8_ops_s", "Gop/s int8"), ("float32_ops_s", "GFLOP/s float32"))
        if (value := peaks[key])
    ]
    with_peer = "umbra-xla" in report["summary"]
    lines = [
        f"Peaks: {', '.join(known)} ({peaks['how']}).",
        "",
        f"| operation | time | GB/s | Gop/s | share of peak |{' plain JAX |' if with_peer else ''}",
        f"|---|---|---|---|---|{'---|' if with_peer else ''}",
    ]
    plain = {row["id"]: row["us"] for row in report["rows"] if row["system"] == "umbra-xla"}
    for row in report["rows"]:
        if row["system"] != "umbra":
            continue
        peer = f" {plain[row['id']]:,.0f} us, {plain[row['id']] / row['us']:.1f}x |" if with_peer else ""
        lines.append(
            f"| {row['id']} | {row['us']:,.1f} us | {row['bytes_s'] / 1e9:.1f} | {row['ops_s'] / 1e9:.1f} "
            f"| {100 * row['share']:.0f} % ({row['bound']}) |{peer}"
        )
    return "\n" + "\n".join(lines) + "\n"


def walk(report: dict[str, Any]) -> str | None:
    """Attention over scattered blocks against contiguous KV."""
    ratio = report["summary"]["umbra"].get("table_walk_over_contiguous")
    return None if ratio is None else f"{ratio:.2f}x"


def agreement(report: dict[str, Any]) -> str:
    """A Markdown table of what each form of the weights, and each peer, keeps of the float32 model."""
    lines = ["| system | agreement | perplexity | weights |", "|---|---|---|---|"]
    for name, entry in report["summary"].items():
        if "+embedding=" not in name:
            lines.append(f"| {_quality(name, entry)} | {_weights(report, name)} |")
    tokens = report["summary"]["umbra"]["tokens"]
    return "\n" + "\n".join(lines) + f"\n\nOn {tokens:,} tokens of greedy answers of the float32 model.\n"


def exactness(report: dict[str, Any]) -> str:
    """How many settings gave the same."""
    ours = report["summary"]["umbra"]
    return (
        f"{ours['identical']} of {ours['settings']} settings identical to answering alone: {ours['requests']} "
        f"requests, {ours['rows_of_logits']:,} rows of logits each, by CRC"
    )


def drafting(report: dict[str, Any]) -> str | None:
    """A Markdown table of tokens per pass for every category."""
    content = report.get("drafting")
    if content is None or len(content["systems"]["umbra"]["categories"]) < 2:
        return None
    return f"{drafts.markdown(content)}\n{_settings(report)}\n"


def evenness(report: dict[str, Any]) -> str:
    """How flat the rate of a long stream is."""
    parts = []
    for name, entry in report["summary"].items():
        if "flat_percent" in entry:
            rates = " ".join(f"{rate:,.0f}" for rate in entry["windows"])
            label = report["settings"]["draft"] if name == "umbra" else name.removeprefix("umbra-")
            even = f"within {entry['flat_percent']:.1f} % once bytes read are divided out"
            parts.append(f"drafting {label}: {rates} tokens/s, {even} ({entry['raw_percent']:.1f} % as it is)")
    return "; ".join([*parts, rounds(report)])


def level_table(report: dict[str, Any]) -> str:
    return f"{levels.markdown(report)}\n{_settings(report)}\n"


def skipping(report: dict[str, Any]) -> str:
    """What the bound allows."""
    ours = report["summary"]["umbra"]
    losses = [
        f"{row['category']} {100 * row['loss']:.1f} % (at most {100 * row['bound']:.1f} %)" for row in report["rows"]
    ]
    return (
        f"other tokens than all layers: {', '.join(losses)}; {ours['prompts']} prompts, "
        f"{100 * ours['confidence']:.0f} % confidence; within {100 * ours['target']:.0f} %: "
        f"{ours['allowed_layers']} layers"
    )


def relaxing(report: dict[str, Any]) -> str:
    """What relaxed acceptance loses at each margin."""
    ours = report["summary"]["umbra"]
    losses = [
        f"{row['margin']:g}: {100 * row['loss']:.1f} % (at most {100 * row['bound']:.1f} %)" for row in report["rows"]
    ]
    return (
        f"other tokens by margin in nats: {', '.join(losses)}; {ours['prompts']} prompts, "
        f"{100 * ours['confidence']:.0f} % confidence; within {100 * ours['target']:.0f} %: {ours['margin']:g}"
    )


def _settings(report: dict[str, Any]) -> str:
    """What was run, in one line."""
    settings = report["settings"]
    count = f"{settings['each']} of each category" if settings.get("each") else f"the first {settings['limit']}"
    return f"Prompts: `{Path(settings['prompts']).name}`, {count}; {settings['max_tokens']} tokens each."


def embeddings(report: dict[str, Any]) -> str | None:
    """A Markdown table of embeddings with rows of two precisions."""
    summary = report["summary"]
    some = {name: entry for name, entry in summary.items() if "+embedding=" in name}
    if not some:
        return None
    lines = ["| embedding | agreement | perplexity | MB | saved |", "|---|---|---|---|---|"]
    for name, entry in {"umbra": summary["umbra"], **some}.items():
        saved = summary["umbra"]["embedding_mb"] - entry["embedding_mb"]
        label = name.partition("+embedding=")[2] or "as in the file"
        lines.append(f"| {_quality(label, entry)} | {entry['embedding_mb']:.1f} | {saved:.1f} |")
    return "\n" + "\n".join(lines) + "\n"


def kv_in_int8(report: dict[str, Any]) -> str:
    """What int8 KV costs against float32."""
    whole, small = report["summary"]["float32"], report["summary"]["umbra"]
    same = f"**{small['agreement']:.2f} %** of {small['tokens']:,} tokens are those chosen with float32"
    if small["needles"] < FEWEST_NEEDLES:
        return same
    return (
        f"{same}; of {small['needles']} lines in lists of {report['settings']['prompt_tokens']:,} tokens "
        f"{small['found_percent']:.1f} % are found, {whole['found_percent']:.1f} % with float32"
    )


def _quality(label: str, entry: dict[str, Any]) -> str:
    return f"{label} | {entry['agreement']:.1f} % | {entry['perplexity']:.4f} ({entry['perplexity_change']:+.2f} %)"


def _weights(report: dict[str, Any], name: str) -> str:
    entry = report["summary"][name]
    megabytes = f", {entry['weight_mb']:,.0f} MB" if "weight_mb" in entry else ""
    return f"{report['settings']['systems'][name]['weights']}{megabytes}"


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


def start(report: dict[str, Any]) -> str | None:
    """Two starts with a cache of their own, or one with the user's; of arrivals only."""
    ours = report["summary"]["umbra"]
    if report.get("settings", {}).get("scenario", "arrivals") != "arrivals":
        return None
    if "second_start_s" not in ours:
        return f"**{ours['start_s']:.1f} s** (one start, with whatever was compiled before)"
    return f"**{ours['second_start_s']:.1f} s** (the first, with nothing compiled: {ours['first_start_s']:.1f} s)"


def machine(reports: Sequence[dict[str, Any]]) -> str:
    """The machine of the first report, and the versions of all: each names only the systems that it measured."""
    m = reports[0]["machine"]
    v = {name: version for report in reports for name, version in report["versions"].items()}
    wide = next((flag for flag in WIDEST if flag in m["flags"]), "no vector extension named")
    versions = ", ".join(
        f"{name} {v[name]}" for name in ("jax", "llama-cpp-python", "transformers", "torch") if name in v
    )
    return f"{m['cpu']}, {m['cores']} cores, {wide}, {m['memory_gib']:.0f} GiB; {versions}."


def tpu(reports: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the decode programs: a line for each model, topology and number of sequences."""
    rows = [
        "| model, topology, mesh | sequences a data shard | decode | decode_n, a pass | drafting pass "
        "| tokens/s a chip, 1 / 5 tokens a pass |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        settings = report["settings"]
        mesh = ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
        quant = "" if settings["quant"] == "none" else f" {settings['quant']}"
        if (context := settings.get("context", CONTEXT)) != CONTEXT:
            quant += f", {context:,} tokens of context"
        of: dict[int, dict[str, Any]] = {}
        for row in report["programs"]:
            of.setdefault(row["sequences"], {})[row["kind"]] = row
        for sequences, kinds in sorted(of.items()):
            decode, loop, verify = (kinds.get(kind) for kind in ("decode", "decode_n", "verify"))
            if decode is None:
                continue
            rows.append(
                f"| {report['model']}{quant}, {report['topology']}, {mesh} | {sequences} | {_moved(decode)} "
                f"| {_moved(loop, settings['decode_steps'])} | {_moved(verify)} "
                f"| {decode['predicted_tok_s_chip']:,.0f} / {_at_five(verify)} |"
            )
    return "\n".join(rows)


def _moved(row: dict[str, Any] | None, passes: int = 1) -> str:
    """Bytes over the least and the time of a pass."""
    return "-" if row is None else f"{row['bytes_ratio']:.2f}x, {row['bound_s'] / passes * 1e3:.2f} ms"


def _at_five(verify: dict[str, Any] | None) -> str:
    """Tokens per second and chip when a pass brings every sequence five tokens."""
    accepted = () if verify is None else verify["accepted"]
    return next((f"{a['tok_s_chip']:,.0f}" for a in accepted if a["tokens_per_pass"] == 5), "-")


RENDER: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode": answers,
    "prefill": speeds,
    "batch": streams,
    "serve": lambda report: (serving if "requests_s" in report["summary"]["umbra"] else served.scenario)(report),
    "passes": widths,
    "kernels": operations,
    "quality": agreement,
    "kv": kv_in_int8,
    "exact": exactness,
    "levels": level_table,
    "flat": evenness,
    "skips": skipping,
    "relax": relaxing,
    "resume": served.resuming,
    "capacity": served.capacity,
    "cache": served.tiers,
    "simulate": served.simulated,
    "soak": served.soaked,
    "schema": served.in_form,
}
ALSO: dict[str, dict[str, Callable[[dict[str, Any]], str | None]]] = {
    "decode": {"busy": busy, "drafts": drafting},
    "levels": {"layers": lambda report: levels.layers_markdown(report)},
    "serve": {"start": start},
    "passes": {"context": context},
    "kernels": {"walk": walk},
    "quality": {"embedding": embeddings},
}
"""Benchmark -> further marks that its report fills; None: not by this report."""

if __name__ == "__main__":
    sys.exit(main())
