"""The command line of `bench.py`: one subcommand per benchmark, each with the options that it uses."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ...configs.machine import cores
from ...configs.prompt_sets import DEFAULT, PromptFileError
from ...model.weights.errors import ModelError
from ..model_options import OneLineParser, add_draft_option, add_model_options, positive
from . import exact, harness, kernels, passes, quality, serve
from .plan import MIN_TOKENS, Plan
from .processes import BenchError
from .report import save, show
from .systems import MODULES, PEERS

WIDTHS = (1, 2, 4, 5, 8, 16, 32)
ROWS = (1, 2, 4, 5, 8, 16, 32, 128)
CONTEXTS = (128, 1024, 8000)
_WIDTHS = "default " + ",".join(map(str, WIDTHS))

ABOUT = {
    "decode": "one stream: tokens after the first over the time after it",
    "prefill": "one prompt of a given length: prompt tokens over the time to the first token",
    "batch": "several streams at once: output tokens over wall time",
    "serve": "open loop over HTTP: time to first token, between tokens, requests per second, start to ready",
    "passes": "a pass of several tokens over one of a single token; what a long context adds to a pass",
    "kernels": "single operations against the machine's measured peak and plain JAX",
    "quality": "agreement with the float32 model, and perplexity, on its own answers",
    "exact": "whether ids and logits depend on batch mates, chunks, pass widths, table width or threads",
}


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="bench.py", description="Measure speed and quality.", allow_abbrev=False)
    benches = p.add_subparsers(dest="bench", required=True, metavar="|".join(ABOUT))
    for bench, about in ABOUT.items():
        sub = benches.add_parser(bench, help=about, description=about, allow_abbrev=False)
        add_model_options(sub)
        if bench != "exact":
            sub.add_argument(
                "--against", type=_peers(bench), default=("xla",) if bench == "kernels" else (), metavar="PEER,...",
                help=_peers_help(bench),
            )  # fmt: skip
        if bench != "kernels":
            add_draft_option(sub)
            sub.add_argument(
                "--prompts", type=Path, default=DEFAULT, metavar="F.jsonl", help="prompt file (default: ours)"
            )
        if bench not in ("quality", "exact"):
            sub.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of each system (default 3)")
        sub.add_argument("--json", type=Path, metavar="OUT", help="write the report here")
        _ADD[bench](sub)
    return p


def _decode_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=8, metavar="N", help="first N prompts (default 8)")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream (default 128)")
    sub.add_argument(
        "--busy", type=positive, default=0, metavar="N", help="run every prompt again beside N busy processes"
    )


def _prefill_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=4, metavar="N", help="prompts of a round (default 4)")
    sub.add_argument("--prompt-tokens", type=positive, default=1024, metavar="N", help="length of each (default 1024)")


def _batch_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--sequences", type=positive, default=8, metavar="N", help="streams at once (default 8)")
    sub.add_argument("--limit", type=positive, metavar="N", help="prompts of a round, in groups (default: one group)")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream (default 128)")


def _passes_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--widths", type=_numbers, default=WIDTHS, metavar="W,...", help=f"tokens of a pass ({_WIDTHS})")
    sub.add_argument(
        "--context", type=positive, default=8000, metavar="N", dest="prompt_tokens",
        help="tokens of the long context (default 8000)",
    )  # fmt: skip


def _kernels_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--ops", type=_ops, default=kernels.OPS, metavar="OP,...", help=f"of {','.join(kernels.OPS)}")
    sub.add_argument(
        "--row-counts", type=_numbers, default=ROWS, metavar="R,...", dest="widths",
        help=f"rows of a product (default {','.join(map(str, ROWS))})",
    )  # fmt: skip
    sub.add_argument(
        "--contexts", type=_numbers, default=CONTEXTS, metavar="N,...",
        help=f"tokens before those that attend (default {','.join(map(str, CONTEXTS))})",
    )  # fmt: skip


def _quality_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=40, metavar="N", help="first N prompts (default 40)")
    sub.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="tokens of an answer (default 96)")
    sub.add_argument("--sequences", type=positive, default=16, metavar="N", help="answers made at once (default 16)")
    sub.add_argument(
        "--variants", nargs="+", default=(), metavar="QUANT[+kv=KV][+embedding=E]",
        help="other forms of ours, for example: none int8 auto+kv=float32 auto+embedding=4096:int8,int4",
    )  # fmt: skip


def _serve_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--sequences", type=positive, default=8, metavar="N", help="requests open at once (default 8)")
    sub.add_argument("--limit", type=positive, default=32, metavar="N", help="requests of a round (default 32)")
    sub.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of an answer (default 64)")
    sub.add_argument("--rate", type=_factor, metavar="R", help="Poisson arrivals per second (default 1)")
    sub.add_argument("--seed", type=int, metavar="S", help="seed of the arrivals (default 0)")
    sub.add_argument("--trace", type=Path, metavar="F", help="arrivals and lengths from this file (.jsonl, .jsonl.gz)")
    sub.add_argument("--time-scale", type=_factor, metavar="X", help="stretch the trace's times (default 1)")
    sub.add_argument("--length-scale", type=_factor, metavar="X", help="stretch the trace's lengths (default 1)")
    sub.add_argument(
        "--starts", type=int, choices=(1, 2), default=2,
        help="2 (default): time a first start with nothing compiled and a second; 1: one start with your cache",
    )  # fmt: skip


def _exact_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=100, metavar="N", help="first N prompts (default 100)")
    sub.add_argument("--max-tokens", type=positive, default=32, metavar="N", help="tokens of an answer (default 32)")


_ADD = {
    "decode": _decode_options,
    "prefill": _prefill_options,
    "batch": _batch_options,
    "serve": _serve_options,
    "passes": _passes_options,
    "kernels": _kernels_options,
    "quality": _quality_options,
    "exact": _exact_options,
}


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


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
    return few.get(bench, tuple(PEERS))


def _peers_help(bench: str) -> str:
    peers = _supported(bench)
    needs = " (but for xla: needs the extra [bench] and a model in a GGUF file)" if peers != ("xla",) else ""
    return f"compare with {','.join(peers)}{needs}; xla is our engine without its kernels"


def _peers(bench: str) -> Callable[[str], tuple[str, ...]]:
    """How `--against` is read."""

    def read(text: str) -> tuple[str, ...]:
        names = _names(text)
        for name in names:
            if name not in _supported(bench):
                supported = ", ".join(_supported(bench))
                raise argparse.ArgumentTypeError(f"{bench} cannot compare with {name!r}; supported: {supported}")
        return names

    return read


def plan_of(args: argparse.Namespace) -> Plan:
    """The command line as a plan; a `ValueError` for options that do not fit together."""
    values = {key: value for key, value in vars(args).items() if key != "json"}
    values |= {"threads": args.threads or cores(), "embedding": str(args.embedding)}
    if args.bench in ("kernels", "exact") and args.mesh:
        raise ValueError(f"{args.bench} runs on one device: --mesh is not supported")
    if args.bench == "kernels":
        values |= {"draft": "off", "prompts": DEFAULT}
    if args.bench == "exact":
        values |= {"against": (), "rounds": 1}
    if args.bench == "quality":
        values["rounds"] = 1
        values["variants"] = tuple(dict.fromkeys(args.variants))
        for variant in args.variants:
            quality.form(variant)
    if args.bench in ("passes", "kernels"):
        values["limit"] = 1
    if args.bench == "decode" and args.max_tokens < MIN_TOKENS:
        raise ValueError(f"decode needs --max-tokens of at least {MIN_TOKENS}, got {args.max_tokens}")
    if args.bench == "batch":
        values["limit"] = args.limit or args.sequences
    if args.bench == "serve":
        _arrival_options(values)
    return Plan(**values)


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
    (kernels.show if plan.bench == "kernels" else show)(content, Console(width=None if sys.stdout.isatty() else 120))
    if content["void"]:
        print(f"bench.py: this run is void: {content['void']}", file=sys.stderr)
    if content.get("differences"):
        print(f"bench.py: not exact: {content['differences']}", file=sys.stderr)
    return 1 if content["void"] or content.get("differences") else 0


def measure(plan: Plan) -> dict[str, object]:
    """Run the benchmark with a status line on stderr."""
    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        return RUN.get(plan.bench, harness.run)(plan, say)


RUN = {"serve": serve.run, "passes": passes.run, "kernels": kernels.run, "quality": quality.run, "exact": exact.run}
"""How a benchmark is run, where it is not by the harness."""
