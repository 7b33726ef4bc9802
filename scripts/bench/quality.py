"""What quantisation costs: agreement with the float32 model, and perplexity, on the float32 model's own answers.

The answers are greedy, from plain JAX with float32 weights of the same file. Then every system is given prompt and
answer, and says at each token of the answer what it would have chosen and how likely it held the answer's token. Ours
runs the programs that serve requests, in passes of several tokens, so that weights, activations and KV are as served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...configs.prompt_sets import Prompt, load_prompts
from .harness import Say, context_of
from .machine import machine
from .plan import Plan
from .processes import BenchError, Workers, gguf_path
from .report import Row, Summary, report
from .systems import is_ours
from .systems.base import Scores, Setup

PEERS = ("llama.cpp", "llama.cpp-q4_0")
"""Those that can score a given text."""

REFERENCE = "umbra-float32"
WIDTH = 32
"""Tokens of a scoring pass."""

Texts = tuple[list[Prompt], list[list[int]], list[int]]
"""Prompts that got an answer, prompt and answer as token ids, and where the answers begin."""


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    say("answers of the float32 model")
    with Workers([REFERENCE]) as workers, workers[REFERENCE].turn() as reference:
        reference.load(_setup(plan, REFERENCE))
        file = reference.call("gguf_file") if any(not is_ours(peer) for peer in plan.against) else None
        texts = _texts(plan, load_prompts(plan.prompts, limit=plan.limit), reference)
        scores = {REFERENCE: reference.score(texts[1], texts[2])}
        versions, settings = dict(reference.versions), {REFERENCE: reference.settings}
    for system in systems(plan):
        say(f"scores of {system}")
        with Workers([system]) as workers, workers[system].turn() as worker:
            if is_ours(system):
                worker.load(_setup(plan, system))
            else:
                longest = context_of(max(map(len, texts[1])))
                path = str(gguf_path(file, plan.model))
                worker.load(Setup(path, plan.quant, plan.threads, plan.mesh, 1, longest))
            scores[system] = worker.score(texts[1], texts[2])
            versions |= worker.versions
            settings[system] = worker.settings
    rows = [row for system in scores for row in _rows(system, texts, scores[system])]
    summary = {system: _summary([row for row in rows if row["system"] == system]) for system in scores}
    _compare(summary, settings)
    return report(plan, before, versions, settings, rows, summary, of="agreement")


def systems(plan: Plan) -> list[str]:
    """What is scored beside the reference: ours as asked for, ours in other forms, the peers."""
    return ["umbra", *(f"umbra-{variant}" for variant in plan.variants), *plan.against]


def _setup(plan: Plan, system: str) -> Setup:
    if system == REFERENCE:
        slots = max(WIDTH, plan.sequences)
        return Setup(plan.model, "none", plan.threads, plan.mesh, slots, 0, "xla", "float32", logits=True)
    quant, kv, embedding = plan.quant, plan.kv, plan.embedding
    if system != "umbra":
        quant, kv, embedding = form(system.removeprefix("umbra-"))
    return Setup(plan.model, quant, plan.threads, plan.mesh, WIDTH, 0, plan.kernels, kv, embedding, logits=True)


def form(variant: str) -> tuple[str, str, str]:
    """`QUANT`, `QUANT+kv=KV`, `QUANT+embedding=E` or both: what --quant, --kv and --embedding would say."""
    quant, *rest = variant.split("+")
    values = {"kv": "auto", "embedding": "file"}
    for part in rest:
        name, _, value = part.partition("=")
        if name not in values or not value:
            raise ValueError(f"--variants: {variant!r} is not understood; write for example int8+kv=float32")
        values[name] = value
    return quant, values["kv"], values["embedding"]


def _texts(plan: Plan, prompts: Sequence[Prompt], reference: Any) -> Texts:
    ids = reference.call("encode", [prompt.turns[0] for prompt in prompts])
    longest = max(map(len, ids)) + plan.max_tokens
    if longest > reference.settings["context"]:
        raise BenchError(f"a prompt and its answer need {longest} tokens, more than the context of {plan.model}")
    answers: list[list[int]] = []
    for first in range(0, len(ids), plan.sequences):
        answers += reference.call("answers", ids[first : first + plan.sequences], plan.max_tokens)
    kept = [i for i, answer in enumerate(answers) if answer]
    if not kept:
        raise BenchError(f"{plan.model} answers none of the prompts")
    return [prompts[i] for i in kept], [ids[i] + answers[i] for i in kept], [len(ids[i]) for i in kept]


def _rows(system: str, texts: Texts, scores: Sequence[Scores]) -> list[Row]:
    """A row per answer."""
    rows = []
    for prompt, ids, begin, one in zip(*texts, scores, strict=True):
        answer = ids[begin:]
        same = sum(top == token for top, token in zip(one.top, answer, strict=True))
        rows.append(
            {
                "system": system,
                "id": prompt.id,
                "category": prompt.category,
                "tokens": len(answer),
                "same_tokens": same,
                "nats": -sum(one.logprobs),
                "tok_s": None,
                "ttft_ms": None,
                "tokens_per_pass": None,
            }
        )
    return rows


def _summary(rows: Sequence[Row]) -> Summary:
    tokens = sum(row["tokens"] for row in rows)
    return {
        "tokens": tokens,
        "agreement": 100.0 * sum(row["same_tokens"] for row in rows) / tokens,
        "perplexity": math.exp(sum(row["nats"] for row in rows) / tokens),
    }


def _compare(summary: dict[str, Summary], settings: dict[str, Any]) -> None:
    """Add how far perplexity is from the reference's, in per cent, and what weights of ours weigh."""
    base = summary[REFERENCE]["perplexity"]
    for system, entry in summary.items():
        entry["perplexity_change"] = 100.0 * (entry["perplexity"] / base - 1.0)
        for key in ("weight_bytes", "embedding_bytes"):
            if key in settings[system]:
                entry[f"{key.removesuffix('_bytes')}_mb"] = settings[system][key] / 1e6
