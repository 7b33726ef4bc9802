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
from . import harness, serve
from .plan import MIN_TOKENS, Plan
from .processes import BenchError
from .report import save, show
from .systems import MODULES, PEERS

ABOUT = {
    "decode": "one stream: tokens after the first over the time after it",
    "prefill": "one prompt of a given length: prompt tokens over the time to the first token",
    "batch": "several streams at once: output tokens over wall time",
    "serve": "open loop over HTTP: time to first token, between tokens, requests per second, start to ready",
}


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="bench.py", description="Measure speed.", allow_abbrev=False)
    benches = p.add_subparsers(dest="bench", required=True, metavar="|".join(ABOUT))
    for bench, about in ABOUT.items():
        sub = benches.add_parser(bench, help=about, description=about, allow_abbrev=False)
        add_model_options(sub)
        add_draft_option(sub)
        sub.add_argument("--against", type=_peers(bench), default=(), metavar="PEER,...", help=_peers_help(bench))
        sub.add_argument("--prompts", type=Path, default=DEFAULT, metavar="F.jsonl", help="prompt file (default: ours)")
        sub.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of every system (default 3)")
        sub.add_argument("--json", type=Path, metavar="OUT", help="write the report here")
        _ADD[bench](sub)
    return p


def _decode_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=8, metavar="N", help="first N prompts (default 8)")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream (default 128)")


def _prefill_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--limit", type=positive, default=4, metavar="N", help="prompts of a round (default 4)")
    sub.add_argument("--prompt-tokens", type=positive, default=1024, metavar="N", help="length of each (default 1024)")


def _batch_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--sequences", type=positive, default=8, metavar="N", help="streams at once (default 8)")
    sub.add_argument("--limit", type=positive, metavar="N", help="prompts of a round, in groups (default: one group)")
    sub.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="tokens of a stream (default 128)")


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


_ADD = {"decode": _decode_options, "prefill": _prefill_options, "batch": _batch_options, "serve": _serve_options}


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _supported(bench: str) -> tuple[str, ...]:
    return serve.SUPPORTED_PEERS if bench == "serve" else tuple(PEERS)


def _peers_help(bench: str) -> str:
    return f"compare with {','.join(_supported(bench))} (needs the extra [bench] and a model in a GGUF file)"


def _peers(bench: str) -> Callable[[str], tuple[str, ...]]:
    """How `--against` is read."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in _supported(bench):
                supported = ", ".join(_supported(bench))
                raise argparse.ArgumentTypeError(f"{bench} cannot compare with {name!r}; supported: {supported}")
        return names

    return read


def plan_of(args: argparse.Namespace) -> Plan:
    """The command line as a plan; a `ValueError` for options that do not fit together."""
    values = {key: value for key, value in vars(args).items() if key != "json"}
    values["threads"] = args.threads or cores()
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
    show(content, Console())
    return 0


def measure(plan: Plan) -> dict[str, object]:
    """Run the benchmark with a status line on stderr."""
    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        return serve.run(plan, say) if plan.bench == "serve" else harness.run(plan, say)
