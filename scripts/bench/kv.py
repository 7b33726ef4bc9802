"""What keeping KV in int8 costs: agreement, token by token, with an engine that keeps it in float32, and how much of
what stands somewhere in a long prompt is still found.

Both have the weights as they are served. The texts are answers of the one with float32; each system says at every token
what it would have chosen. A needle is a line of a long list that is asked for: it is found if every token of its value
is what the system would have chosen.
"""

from __future__ import annotations

import random
from typing import Any

from ...configs.prompt_sets import load_prompts
from .harness import Say
from .machine import machine
from .plan import Plan
from .processes import Workers
from .quality import WIDTH
from .report import Row, Summary, report
from .systems.base import Scores, Setup

EXACT = "float32"
SYSTEMS = {EXACT: "float32", "umbra": "int8"}
"""How each keeps its KV."""
LINE_TOKENS = 14
"""Of a line of the list, about."""

ADJECTIVES = (
    "red", "green", "blue", "grey", "old", "young", "small", "tall", "quiet", "quick", "brave", "clever", "gentle",
    "hungry", "lucky", "sleepy",
)  # fmt: skip
ANIMALS = (
    "fox", "owl", "bear", "crow", "deer", "frog", "goat", "hare", "lion", "mole", "otter", "seal", "swan", "tiger",
    "wolf", "horse", "mouse", "eagle", "camel", "whale",
)  # fmt: skip


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    scores: dict[str, list[Scores]] = {}
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    ids: list[list[int]] = []
    begins: list[int] = []
    for system, kv in SYSTEMS.items():
        with Workers(["umbra"]) as workers, workers["umbra"].turn() as worker:
            say(f"loading {plan.model}, KV in {kv}")
            worker.load(_setup(plan, kv))
            if not ids:
                say("answers")
                prompts = load_prompts(plan.prompts, limit=plan.limit)
                asked = worker.call("encode", [prompt.turns[0] for prompt in prompts])
                answers = worker.call("answers", asked, plan.max_tokens)
                hidden = worker.call("encode_answers", needles(plan.needles, plan.prompt_tokens))
                ids = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
                begins = list(map(len, asked))
                ids += [one for one, _ in hidden]
                begins += [begin for _, begin in hidden]
            say(f"{len(ids)} texts, KV in {kv}")
            scores[system] = worker.score(ids, begins)
            settings[system], versions = worker.settings, worker.versions
    rows = [_row(system, i, plan.limit, ids[i][begins[i] :], scores) for system in SYSTEMS for i in range(len(ids))]
    summary = {system: _summary([row for row in rows if row["system"] == system]) for system in SYSTEMS}
    return report(plan, before, versions, settings, rows, summary, of="agreement")


def needles(count: int, tokens: int) -> list[tuple[str, str, str]]:
    """Long questions, the beginning of each one's answer, and the value that must follow."""
    rng = random.Random(0)
    made = []
    for _ in range(count):
        names = [f"{adjective} {animal}" for adjective in ADJECTIVES for animal in ANIMALS]
        rng.shuffle(names)
        codes = {name: f"{rng.randrange(1000, 10000)}" for name in names[: max(2, tokens // LINE_TOKENS)]}
        lines = [f"The code of the {name} is {code}." for name, code in codes.items()]
        name = rng.choice(list(codes))
        text = "Remember these codes.\n" + "\n".join(lines) + f"\nWhat is the code of the {name}?"
        made.append((text, f"The code of the {name} is", f" {codes[name]}"))
    return made


def _setup(plan: Plan, kv: str) -> Setup:
    return Setup(
        plan.model, plan.quant, plan.threads, plan.mesh, WIDTH, 0, plan.kernels, kv, plan.embedding, logits=True
    )


def _row(system: str, i: int, prompts: int, text: list[int], scores: dict[str, list[Scores]]) -> Row:
    mine, exact = scores[system][i].top, scores[EXACT][i].top
    return {
        "system": system, "id": f"{i + 1}", "category": "needle" if i >= prompts else "answer", "tokens": len(text),
        "same_tokens": sum(a == b for a, b in zip(mine, exact, strict=True)), "found": mine == text, "tok_s": None,
        "ttft_ms": None, "tokens_per_pass": None,
    }  # fmt: skip


def _summary(rows: list[Row]) -> Summary:
    answers = [row for row in rows if row["category"] == "answer"]
    hidden = [row for row in rows if row["category"] == "needle"]
    tokens = sum(row["tokens"] for row in answers)
    return {
        "tokens": tokens,
        "agreement": 100.0 * sum(row["same_tokens"] for row in answers) / max(tokens, 1),
        "needles": len(hidden),
        "found_percent": 100.0 * sum(row["found"] for row in hidden) / max(len(hidden), 1),
    }
