"""Train a shadow network for a trunk: from prompts to a calibrated draft network and a report.

    python scripts/train_shadow.py --model smollm2 --out runs/smollm2

The trunk first answers prompts (built-in ones, and those of --data), then the shadow is trained on the answers, its
gate is calibrated on held-out ones, and both are measured on others. DIR/shadow.safetensors is the result, and
DIR/report.md tells how good it is. Interrupted at any moment, the command with --resume goes on and gives the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from umbra.configs.machine import cores
from umbra.configs.prompt_sets import FOLDER, Prompt, PromptFileError, load_passages, load_prompts
from umbra.configs.shadow import ShadowConfig, TrainingConfig
from umbra.model.weights.errors import ModelError
from umbra.scripts.model_options import OneLineParser, add_model_options, open_engine, positive, prepare
from umbra.serving.console import StartupProgress

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from umbra.model.training.answers import Answered
    from umbra.model.training.pipeline import TrunkArrays

Prompts = dict[str, list[Prompt]]
"""Those of the options --data and --test."""

OF_TRAINING = ("seed", "prompts", "tokens", "max_tokens", "unroll", "epochs", "batch", "learning_rate")
"""Options that are fields of `TrainingConfig` of the same name."""

CONTEXT = 2048
"""Positions of a prompt with its answer; longer prompts are left out."""


def parser() -> argparse.ArgumentParser:
    default = TrainingConfig()
    p = OneLineParser(prog="train_shadow.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_model_options(p)
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the run and its result")
    p.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    p.add_argument(
        "--data", nargs="+", action="extend", default=[], type=Path, metavar="FILE",
        help="more prompts to train on: JSON lines with question_id, category, turns (the first turn is used)",
    )  # fmt: skip
    p.add_argument(
        "--passages", nargs="+", action="extend", default=[], type=Path, metavar="FILE",
        help="texts, one a line, for the built-in prompts about texts (summaries, questions, copies), beside those "
        "that the model writes",
    )  # fmt: skip
    p.add_argument(
        "--test", nargs="+", action="extend", default=[], type=Path, metavar="FILE",
        help="prompts to measure on; nothing that shares eight words in a row with one is trained on",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=default.seed, help="of everything that is drawn")
    numbers = {
        "prompts": "built-in prompts", "tokens": "tokens of answers to train and calibrate on",
        "max_tokens": "tokens of one answer", "unroll": "places of a chain in the loss",
        "batch": "examples of an optimiser step",
    }  # fmt: skip
    for name, words in numbers.items():
        value = getattr(default, name)
        p.add_argument(f"--{name.replace('_', '-')}", type=positive, default=value, metavar="N", help=words)
    p.add_argument("--epochs", type=float, default=default.epochs, metavar="X", help="times over the examples")
    p.add_argument("--learning-rate", type=float, default=default.learning_rate, metavar="X", help="at its peak")
    p.add_argument("--streams", type=positive, default=16, metavar="N", help="answers generated at once")
    p.add_argument(
        "--rank", type=positive, metavar="N", help="of the shadow (default: what 0.3 %% of the trunk allows)"
    )
    p.add_argument(
        "--mlp", type=positive, metavar="N", help="width of the shadow's MLP (default: five sixths of the rank)"
    )
    p.add_argument("--vocab", type=positive, default=4096, metavar="N", help="tokens that it can draft")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    try:
        config = TrainingConfig(**{name: getattr(args, name) for name in OF_TRAINING})
        prompts = {name: _load(getattr(args, name)) for name in ("data", "test")}
        passages = [passage for path in args.passages for passage in load_passages(path)]
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is a file; give a folder")
        if not args.resume and args.out.is_dir() and any(args.out.iterdir()):
            raise ValueError(f"--out {args.out} is not empty; add --resume to go on with the run in it")
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, PromptFileError, OSError) as error:
        options.error(str(error))
    asked = _fingerprint(args, config, prompts, passages)
    # Only answering needs native kernels, and those would leave XLA, which trains, a single thread.
    prepare(args.threads, args.mesh, "xla" if answers_ready(args.out, asked) else args.kernels)
    from umbra.model.shadow import ShadowError
    from umbra.model.training.store import StoreError

    console = Console(stderr=True)
    try:
        return run(args, config, prompts, passages, asked, console, list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("train_shadow.py: interrupted; run it again with --resume to go on", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError, OSError, ModelError, StoreError, ShadowError) as error:
        print(f"train_shadow.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _load(paths: Sequence[Path]) -> list[Prompt]:
    return [prompt for path in paths for prompt in load_prompts(path)]


def run(
    args: argparse.Namespace, config: TrainingConfig, prompts: Prompts, passages: list[str], asked: str,
    console: Console, argv: list[str],
) -> int:  # fmt: skip
    from umbra.model.training.answers import load_index

    if not answers_ready(args.out, asked):
        with Stages(console) as stages:
            answer(args, config, prompts, passages, asked, console, stages)
        restart_for_training(args, argv)
    with Stages(console) as stages:
        learn(args, config, *load_index(args.out), stages)
    return 0


def answers_ready(out: Path, asked: str) -> bool:
    """Whether all answers of a run with this fingerprint are in the folder."""
    path = out / "index.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["about"]["asked"] == asked


def _fingerprint(args: argparse.Namespace, config: TrainingConfig, prompts: Prompts, passages: list[str]) -> str:
    """Everything that the answers depend on and that is known before the model is loaded."""
    options = {name: str(getattr(args, name)) for name in ("model", "quant", "kv", "kernels", "embedding", "mesh")}
    of_answers = {name: getattr(config, name) for name in ("seed", "prompts", "tokens", "max_tokens")}
    texts = {name: [prompt.turns[0] for prompt in group] for name, group in prompts.items()}
    plain = json.dumps([options, of_answers, texts, passages], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def answer(
    args: argparse.Namespace, config: TrainingConfig, prompts: Prompts, passages: list[str], asked: str,
    console: Console, stages: Stages,
) -> None:  # fmt: skip
    """Let the trunk answer, and write down what training needs of it."""
    from umbra.model.training.answers import Sources, gather, save_index
    from umbra.serving.completions import speaker

    with StartupProgress(console) as starting:
        model, engine = open_engine(
            args.model, args.quant, args.mesh, kernels=args.kernels, embedding=args.embedding, progress=starting,
            warm=False, draft="off", kv=args.kv, slots=args.streams, max_queue=args.streams, features=True,
            decode_steps=1, context_length=CONTEXT,
        )  # fmt: skip
    try:
        identity = {"weights": model.weights_id, "numerics": engine.numerics_class}
        own = [prompt for path in sorted(FOLDER.glob("*.jsonl")) for prompt in load_prompts(path)]  # we measure on them
        sources = Sources(prompts["data"], prompts["test"], own, passages)
        answered, tests = gather(
            speaker(model, engine, args.streams), args.out, config, identity, sources, stages.plain
        )
        trunk_arrays(model).save(args.out / "trunk.npz")
    finally:
        engine.close()
    trunk = dataclasses.asdict(model.config)
    save_index(args.out, answered, tests, {"asked": asked, "trunk": trunk, "weights_id": model.weights_id})


def trunk_arrays(model: Any) -> TrunkArrays:
    import numpy as np

    from umbra.model.shadow import embedding_rows
    from umbra.model.training.pipeline import TrunkArrays

    every = np.arange(model.config.vocab_size)
    embedding = embedding_rows(model.params["embed"], every, model.kernels)
    tied = model.config.tied_embeddings
    output = embedding if tied else embedding_rows(model.params["head"], every, model.kernels)
    return TrunkArrays(embedding, np.asarray(model.params["final_norm"], np.float32), output)


def restart_for_training(args: argparse.Namespace, argv: list[str]) -> None:
    """Native kernels leave XLA one thread, which would make training slow, and that is fixed once JAX has started. So
    the process becomes a new one, which finds the answers ready. Where XLA has its threads, nothing happens."""
    if os.environ.get("NPROC") != "1" or (args.threads or cores()) == 1:
        return
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    again = [sys.executable, "-m", "umbra.scripts.train_shadow", *argv, *([] if args.resume else ["--resume"])]
    sys.stdout.flush()
    os.execve(sys.executable, again, environment)


def learn(
    args: argparse.Namespace, config: TrainingConfig, answered: list[Answered], tests: list[Answered],
    about: dict[str, Any], stages: Stages,
) -> None:  # fmt: skip
    from umbra.model.training import pipeline
    from umbra.model.training.report import write_report
    from umbra.model.weights.orbax import config_from_json

    trunk = config_from_json(about["trunk"])
    shape = ShadowConfig.for_trunk(trunk, (0.0, *config.temperatures), args.vocab)
    shape = dataclasses.replace(shape, rank=args.rank or shape.rank, mlp=args.mlp or shape.mlp)
    result = pipeline.train(
        pipeline.Run(trunk, about["weights_id"], shape, config, args.out, _mesh(args.mesh)), answered, tests,
        pipeline.TrunkArrays.load(args.out / "trunk.npz"), stages,
    )  # fmt: skip
    command = "python scripts/train_shadow.py " + shlex.join(_told(args))
    report = write_report(result, command)
    rates = ", ".join(f"{name} {value:.2f}" for name, value in result.held_out.gated["all"].items())
    print(f"{args.out / 'shadow.safetensors'}: {result.size}")
    print(f"tokens per pass on held-out prompts: {rates}; see {report}")


def _told(args: argparse.Namespace) -> list[str]:
    """The options that differ from their defaults, with the names of files instead of their places."""
    told = []
    for name, value in vars(args).items():
        if name in ("out", "resume") or str(value) == str(parser().get_default(name)):
            continue
        if name == "mesh":
            value = "data={},model={}".format(*value)
        values = [Path(v).name for v in value] if isinstance(value, list) else [str(value)]
        told += [f"--{name.replace('_', '-')}", *values]
    return told


def _mesh(sizes: tuple[int, int] | None) -> Mesh | None:
    """All devices of the mesh, for data parallelism: a shadow is small enough for each."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    n = sizes[0] * sizes[1] if sizes else 1
    return Mesh(np.array(jax.devices()[:n]), ("data",)) if n > 1 else None


class Stages:
    """A bar for each stage, with its rate and the time left; without a terminal a line now and then."""

    EVERY = 10.0
    """Seconds between lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, tuple[TaskID, float]] = {}
        self._last = 0.0

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def plain(self, what: str, done: int, total: int, before: int) -> None:
        self(what, done, total, before, "")

    def __call__(self, what: str, done: int, total: int, before: int, words: str) -> None:
        """`done` of `total`, of which `before` were done when the stage began here."""
        now = time.monotonic()
        if first := what not in self._tasks:
            self._tasks[what] = (self._bars.add_task(what, total=total, completed=before, state=""), now)
        task, began = self._tasks[what]
        rate = (done - before) / (now - began) if now > began else 0.0
        state = f"{done:,} of {total:,}, {rate:,.1f}/s" + (f", {words}" if words else "")
        self._bars.update(task, completed=done, total=total, state=state)
        if not self._console.is_terminal and (first or done >= total or now - self._last > self.EVERY):
            self._last = now
            left = f", {(total - done) / rate / 60:.0f} min left" if rate > 0 and done < total else ""
            self._console.print(f"{what}: {state}{left}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
