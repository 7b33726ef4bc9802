"""Whether an answer depends on what it must not depend on: drafts, batch mates, chunks, widths, tables, threads, runs.

Every request is answered alone and without drafts first. Then ids and digests of all raw logits are compared with those
of other settings, drafting or not, and with passes of W tokens: the answers are read W tokens at a time, as drafts are
verified, and every row of logits must be that which chose the token when it was made, one at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...configs.prompt_sets import load_prompts
from .harness import Say, our_setup, told
from .machine import machine
from .plan import Plan
from .processes import BenchError, Workers
from .report import Row, report
from .systems.exact import Sizes

ALONE = Sizes("alone")
OTHERS = (
    Sizes("alone, again"),
    Sizes("16 at once", slots=16),
    Sizes("5 at once, chunks of 48, 1 thread", slots=5, chunk=48, threads=1),
    Sizes("16 at once, chunks of 300, 4 threads", slots=16, chunk=300, threads=4),
    Sizes("alone, a table of 8,192 tokens, 3 threads", context=8192, threads=3),
)
DRAFTING = (
    Sizes("alone, drafting", draft="auto"),
    Sizes("16 at once, drafting", slots=16, draft="auto"),
    Sizes("5 at once, chunks of 48, 1 thread, drafting", slots=5, chunk=48, threads=1, draft="auto"),
)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 24, 31, 32)


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Compare, and give the report; its `differences` say what was not the same (None: everything was)."""
    before = machine()
    with Workers(["exact/umbra"]) as workers, workers["exact/umbra"].turn() as worker:
        say("loading umbra")
        worker.load(our_setup(plan))
        asked = load_prompts(plan.prompts, limit=plan.limit)
        prompts = _prompts(plan, worker.call("encode", [prompt.turns[0] for prompt in asked]))
        say(f"{len(prompts)} requests, {ALONE.name}")
        expected = worker.call("complete", dataclasses.asdict(ALONE), prompts, plan.max_tokens)
        rows: list[Row] = []
        for sizes in (*(() if plan.drafting_only else OTHERS), *drafting(worker.call("sources"))):
            say(sizes.name)
            got = worker.call("complete", dataclasses.asdict(sizes), prompts, plan.max_tokens)
            row = _row(sizes.name, got["ids"], expected["ids"], got["digests"], expected["digests"])
            rows.append({**row, "tokens_per_pass": sum(map(len, got["ids"])) / got["passes"]})
        if not plan.drafting_only:
            say("passes of several tokens")
            texts = [[*ids, *answer] for ids, answer in zip(prompts, expected["ids"], strict=True)]
            read = worker.call("read", WIDTHS, texts, [len(ids) for ids in prompts])
            rows += [_row(f"passes of {w}", [], [], made, expected["digests"]) for w, made in read.items()]
        versions, settings = told(workers)
    settings["exact/umbra"]["numerics"] = expected["numerics"]
    different = [row["category"] for row in rows if not row["identical"]]
    summary = {
        "umbra": {
            "requests": len(prompts),
            "settings": len(rows),
            "rows_of_logits": sum(map(len, expected["digests"])),
            "identical": len(rows) - len(different),
        }
    }
    content = report(plan, before, versions, {"umbra": settings["exact/umbra"]}, rows, summary)
    return {**content, "differences": "; ".join(different) or None}


def drafting(sources: list[str]) -> list[Sizes]:
    """Settings that draft: from all sources together, and from each alone if there are several."""
    alone = [Sizes(f"alone, drafting by {source}", draft=source) for source in sources if len(sources) > 1]
    return [*DRAFTING, *alone]


def _prompts(plan: Plan, encoded: list[list[int]]) -> list[list[int]]:
    """Every prompt twice, for a greedy and a seeded answer; cut to what leaves room for one."""
    room = ALONE.context - plan.max_tokens - 1
    if room < 1:
        raise BenchError(f"answers of {plan.max_tokens} tokens do not fit a context of {ALONE.context}")
    return [ids[:room] for ids in encoded for _ in range(2)]


def _row(name: str, ids: Any, expected_ids: Any, digests: Any, expected: Any) -> Row:
    """How much is the same. Without ids (nothing was chosen) only logits are compared."""
    pairs = [pair for got, want in zip(digests, expected, strict=True) for pair in zip(got, want, strict=True)]
    same_ids = sum(got == want for got, want in zip(ids, expected_ids, strict=True))
    same_logits = sum(got == want for got, want in pairs)
    return {
        "system": "umbra",
        "category": name,
        "answers": len(ids),
        "same_ids": same_ids,
        "logits": len(pairs),
        "same_logits": same_logits,
        "identical": same_ids == len(ids) and same_logits == len(pairs),
        "tok_s": None,
        "ttft_ms": None,
        "tokens_per_pass": None,
    }
