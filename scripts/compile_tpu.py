"""Compile every step program of the engine for a TPU topology, on any x86-64 Linux host, and report what it costs.

    python scripts/compile_tpu.py --model llama-3.1-8b --topology v5e:2x2 --json out.json

Nothing runs on a TPU: memory is what the compiler laid out, bytes and operations are counted in the compiled program,
and rates are predictions from the chip's peak rates (`bound_s` is a lower bound of the time, so `predicted_tok_s` is
an upper bound of the speed).

The decode program is reported three times: `decode` is a pass with one token of each sequence, `verify` the same
program with all of its rows for drafts in use, and `draft` what drafting alone costs in either. Every pass counts
drafting as many tokens as a shadow can.

Exit code 0: all programs compiled and fit; 1: some did not; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from umbra.configs.engine import EngineConfig
from umbra.configs.models import NAMED, named
from umbra.configs.trunk import TrunkConfig
from umbra.kernels.backend import choose
from umbra.scripts.model_options import OneLineParser, mesh_sizes, only, positive
from umbra.scripts.tpu import chips
from umbra.scripts.tpu.environment import prepare

if TYPE_CHECKING:
    from umbra.scripts.tpu.jobs import Target

ALIASES = {"smollm2": "smollm2-135m"}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    prepare()
    try:
        config = named(ALIASES.get(args.model, args.model))
        if args.context > config.context_length:
            raise ValueError(f"--context may be at most {config.context_length} for {config.name}, got {args.context}")
        mesh = open_mesh(args.topology, config, args.mesh)
        kernels = choose("tpu", args.kernels).kernels
    except ValueError as error:
        options.error(str(error))
    from umbra.scripts.tpu.jobs import Target

    target = Target(
        config, mesh, kernels, args.quant, args.kv, args.context, args.sampling, args.decode_steps, args.draft == "auto"
    )
    console = Console(stderr=True)
    result = compile_programs(target, args.topology, args.slots, args.sequences, args.roofline, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    out = Console()
    out.print(_table(result))
    if result["roofline"]:
        out.print(_roofline(result))
        out.print(_gains(result))
    return _verdict(result["programs"])


def open_mesh(topology: str, config: TrunkConfig, sizes: tuple[int, int] | None) -> Any:
    """The topology's devices as a (data, model) mesh; a `ValueError` when the model cannot be split like that."""
    from umbra.serving.engine.programs import make_mesh

    return make_mesh(chips.devices(topology), config, *(sizes or (None, None)))


def compile_programs(
    target: Target, topology: str, slots: int, sequences: Sequence[int], roofline: bool, console: Console
) -> dict[str, Any]:
    """The whole report: the keys of the JSON file."""
    from umbra.scripts.tpu import jobs, report

    started = time.perf_counter()
    chip = chips.chip_of(topology)
    engine = target.engine(slots)
    listed = jobs.engine_jobs(target, slots) + jobs.decode_jobs(target, [n for n in sequences if n != slots])
    count = sum(len(job.cases) for job in listed)
    if roofline:
        listed += jobs.roofline_jobs(target, jobs.ROOFLINE_SEQUENCES, jobs.ROOFLINE_NEW_TOKENS)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"compiling {target.config.name} for {topology}", total=len(listed))
        rows = report.compile_all(listed, target.mesh, chip, lambda *_: bar.advance(task))
    return {
        "model": target.config.name,
        "topology": topology,
        "chip": chip.name,
        "mesh": dict(target.mesh.shape),
        "dtype": "bfloat16",
        "settings": {
            "slots": slots,
            "context": target.context,
            "decode_steps": engine.passes("tpu"),
            "kernels": target.kernels._asdict(),
            "quant": target.quant,
            "kv": target.kv_format(engine).name,
            "sampling": target.sampling,
            "drafting": jobs.drafting(target, engine),
        },
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "umbra")},
        "seconds": round(time.perf_counter() - started, 1),
        "programs": rows[:count],
        "roofline": rows[count:],
    }


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="compile_tpu.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--model", default="smollm2", help=f"smollm2 or one of {', '.join(NAMED)}")
    p.add_argument("--topology", default="v5e:2x2", help=f"CHIP:AxB, CHIP one of {', '.join(chips.CHIPS)}")
    p.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="data=D,model=M",
        help="how the chips are used (default: model = the largest divisor of their number that divides the KV heads)",
    )
    p.add_argument(
        "--kernels", default="auto", type=only("auto", "xla", "tpu"),
        help="auto (ours), tpu (the same), or xla (plain JAX, to compare with)",
    )  # fmt: skip
    p.add_argument(
        "--quant", default="none", type=only("none", "int8", "int4"),
        help="weights: none (bfloat16), int8 (a scale for each output channel) or int4 (for each 32 inputs)",
    )  # fmt: skip
    p.add_argument(
        "--kv", default="auto", type=only("auto", "bfloat16", "int8", "float32"),
        help="keys and values: auto (bfloat16), int8, float32",
    )  # fmt: skip
    p.add_argument("--slots", type=positive, default=EngineConfig.slots, help="sequences per data shard")
    p.add_argument("--decode-steps", type=positive, help="passes of the decode_n program; 1: leave it out (default: 8)")
    p.add_argument("--context", type=positive, default=1024, help="tokens in the KV cache of every sequence")
    p.add_argument(
        "--sequences", type=_numbers, default=(), metavar="N,N",
        help="also compile the decode programs for these numbers of sequences, for example 1,8,32",
    )  # fmt: skip
    p.add_argument(
        "--sampling", default="greedy", type=only("greedy", "temperature", "top-p"),
        help="what every slot is assumed to ask for: greedy, temperature or top-p",
    )  # fmt: skip
    p.add_argument(
        "--draft", default="auto", type=only("auto", "off"),
        help="auto (with a shadow of the size that the model allows), or off: programs that never draft",
    )  # fmt: skip
    p.add_argument(
        "--roofline", action="store_true",
        help="also predict passes of 1 and 5 tokens of 1, 8, 32 and 128 sequences, and what drafts gain",
    )  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    return p


