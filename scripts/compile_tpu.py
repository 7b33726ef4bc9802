"""Compile every step program of the engine for a TPU topology, on any x86-64 Linux host, and report what it costs.

    python scripts/compile_tpu.py --model llama-3.1-8b --topology v5e:2x2 --json out.json

Nothing runs on a TPU: memory is what the compiler laid out, bytes and operations are counted in the compiled program,
and rates are predictions from the chip's peak rates (`bound_s` is a lower bound of the time, so `predicted_tok_s` is
an upper bound of the speed). Exit code 0: all programs compiled and fit; 1: some did not; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from umbra.configs.engine import EngineConfig
from umbra.configs.models import NAMED, named
from umbra.configs.trunk import TrunkConfig
from umbra.scripts.model_options import OneLineParser, mesh_sizes, positive
from umbra.scripts.tpu import chips
from umbra.scripts.tpu.environment import prepare

ALIASES = {"smollm2": "smollm2-135m"}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    prepare()
    try:
        config = named(ALIASES.get(args.model, args.model))
        engine = EngineConfig(slots=args.slots, decode_steps=args.decode_steps)
        if args.context > engine.context(config):
            raise ValueError(f"--context may be at most {engine.context(config)} for {config.name}, got {args.context}")
        mesh = open_mesh(args.topology, config, args.mesh)
    except ValueError as error:
        options.error(str(error))
    console = Console(stderr=True)
    result = compile_programs(config, engine, mesh, args.topology, args.context, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    Console().print(_table(result))
    return _verdict(result["programs"])


def open_mesh(topology: str, config: TrunkConfig, sizes: tuple[int, int] | None) -> Any:
    """The topology's devices as a (data, model) mesh; a `ValueError` when the model cannot be split like that."""
    from umbra.serving.engine.programs import make_mesh

    return make_mesh(chips.devices(topology), config, *(sizes or (None, None)))


def compile_programs(
    config: TrunkConfig, engine: EngineConfig, mesh: Any, topology: str, context: int, console: Console
) -> dict[str, Any]:
    """The whole report: the keys of the JSON file."""
    import jax.numpy as jnp

    from umbra.scripts.tpu import assume, report
    from umbra.serving.engine.programs import programs

    started = time.perf_counter()
    chip = chips.chip_of(topology)
    listed = programs(config, engine, mesh, dtype=jnp.bfloat16)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"compiling {config.name} for {topology}", total=len(listed))
        load = assume.Load(config, engine, context)
        rows = report.compile_all(listed, load, mesh, chip, jnp.bfloat16.dtype.itemsize, lambda *_: bar.advance(task))
    return {
        "model": config.name,
        "topology": topology,
        "chip": chip.name,
        "mesh": dict(mesh.shape),
        "dtype": "bfloat16",
        "settings": {"slots": engine.slots, "context": context, "decode_steps": engine.passes("tpu")},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "umbra")},
        "seconds": round(time.perf_counter() - started, 1),
        "programs": rows,
    }


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="compile_tpu.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--model", default="smollm2", help=f"smollm2 (default) or one of {', '.join(NAMED)}")
    p.add_argument(
        "--topology", default="v5e:2x2", help=f"CHIP:AxB (%(default)s), CHIP one of {', '.join(chips.CHIPS)}"
    )
    p.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="data=D,model=M",
        help="default: model = largest divisor of the chips that divides the key/value heads",
    )
    p.add_argument("--slots", type=positive, default=EngineConfig.slots, help="sequences per data shard (%(default)s)")
    p.add_argument("--decode-steps", type=positive, help="passes of the decode_n program (8); 1: leave it out")
    p.add_argument(
        "--context", type=positive, default=1024, help="tokens in the KV cache of every sequence (%(default)s)"
    )
    p.add_argument("--json", type=Path, metavar="OUT", help="write the report to this file")
    return p


def _table(result: dict[str, Any]) -> Table:
    chip = chips.CHIPS[result["chip"]]
    mesh = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    table = Table(
        title=f"{result['model']} on {result['topology']} ({mesh}), per chip, context {result['settings']['context']}",
        caption=f"{chip.hbm_bytes / 2**30:.0f} GiB a chip. Nothing ran on a TPU: bound and tokens/s are predictions.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("program", no_wrap=True)
    for heading in ("GiB", "fits", "MB moved", "/ least", "bound ms", "tok/s <="):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["programs"]:
        if not row["compiled"]:
            table.add_row(row["name"], "", "NO" if row["fits"] is False else "")
            continue
        table.add_row(
            row["name"],
            f"{row['hbm_bytes'] / 2**30:.2f}",
            "yes" if row["fits"] else "NO",
            f"{row['bytes_accessed'] / 1e6:,.1f}",
            f"{row['bytes_ratio']:.2f}",
            f"{row['bound_s'] * 1e3:,.3f}",
            f"{row['predicted_tok_s']:,.0f}" if row["predicted_tok_s"] else "",
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
