"""What may be lost, measured and bounded: subsets of layers (`skips`) and relaxed acceptance (`relax`).

Both answer prompts with the model itself and count tokens that the whole trunk alone would not have chosen, per prompt;
model/calibration.py turns that into bounds. With `--save` the result is written where the program looks for it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...configs.files import write_text
from ...configs.levels import RELAXED
from ...configs.prompt_sets import Prompt, load_prompts
from ...model.calibration import CONFIDENCE, TARGET, Tested, fixed_sequence, last_passed
from .harness import Say, our_setup, told
from .machine import machine
from .plan import Plan
from .processes import BenchError, Worker, Workers
from .report import Row, report
from .systems.levels import Way

SYSTEM = "levels/umbra"
SEED = 1_000_003
"""Of built-in prompts."""
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
"""Margins of relaxed acceptance that are tried, in nats."""


def skips(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure layers and subsets of them, on the model's own greedy answers."""
    before = machine()
    with Workers([SYSTEM]) as workers, workers[SYSTEM].turn() as worker:
        prompts = _prompts(plan, worker, say)
        say("answers")
        answers = _answers(plan, worker, Way("umbra", draft="off"), prompts)
        texts = [([*ids, *answer], len(ids)) for ids, answer in zip(prompts, answers, strict=True)]
        say("layers and subsets")
        made = worker.call("measure_skips", texts, plan.save)
        versions, settings = told(workers)
    n = len(made["contributions"])
    rows: list[Row] = [
        {"system": "umbra", "category": f"{len(subset['layers'])} layers", **_blank(), **subset}
        for subset in made["subsets"]
    ]
    passed = [len(subset["layers"]) for subset in made["subsets"] if subset["passed"]]
    summary = {
        "umbra": {
            "prompts": made["prompts"],
            "tokens": made["tokens"],
            "target": made["target"],
            "confidence": made["confidence"],
            "allowed_layers": min(passed, default=n),
            **{f"loss_{len(s['layers'])}_layers": s["loss"] for s in made["subsets"]},
        }
    }
    content = report(plan, before, versions, {"umbra": settings[SYSTEM]}, rows, summary)
    return {**content, "contributions": made["contributions"]}


def relax(plan: Plan, say: Say) -> dict[str, Any]:
    """Calibrate the margin of relaxed acceptance: the largest that keeps within the target. The first one that does not
    is the last that is tried."""
    before = machine()
    with Workers([SYSTEM]) as workers, workers[SYSTEM].turn() as worker:
        prompts = _prompts(plan, worker, say)
        losses = []
        for margin in MARGINS:
            say(f"margin {margin:g}")
            answers = _answers(plan, worker, Way("umbra", relax=margin), prompts)
            losses.append(_losses(worker, prompts, answers))
            if not fixed_sequence(losses)[-1].passed:
                break  # bolder ones are not looked at
        versions, settings = told(workers)
        trunk = worker.call("trunk_name")
    tested = fixed_sequence(losses)
    chosen = last_passed(tested)
    if plan.save:
        text = json.dumps(relaxed(settings[SYSTEM], len(prompts), tested), indent=1) + "\n"
        write_text(RELAXED / f"{trunk}.json", text)
    rows: list[Row] = [
        {"system": "umbra", "category": f"margin {margin:g}", **_blank(), "margin": margin, **dataclasses.asdict(one)}
        for margin, one in zip(MARGINS, tested, strict=False)
    ]
    summary = {
        "umbra": {
            "prompts": len(prompts),
            "target": TARGET,
            "confidence": CONFIDENCE,
            "margin": 0.0 if chosen is None else MARGINS[chosen],
            **{f"loss_{margin:g}": one.loss for margin, one in zip(MARGINS, tested, strict=False)},
        }
    }
    return report(plan, before, versions, {"umbra": settings[SYSTEM]}, rows, summary)


def relaxed(settings: Mapping[str, Any], prompts: int, tested: Sequence[Tested]) -> dict[str, Any]:
    """What configs/levels.py reads: the boldest margin that passed (0: none did) and its bound, and how all did."""
    chosen = last_passed(tested)
    grid = [{"margin": m, **dataclasses.asdict(one)} for m, one in zip(MARGINS, tested, strict=False)]
    return {
        "weights_id": settings["weights_id"],
        "shadow_id": settings["shadow_id"],
        "margin": 0.0 if chosen is None else MARGINS[chosen],
        "bound": 0.0 if chosen is None else round(tested[chosen].bound, 6),
        "confidence": CONFIDENCE,
        "target": TARGET,
        "prompts": prompts,
        "grid": [{key: round(value, 6) if key != "passed" else value for key, value in one.items()} for one in grid],
    }


def _prompts(plan: Plan, worker: Worker, say: Say) -> list[list[int]]:
    say("loading umbra")
    worker.load(our_setup(plan))
    asked = _built_in(plan.limit) if plan.built_in else load_prompts(plan.prompts, limit=plan.limit)
    room = worker.settings["context"] - plan.max_tokens
    if room < 1:
        raise BenchError(f"answers of {plan.max_tokens} tokens do not fit a context of {worker.settings['context']}")
    ids = [ids for ids in worker.call("encode", [prompt.turns[0] for prompt in asked]) if len(ids) <= room]
    if not ids:
        raise BenchError(f"no prompt of {plan.prompts} fits a context of {worker.settings['context']}")
    return ids


def _built_in(n: int) -> list[Prompt]:
    """The first of the built-in prompts of a seed that no shadow is trained with."""
    from ...model.training.prompts import Material, build_prompts

    return build_prompts(2 * n, SEED, Material())[:n]


def _answers(plan: Plan, worker: Worker, way: Way, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers: list[list[int]] = []
    for first in range(0, len(prompts), plan.sequences):
        part = prompts[first : first + plan.sequences]
        answers += worker.call("answers_of", dataclasses.asdict(way), part, plan.max_tokens)
    return answers


def _losses(worker: Worker, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """Per prompt: the share of the answer's tokens that the trunk alone would not have chosen there."""
    texts = [([*ids, *answer], len(ids)) for ids, answer in zip(prompts, answers, strict=True)]
    alone = worker.call("choices", texts)
    return [
        sum(a != b for a, b in zip(answer, chosen, strict=True)) / len(answer)
        for answer, chosen in zip(answers, alone, strict=True)
    ]


def _blank() -> dict[str, None]:
    """The figures that every row of a report names."""
    return {"tok_s": None, "ttft_ms": None, "tokens_per_pass": None}