def _numbers(text: str) -> tuple[int, ...]:
    """`1,8,32` as (1, 8, 32), for argparse."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def _table(result: dict[str, Any]) -> Table:
    chip = chips.CHIPS[result["chip"]]
    mesh = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    table = Table(
        title=f"{result['model']} on {result['topology']} ({mesh}), per chip, context {result['settings']['context']}",
        caption=f"{chip.hbm_bytes / 2**30:.0f} GiB a chip. Nothing ran on a TPU: bound and tokens/s are predictions.\n"
        "kind: verify is the decode program with drafts in all of its rows, all of them\n"
        "accepted, and draft the part of either that drafts (in every pass).\n"
        "ops: kernels, fusions, copies and collectives that one run starts.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in ("program", "kind"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GiB", "fits", "ops", "MB moved", "/ least", "bound ms", "tok/s <="):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["programs"]:
        if not row["compiled"]:
            table.add_row(row["name"], row["kind"], "", "NO" if row["fits"] is False else "")
            continue
        table.add_row(
            row["name"],
            row["kind"],
            f"{row['hbm_bytes'] / 2**30:.2f}",
            "yes" if row["fits"] else "NO",
            f"{sum(row['operations'].values()):,}",
            f"{row['bytes_accessed'] / 1e6:,.1f}",
            f"{row['bytes_ratio']:.2f}",
            f"{row['bound_s'] * 1e3:,.3f}",
            f"{row['predicted_tok_s']:,.0f}" if row["predicted_tok_s"] else "",
        )
    return table


def _roofline(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"predicted for {result['model']} on {result['topology']}, context {result['settings']['context']}",
        caption="tokens: of each sequence in a pass; passes of several also draft.\n"
        "Nothing ran: bytes of the compiled pass over the chip's bandwidth,\n"
        "or operations over the peak of its matrix units if that takes\n"
        "longer. Nothing else costs time.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in ("sequences", "tokens", "fits", "MB moved", "/ least", "drafting", "bound ms", "by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["roofline"]:
        head = (str(row["sequences"] * result["mesh"]["data"]), str(row["new_tokens"]))
        if not row["compiled"]:
            table.add_row(*head, "NO" if row["fits"] is False else "refused")
            continue
        table.add_row(
            *head,
            "yes" if row["fits"] else "NO",
            f"{row['bytes_accessed'] / 1e6:,.1f}",
            f"{row['bytes_ratio']:.2f}",
            f"{row['draft_bytes'] / row['bytes_accessed']:.1%}" if row["drafted"] else "",
            f"{row['bound_s'] * 1e3:,.3f}",
            row["bound_by"],
        )
    return table


def _gains(result: dict[str, Any]) -> Table:
    """What the passes of several tokens of the roofline bring, beside those of one."""
    rows = [row for row in result["roofline"] if row["compiled"]]
    accepted = sorted({a["tokens_per_pass"] for row in rows for a in row.get("accepted", ())})
    table = Table(
        title="times the speed without drafting, by tokens that a pass brings",
        caption="Drafting included; 1: no draft is ever accepted.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in ("sequences", "tok/s a chip <=", *(f"{n:g}" for n in accepted)):
        table.add_column(heading, justify="right", no_wrap=True)
    # Without drafting a pass brings one token: the roofline's own figure.
    plain = {row["sequences"]: row["predicted_tok_s_chip"] for row in rows if row["kind"] == "decode"}
    for row in rows:
        if row["kind"] == "verify" and (alone := plain.get(row["sequences"])):
            speeds = [a["tok_s_chip"] for a in row["accepted"]]
            table.add_row(
                str(row["sequences"] * result["mesh"]["data"]),
                f"{alone:,.0f}",
                *(f"{speed / alone:.2f}x" for speed in speeds),
            )
    return table


def _verdict(rows: list[dict[str, Any]]) -> int:
    refused = [f"{row['name']} did not compile: {row['error']}" for row in rows if not row["compiled"]]
    too_big = [
        f"{row['name']} needs more memory than a chip has" for row in rows if row["compiled"] and not row["fits"]
    ]
    for problem in refused + too_big:
        print(f"compile_tpu.py: {problem}", file=sys.stderr)
    return 1 if refused or too_big else 0


if __name__ == "__main__":
    sys.exit(main())
