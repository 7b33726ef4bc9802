"""Answer every prompt of a file and write one JSON line per prompt, in the order of the prompts.

    python scripts/generate.py --prompts configs/prompts/umbra_100.jsonl --out answers.jsonl --limit 8

An interrupted run is taken up where it stopped when it is started again with the same options.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from umbra.configs.prompt_sets import Prompt, PromptFileError, load_prompts
from umbra.model.weights.errors import ModelError
from umbra.scripts.level_options import add_level_option, add_lossy_option, add_think_option, effort
from umbra.scripts.model_options import (
    OneLineParser,
    add_draft_option,
    add_model_options,
    add_state_options,
    open_engine,
    positive,
    prepare,
    state,
)
from umbra.scripts.resumable import ResumableRows
from umbra.serving.console import StartupProgress

if TYPE_CHECKING:
    from umbra.model.load import Model
    from umbra.serving.engine import Engine, SamplingParams

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "ignore_eos", "digest", "draft",
)  # fmt: skip
"""Options that are fields of `SamplingParams` of the same name."""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="generate.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE", help="JSON lines: question_id, category, turns"
    )
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="file to write, one line per prompt")
    add_model_options(p)
    add_draft_option(p)
    add_level_option(p)
    add_think_option(p)
    add_lossy_option(p)
    add_state_options(p, default=None)
    p.add_argument("--batch", type=positive, default=1, metavar="N", help="requests in flight at once")
    p.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    p.add_argument("--all-turns", action="store_true", help="all user messages of a prompt, with the answers between")
    p.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--seed", type=int, default=0, help="seed of every request's noise")
    p.add_argument("--top-k", type=int, default=0, help="only the K most likely tokens; 0: off")
    p.add_argument("--top-p", type=float, default=1.0, help="only the most likely tokens that add up to this")
    p.add_argument("--min-p", type=float, default=0.0, help="only tokens this likely in relation to the likeliest")
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="logits of tokens seen are divided by it; 1: off"
    )
    p.add_argument(
        "--presence-penalty", type=float, default=0.0, help="taken from the logits of tokens of the answer; 0: off"
    )
    p.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same for every time that a token came; 0: off"
    )
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end, up to --max-tokens")
    p.add_argument("--digest", action="store_true", help="add a CRC of every row of logits that chose a token")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    prepare(args.threads, args.mesh, args.kernels)
    from umbra.serving.engine import SamplingParams  # only now: it imports JAX

    try:
        params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING}, stop=tuple(args.stop))
        prompts = load_prompts(args.prompts, limit=args.limit)
        state(args, default=None)
        if args.out.is_dir():
            raise ValueError(f"--out {args.out} is a folder; give the file to write")
        if args.out.exists() and args.out.samefile(args.prompts):
            raise ValueError(f"--out {args.out} is the prompt file itself; give another file")
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, PromptFileError, OSError) as error:
        options.error(str(error))
    try:
        return run(args, prompts, params, Console(stderr=True))
    except KeyboardInterrupt:
        print(f"generate.py: interrupted; run it again to go on from {args.out}.partial", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError, OSError, ModelError) as error:
        print(f"generate.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace, prompts: list[Prompt], params: SamplingParams, console: Console) -> int:
    with StartupProgress(console) as starting:
        model, engine = open_engine(
            args.model, args.quant, args.mesh, kernels=args.kernels, embedding=args.embedding, draft=args.draft,
            shadow=args.shadow, progress=starting, kv=args.kv, slots=args.batch, max_queue=args.batch,
            logits=args.digest, state=state(args, default=None),
        )  # fmt: skip
    try:
        with ResumableRows(args.out, identity(args, model, engine)) as rows, bar(console) as progress:
            if rows.done:
                console.print(f"going on from {rows.partial}: {len(rows.done)} of {len(prompts)} prompts are done")
            spent = answer_all(args, prompts, params, model, engine, rows, progress)
            rows.finish()
    finally:
        engine.close()
    summarise(args.out, rows.done, *spent)
    return 1 if any("error" in row for row in rows.done.values()) else 0


def identity(args: argparse.Namespace, model: Model, engine: Engine) -> dict[str, Any]:
    """Everything that the answers depend on; a partial file of another identity is not continued."""
    return {
        "prompts": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
        "weights": model.weights_id,
        "numerics": engine.numerics_class,
        **{name: getattr(args, name) for name in (*SAMPLING, "stop", "limit", "all_turns", "shadow", "level", "lossy")},
        "think": str(args.think),
    }


def answer_all(
    args: argparse.Namespace,
    prompts: list[Prompt],
    params: SamplingParams,
    model: Model,
    engine: Engine,
    rows: ResumableRows,
    progress: Progress,
) -> tuple[int, float]:
    """Answer what is not yet in `rows`. Gives the tokens made and the seconds it took."""
    from umbra.serving.effort import EXACT, lossy_policies
    from umbra.serving.offline import OfflineRun, answer_row, preparer

    policies = lossy_policies(model) if args.lossy else EXACT
    prompt_of = preparer(model, engine.context_length, params, effort(args.level, args.think), policies)
    task = progress.add_task("generating", total=len(prompts), completed=len(rows.done), rate="")
    todo = [index for index in range(len(prompts)) if index not in rows.done]
    offline = OfflineRun(engine, prompt_of, prompts, in_flight=args.batch, all_turns=args.all_turns, only=todo)
    began = time.perf_counter()
    for index, answers in offline:
        row = answer_row(prompts[index], answers, all_turns=args.all_turns, digest=args.digest)
        rows.add(index, row)
        if "error" in row:
            progress.console.print(f"prompt {row['id']}: {row['error']}", style="red", highlight=False)
        advance(progress, task, offline.tokens / (time.perf_counter() - began))
    return offline.tokens, time.perf_counter() - began


def advance(progress: Progress, task: TaskID, tok_s: float) -> None:
    progress.update(task, advance=1, rate=f"{tok_s:.1f} tokens/s")


def bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"),
        TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip


def summarise(out: Path, rows: dict[int, dict[str, Any]], tokens: int, seconds: float) -> None:
    reasons = collections.Counter(row["finish_reason"] for row in rows.values())
    speeds = sorted(row["tok_s"] for row in rows.values() if row["tok_s"])
    print(f"{out}: {len(rows)} prompts ({', '.join(f'{n} {reason}' for reason, n in reasons.most_common())})")
    if tokens:
        one = f"; one stream: {speeds[len(speeds) // 2]:.1f} tokens/s (median)" if speeds else ""
        print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s{one}")


if __name__ == "__main__":
    sys.exit(main())
