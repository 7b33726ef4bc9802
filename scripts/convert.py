"""Convert a model between GGUF, Hugging Face and Orbax.

    python scripts/convert.py smollm2 smollm2.orbax
    python scripts/convert.py model.gguf folder --to hf --dtype bfloat16

SRC is anything `--model` takes except random models: a packaged model, `hf:ORG/NAME`, a .gguf file, or a Hugging Face
or Orbax folder. DST is a .gguf file, a folder ending in .orbax, or any other name for a Hugging Face folder, unless
`--to` says otherwise. The destination appears when it is complete, never before.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from umbra.scripts.model_options import OneLineParser, prepare

if TYPE_CHECKING:
    from umbra.model.weights.source import Source

FORMATS = ("gguf", "hf", "orbax")
DTYPES = ("auto", "float32", "float16", "bfloat16")


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="convert.py", description=__doc__)
    p.add_argument("source", metavar="SRC", help="what is read")
    p.add_argument("destination", metavar="DST", type=Path, help="what is written")
    p.add_argument("--to", choices=FORMATS, help="format of DST (default: by its name)")
    p.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of the weights; auto: the smallest that keeps them"
    )
    p.add_argument("--force", action="store_true", help="replace DST if it exists")
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser()
    args = options.parse_args(argv)
    by_name = {".gguf": "gguf", ".orbax": "orbax"}.get(args.destination.suffix)
    args.to = args.to or by_name or "hf"
    if by_name is not None and by_name != args.to:
        options.error(f"{args.destination} is named like {by_name}, but --to is {args.to}; supported: agreeing names")
    if args.to == "gguf" and by_name != "gguf":
        options.error(f"{args.destination} must end in .gguf to be a GGUF file")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare(None, None)
    from umbra.model.load import RANDOM, ModelError, open_source

    try:
        if args.source in RANDOM:
            raise ModelError(f"{args.source} is made of random numbers and has no files; supported: models in files")
        if args.destination.exists() and not args.force:
            raise ModelError(f"{args.destination} exists; pass --force to replace it")
        convert(open_source(args.source), args.destination, args.to, args.dtype)
    except (ModelError, OSError) as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 1
    return 0


def convert(source: Source, destination: Path, to: str, dtype: str) -> None:
    """Writes `source` to `destination` in the format `to`."""
    import numpy as np

    from umbra.configs.files import replacing
    from umbra.model.load import ModelError
    from umbra.model.params import param_specs
    from umbra.model.weights import export
    from umbra.model.weights.stored import BFLOAT16
    from umbra.model.weights.text import load_text

    origin = source.path.resolve()
    target = destination.resolve()
    if target == origin or target in origin.parents or origin in target.parents:
        raise ModelError(f"{destination} and the source {source.path} lie one in the other; supported: another place")
    if destination.exists() and destination.is_dir() != (to != "gguf"):
        found = "a folder" if destination.is_dir() else "a file"
        raise ModelError(f"{destination} is {found}, which a {to} model cannot replace")
    kind = None if dtype == "auto" else BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    text = load_text(source)
    with report_to_stderr(len(param_specs(source.config))) as report:
        if to == "gguf":
            with replacing(destination) as path:
                export.write_gguf(source, text, path, kind, report)
            return
        write = export.write_huggingface if to == "hf" else export.write_orbax
        with replacing_folder(destination) as folder:
            write(source, text, folder, kind, report)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        new, old = Path(work) / "new", Path(work) / "old"
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def report_to_stderr(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that advances with every parameter."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=total)
        yield lambda path: bar.update(task, advance=1, description=path)


if __name__ == "__main__":
    sys.exit(main())
