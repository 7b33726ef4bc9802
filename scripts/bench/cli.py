"""The command line of `bench.py`: one subcommand per benchmark, each with the options that it uses."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...configs.machine import cores
from ...configs.prompt_sets import DEFAULT, PromptFileError
from ...model.weights.errors import ModelError
from ..model_options import OneLineParser, add_draft_option, add_model_options, positive
from . import (
    capacity,
    context,
    drafts,
    exact,
    flat,
    forms,
    harness,
    kernels,
    kv,
    levels,
    lossy,
    passes,
    quality,
    resume,
    scenarios,
    serve,
    simulate,
    soak,
    tiers,
)
from .plan import MIN_TOKENS, Plan
from .processes import BenchError
from .report import save, show
from .systems import DRAFTING, MODULES, PEERS
from .tasks import COUNT

WIDTHS = (1, 2, 4, 5, 8, 16, 32)
ROWS = (1, 2, 4, 5, 8, 16, 32, 128)
CONTEXTS = (128, 1024, 8000)
SHORTEST_FLAT = 400

ABOUT = {
    "decode": "one stream: tokens after the first over the time after it",
    "prefill": "one prompt of a given length: prompt tokens over the time to the first token",
    "batch": "several streams at once: output tokens over wall time",
    "serve": "over HTTP: time to first token, between tokens, requests per second, start to ready",
    "passes": "a pass of several tokens over one of a single token; what a long context adds to a pass",
    "kernels": "single operations against the machine's measured peak and plain JAX",
    "quality": "agreement with the float32 model, and perplexity, on its own answers",
    "kv": "what int8 KV costs against float32: other tokens chosen, less found in long prompts",
    "levels": "the levels side by side: speed, agreement with the trunk, task score, thoughts; subsets of layers",
    "flat": "tokens/s over windows of a long stream, with the growing KV divided out",
    "schema": "answers in the form of random JSON schemas against free ones: speed, and whether they are valid",
    "skips": "what every layer contributes, and what subsets of layers lose",
    "relax": "what relaxed acceptance loses, and the largest margin within a calibrated bound",
    "exact": "whether ids and logits depend on drafts, batch mates, chunks, pass widths, table width or threads",
    "resume": "a new turn of a stored conversation: from each tier, and after kill -9, against recomputing",
    "context": "attention of one token against the length of its context, through a table and over contiguous KV",
    "capacity": "a conversation of a million tokens: its KV stored, found again after kill -9, and read back",
    "soak": "many requests with tiers on and off: the same ids, nothing lost, nothing leaked",
    "cache": "reads of blocks from the disk, and what writing them costs while answers are made",
    "simulate": "tiers of other machines, by a simulator that is fitted to this one; hit ratios by policy",
}


SCENARIOS = ("arrivals", "concurrent", "questions", "overhead", "events")
CLIENTS = {"concurrent": (1, 16, 100), "overhead": (1, 32)}
FAST = 4000.0
"""Tokens a second of the source that stands in for the engine."""

TIERED = ("resume", "capacity", "soak", "cache", "simulate")
"""Benchmarks of the tiers of the context cache."""

ALONE = ("exact", "kv", "levels", "schema", "skips", "relax", *TIERED)
"""Benchmarks that compare with nothing else."""

DRAFTED = (
    "decode", "prefill", "batch", "serve", "flat", "schema", "levels", "relax", "resume", "soak", "cache", "simulate",
)  # fmt: skip
"""Benchmarks that draft as they are told."""
OPERATIONS = ("kernels", "context")
"""Benchmarks of single operations."""
ONCE = ("quality", "kv", "exact", "skips", "relax", "capacity", "soak", "simulate")
"""Benchmarks without rounds."""
BUILT_IN = ("skips", "relax")
"""Benchmarks that need more prompts than a file of ours has."""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="bench.py", description="Measure speed and quality.", allow_abbrev=False)
    benches = p.add_subparsers(dest="bench", required=True, metavar="|".join(ABOUT))
    for bench, about in ABOUT.items():
        sub = benches.add_parser(bench, help=about, description=about, allow_abbrev=False)
        add_model_options(sub)
        if bench not in ALONE:
            sub.add_argument(
                "--against", type=_peers(bench), default=("xla",) if bench in OPERATIONS else (), metavar="PEER,...",
                help=_peers_help(bench),
            )  # fmt: skip
        if bench in DRAFTED:
            add_draft_option(sub)
        elif bench in ("passes", "exact"):
            sub.add_argument("--shadow", default="auto", metavar="FILE", help="the shadow network: auto, off or a file")
        if bench not in (*OPERATIONS, "capacity", "soak", "schema"):
            built_in = bench in BUILT_IN
            sub.add_argument(
                "--prompts", type=Path, default=None if built_in else DEFAULT, metavar="FILE",
                help=f"prompt file (default: {'prompts made from our templates' if built_in else 'ours'})",
            )  # fmt: skip
        if bench not in ONCE:
            sub.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of each system")
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
        _ADD[bench](sub)
    return p


def _decode_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--each", type=positive, metavar="N", help="first N prompts of every category, instead of --limit")
    sub.add_argument("--limit", type=positive, default=8, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream")
    _add_draft_length(sub)
    sub.add_argument("--temperature", type=_factor, default=0.0, metavar="X", help="draw tokens, with seeds; 0: greedy")
    sub.add_argument(
        "--busy", type=positive, default=0, metavar="N", help="run every prompt again beside N busy processes"
    )


def _add_draft_length(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--draft-length", type=positive, metavar="N", help="always draft so many tokens (default: as the gate says)"
    )


def _flat_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=4, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=700, metavar="N", help="tokens of a stream")


def _schema_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=20, metavar="N", help="schemas")
    sub.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="tokens of an answer")
    sub.add_argument("--sequences", type=positive, default=1, metavar="N", help="answers at once")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the schemas")


def _levels_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=8, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream")
    sub.add_argument("--tasks", type=positive, default=COUNT, metavar="N", help="tasks to score")
    sub.add_argument(
        "--thoughts", type=_whole, default=128, metavar="N",
        help="tokens of the largest thinking budget, the others in proportion (0: no thoughts)",
    )  # fmt: skip
    sub.add_argument("--plots", type=Path, metavar="DIR", help="draw levels.png and layers.png into this folder")


def _skips_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=150, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="tokens of an answer")
    sub.add_argument("--sequences", type=positive, default=16, metavar="N", help="answers made at once")
    sub.add_argument("--save", action="store_true", help="write the subsets into model/skips")


def _relax_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=300, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="tokens of an answer")
    sub.add_argument(
        "--sequences", type=positive, default=1, metavar="N",
        help="answers made at once (with 1 drafts are longest, so most is relaxed)",
    )  # fmt: skip
    sub.add_argument("--save", action="store_true", help="write the margin into configs/relaxed")


def _prefill_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=4, metavar="N", help="prompts of a round")
    sub.add_argument("--prompt-tokens", type=positive, default=1024, metavar="N", help="length of each")


def _batch_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--sequences", type=positive, default=8, metavar="N", help="streams at once")
    sub.add_argument("--limit", type=positive, metavar="N", help="prompts of a round, in groups (default: one group)")
    _add_draft_length(sub)
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream")


def _passes_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--widths", type=_numbers, default=WIDTHS, metavar="N,...", help="tokens of a pass")
    sub.add_argument(
        "--context", type=positive, default=8000, metavar="N", dest="prompt_tokens",
        help="tokens of the long context",
    )  # fmt: skip


def _kernels_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--ops", type=_ops, default=kernels.OPS, metavar="OP,...", help=f"of {','.join(kernels.OPS)}")
    sub.add_argument(
        "--row-counts", type=_numbers, default=ROWS, metavar="N,...", dest="widths",
        help="rows of a product",
    )  # fmt: skip
    sub.add_argument(
        "--contexts", type=_numbers, default=CONTEXTS, metavar="N,...",
        help="tokens before those that attend",
    )  # fmt: skip


def _quality_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=40, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="tokens of an answer")
    sub.add_argument("--sequences", type=positive, default=16, metavar="N", help="answers made at once")
    sub.add_argument(
        "--variants", nargs="+", default=(), metavar="QUANT[+kv=KV][+embedding=E]",
        help="other forms of ours, for example: none int8 auto+kv=float32 auto+embedding=4096:int8,int4",
    )  # fmt: skip


def _kv_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=40, metavar="N", help="first N prompts, to be answered")
    sub.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="tokens of an answer")
    sub.add_argument("--needles", type=positive, default=200, metavar="N", help="long lists, of which a line is asked")
    sub.add_argument(
        "--list-tokens", type=positive, default=400, metavar="N", dest="prompt_tokens", help="tokens of a list, about"
    )


def _serve_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--scenario", choices=SCENARIOS, default="arrivals",
        help="arrivals: open loop; concurrent: --clients that ask when they are answered; questions: short "
        "ones, with a known system prompt; overhead: against our engine, --clients streams; events: a source of --rate "
        "tokens a second in place of the engine",
    )  # fmt: skip
    sub.add_argument(
        "--clients", type=_numbers, metavar="N,...",
        help="concurrent: clients at once; overhead: streams (default: 1,16,100, for overhead 1,32)",
    )  # fmt: skip
    sub.add_argument(
        "--sequences",
        type=positive,
        default=8,
        metavar="N",
        help="slots of our server; arrivals: requests open at once, too",
    )  # fmt: skip
    sub.add_argument("--limit", type=positive, default=32, metavar="N", help="requests of a round")
    sub.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of an answer (default: 64)")
    sub.add_argument("--rate", type=_factor, metavar="X", help="Poisson arrivals (or tokens) per second (default: 1)")
    sub.add_argument("--seed", type=int, metavar="N", help="seed of the arrivals (default: 0)")
    sub.add_argument(
        "--trace", type=Path, metavar="FILE", help="arrivals and lengths from this file (.jsonl, .jsonl.gz)"
    )
    sub.add_argument("--time-scale", type=_factor, metavar="X", help="stretch the trace's times (default: 1)")
    sub.add_argument("--length-scale", type=_factor, metavar="X", help="stretch the trace's lengths (default: 1)")
    sub.add_argument(
        "--starts", type=int, choices=(1, 2), default=2,
        help="2: time a first start with nothing compiled and a second; 1: one start with your cache",
    )  # fmt: skip


def _exact_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--drafting-only", action="store_true", help="only compare drafting on with off")
    sub.add_argument("--limit", type=positive, default=100, metavar="N", help="first N prompts")
    sub.add_argument("--max-tokens", type=positive, default=32, metavar="N", help="tokens of an answer")


def _folder_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--folder", type=Path, metavar="DIR", help="where temporary folders are made (default: the system's)"
    )


def _resume_options(sub: argparse.ArgumentParser) -> None:
    _folder_option(sub)
    sub.add_argument(
        "--history", type=positive, default=8000, metavar="N", dest="prompt_tokens",
        help="tokens of the stored conversation",
    )  # fmt: skip
    sub.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="of the new turn")


def _capacity_options(sub: argparse.ArgumentParser) -> None:
    _folder_option(sub)
    sub.add_argument(
        "--history", type=positive, default=1_000_000, metavar="N", dest="prompt_tokens",
        help="tokens of the conversation",
    )  # fmt: skip


def _context_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--contexts", type=_numbers, default=context.LENGTHS, metavar="N,...",
        help="tokens before the one that attends",
    )  # fmt: skip


def _soak_options(sub: argparse.ArgumentParser) -> None:
    _folder_option(sub)
    sub.add_argument("--limit", type=positive, default=1000, metavar="N", help="requests")
    sub.add_argument("--sequences", type=positive, default=16, metavar="N", help="requests at once")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")


def _cache_options(sub: argparse.ArgumentParser) -> None:
    _folder_option(sub)
    sub.add_argument("--blocks", type=positive, default=200, metavar="N", dest="limit", help="blocks read")
    sub.add_argument("--sequences", type=positive, default=8, metavar="N", help="answers at once")
    sub.add_argument("--max-tokens", type=positive, default=512, metavar="N", help="tokens of an answer")


def _simulate_options(sub: argparse.ArgumentParser) -> None:
    _folder_option(sub)
    sub.add_argument(
        "--histories", type=_numbers, default=simulate.HISTORIES, metavar="N,...",
        help="tokens of the conversations that are measured",
    )  # fmt: skip
    sub.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests to replay (.jsonl, .jsonl.gz), or an access log"
    )
    sub.add_argument("--plots", type=Path, metavar="DIR", help="draw hits.png and resume.png into this folder")


_ADD = {
    "resume": _resume_options,
    "capacity": _capacity_options,
    "context": _context_options,
    "soak": _soak_options,
    "cache": _cache_options,
    "simulate": _simulate_options,
    "decode": _decode_options,
    "prefill": _prefill_options,
    "batch": _batch_options,
    "serve": _serve_options,
    "passes": _passes_options,
    "kernels": _kernels_options,
    "quality": _quality_options,
    "kv": _kv_options,
    "exact": _exact_options,
    "levels": _levels_options,
    "flat": _flat_options,
    "schema": _schema_options,
    "skips": _skips_options,
    "relax": _relax_options,
}


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _whole(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _ops(text: str) -> tuple[str, ...]:
    names = _names(text)
    if unknown := [name for name in names if name not in kernels.OPS]:
        raise argparse.ArgumentTypeError(f"there is no operation {unknown[0]!r}; supported: {', '.join(kernels.OPS)}")
    return names


def _supported(bench: str) -> tuple[str, ...]:
    few = {"serve": serve.SUPPORTED_PEERS, "passes": ("xla",), "kernels": ("xla",), "quality": quality.PEERS}
    few |= {"context": ("xla",), "flat": DRAFTING, "prefill": tuple(peer for peer in PEERS if peer not in DRAFTING)}
    return few.get(bench, tuple(PEERS))


def _named(peers: Sequence[str]) -> str:
    """Their names in a row, the fixed draft lengths as one."""
    return ", ".join(dict.fromkeys("fixed-N" if peer.startswith("fixed-") else peer for peer in peers))


def _peers_help(bench: str) -> str:
    peers = _supported(bench)
    others = any(MODULES[peer] for peer in peers)
    needs = "; llama.cpp and transformers need the extra [bench] and a model in a GGUF file" if others else ""
    ours = "; xla is our engine without its kernels" if "xla" in peers else ""
    drafting = "; off, lookup, shadow, auto and fixed-N are our engine, drafting so" if "off" in peers else ""
    return f"compare with {_named(peers)}{needs}{ours}{drafting}"


def _peers(bench: str) -> Callable[[str], tuple[str, ...]]:
    """How `--against` is read."""

    def read(text: str) -> tuple[str, ...]:
        names = _names(text)
        for name in names:
            if name not in _supported(bench):
                supported = _named(_supported(bench))
                raise argparse.ArgumentTypeError(f"{bench} cannot compare with {name!r}; supported: {supported}")
        return names

    return read


def plan_of(args: argparse.Namespace) -> Plan:
    """The command line as a plan; a `ValueError` for options that do not fit together."""
    values = {key: value for key, value in vars(args).items() if key != "json"}
    values |= {"threads": args.threads or cores(), "embedding": str(args.embedding)}
    if args.bench in ("kernels", "exact") and args.mesh:
        raise ValueError(f"{args.bench} runs on one device: --mesh is not supported")
    if args.bench == "kv" and args.kv != "auto":
        raise ValueError("kv compares float32 with int8: --kv is not supported")
    values.setdefault("draft", "off")
    if args.bench in (*OPERATIONS, "capacity", "soak", "schema"):
        values["prompts"] = DEFAULT
    if args.bench in BUILT_IN and args.prompts is None:
        values |= {"prompts": DEFAULT, "built_in": True}
    if args.bench in ALONE:
        values["against"] = ()
    if args.bench in ONCE:
        values["rounds"] = 1
    if args.bench in ("levels", "skips", "relax", "context", "schema", *TIERED) and args.mesh:
        raise ValueError(f"{args.bench} runs on one device: --mesh is not supported")
    if args.bench == "flat" and args.max_tokens < SHORTEST_FLAT:
        raise ValueError(f"flat needs --max-tokens of at least {SHORTEST_FLAT}, got {args.max_tokens}")
    if args.bench == "decode" and args.temperature and any(peer not in DRAFTING for peer in args.against):
        raise ValueError(f"--temperature is of our engine: --against then supports {_named(DRAFTING)}")
    if args.bench == "quality":
        values["variants"] = tuple(dict.fromkeys(args.variants))
        for variant in args.variants:
            quality.form(variant)
    if args.bench in ("passes", *OPERATIONS, "resume", "capacity", "simulate"):
        values["limit"] = 1
    if args.bench == "decode" and args.max_tokens < MIN_TOKENS:
        raise ValueError(f"decode needs --max-tokens of at least {MIN_TOKENS}, got {args.max_tokens}")
    if args.bench == "batch":
        values["limit"] = args.limit or args.sequences
    if args.bench == "serve":
        _scenario_options(values)
        _arrival_options(values)
    return Plan(**values)


def _scenario_options(values: dict[str, object]) -> None:
    """Defaults of the scenarios; options and peers that one has no use for are refused."""
    scenario = values["scenario"]
    default = CLIENTS.get(str(scenario))
    if values["clients"] is not None and default is None:
        raise ValueError(f"--clients is not used with --scenario {scenario}")
    if values["trace"] is not None and scenario != "arrivals":
        raise ValueError(f"--trace is not used with --scenario {scenario}")
    if values["against"] and scenario in ("overhead", "events"):
        raise ValueError(f"--against is not used with --scenario {scenario}")
    if scenario == "events":
        values["rate"] = values["rate"] or FAST
        values["max_tokens"] = values["max_tokens"] or 10_000
    values["clients"] = values["clients"] or default or ()


def _arrival_options(values: dict[str, object]) -> None:
    """Defaults of the arrivals; options of the other kind of arrivals are refused."""
    poisson = {"rate": 1.0, "seed": 0, "max_tokens": 64}
    traced = {"time_scale": 1.0, "length_scale": 1.0}
    refused, why = (poisson, "not used with") if values["trace"] is not None else (traced, "only used with")
    for name in refused:
        if values[name] is not None:
            raise ValueError(f"--{name.replace('_', '-')} is {why} --trace")
    for name, default in {**poisson, **traced}.items():
        if values[name] is None:
            values[name] = default


def missing(against: Sequence[str]) -> list[str]:
    """Modules that the peers need and that are not installed."""
    return [module for peer in against for module in MODULES[peer] if importlib.util.find_spec(module) is None]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    try:
        plan = plan_of(args)
    except ValueError as error:
        options.error(str(error))
    if absent := missing(plan.against):
        options.error(f"--against needs {', '.join(absent)}; install the peers with: pip install -e .[bench]")
    try:
        content = measure(plan)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            save(args.json, content)
    except (BenchError, PromptFileError, ModelError, OSError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.py: interrupted, nothing was written", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    (kernels.show if plan.bench in OPERATIONS else show)(content, console)
    if plan.bench == "decode":
        drafts.show(content["drafting"], console)
    if content["void"]:
        print(f"bench.py: this run is void: {content['void']}", file=sys.stderr)
    if content.get("differences"):
        print(f"bench.py: not as it should be: {content['differences']}", file=sys.stderr)
    return 1 if content["void"] or content.get("differences") else 0


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark with a status line on stderr."""
    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        return RUN.get(plan.bench, harness.run)(plan, say)


RUN = {
    "resume": resume.run,
    "capacity": capacity.run,
    "context": context.run,
    "soak": soak.run,
    "cache": tiers.run,
    "simulate": simulate.run,
    "serve": lambda plan, say: (serve.run if plan.scenario == "arrivals" else scenarios.run)(plan, say),
    "passes": passes.run,
    "kernels": kernels.run,
    "quality": quality.run,
    "kv": kv.run,
    "exact": exact.run,
    "levels": levels.run,
    "flat": flat.run,
    "schema": forms.run,
    "skips": lossy.skips,
    "relax": lossy.relax,
}
"""How a benchmark is run, where it is not by the harness."""
