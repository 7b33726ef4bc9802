"""What `bench.py serve --scenario` sends, beside arrivals:

- concurrent: so many clients that each ask their next question when the last one is answered (closed loop);
- questions: short questions of 5, 10 and 20 words to an idle server that knows the system prompt;
- overhead: the same token ids to the engine as a library and to the server;
- events: one client of a server whose engine is a source as fast as one likes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

from ...configs.prompt_sets import Prompt, load_prompts
from .arrivals import Arrival
from .client import Target, replay
from .harness import our_setup
from .machine import machine
from .plan import Plan
from .processes import Workers
from .report import Row, Summary, median, percentile, report
from .serve import Measured, Say, round_figures, row_of, session, summary_of
from .servers import Server, our_server
from .wire import Stream, streams

SYSTEM_PROMPT = (
    "You are a helpful assistant. Answer briefly and truthfully, in plain words, and ask when in doubt. " * 8
)

WORDS = (5, 10, 20)
"""Words of the questions."""

QUESTION = "please tell me about the most interesting one that you know and why people who live there like it so much"
TOPICS = (
    "river", "castle", "bird", "song", "island", "tree", "bridge", "story", "painting", "market", "mountain", "road",
    "garden", "library", "harbour", "desert", "valley", "machine", "letter", "festival",
)  # fmt: skip


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    return {"concurrent": concurrent, "questions": questions, "overhead": overhead, "events": events}[plan.scenario](
        plan, say
    )


# ---- concurrent


def concurrent(plan: Plan, say: Say) -> dict[str, Any]:
    """Figures are named by the number of clients: `ttft_p95_ms@16`."""
    prompts = load_prompts(plan.prompts)
    rows: list[Row] = []
    measured: Measured = collections.defaultdict(list)
    with session(plan, [prompt.turns[0] for prompt in prompts], say) as running:
        for number, server, target in running.turns():
            figures: Summary = {"errors": 0.0}
            for clients in plan.clients:
                running.say(f"round {number + 1}: {server.system}, {clients} clients")
                made, some = _closed(plan, target, server, prompts, number, clients)
                rows += made
                figures["errors"] += some.pop("errors")
                figures |= {f"{name}@{clients}": value for name, value in some.items()}
            figures["tok_s"] = figures[f"tok_s@{plan.clients[-1]}"]
            measured[server.system].append(figures)
        return running.report(rows, measured)


def _closed(
    plan: Plan, target: Target, server: Server, prompts: Sequence[Prompt], number: int, clients: int
) -> tuple[list[Row], Summary]:
    """Every client asks at once, and again when it is answered: `replay` holds requests back until one has ended, and
    counts their time from then on."""
    count = max(plan.limit, 2 * clients)
    first = number * count
    arrivals = [
        Arrival(f"{clients}/{i + 1}:{prompt.id}", prompt.category, 0.0, prompt.turns[0], plan.max_tokens)
        for i, prompt in ((i, prompts[(first + i) % len(prompts)]) for i in range(count))
    ]
    outcomes, seconds = asyncio.run(replay(target, arrivals, clients, closed=True))
    figures = round_figures(outcomes, seconds)
    ttft = [outcome.pieces[0] * 1e3 for outcome in outcomes if outcome.error is None and outcome.pieces]
    figures["ttft_p95_ms"] = percentile(ttft, 95)
    return [{**row_of(server.system, number + 1, one), "clients": clients} for one in outcomes], figures


# ---- questions


def questions(plan: Plan, say: Say) -> dict[str, Any]:
    """Time to the first token of one request at a time. `flat` is the slowest length over the fastest."""
    asked = {words: [_question(words, i) for i in range(plan.limit)] for words in WORDS}
    rows: list[Row] = []
    measured: Measured = collections.defaultdict(list)
    with session(plan, [text for texts in asked.values() for text in texts], say) as running:
        for number, server, target in running.turns():
            made = _ask(plan, target, server, asked, number)
            rows += made
            by_words = {words: [row["ttft_ms"] for row in made if row["words"] == words] for words in WORDS}
            figures: Summary = {f"ttft_ms@{words}": median(values) for words, values in by_words.items()}
            times = [value for value in figures.values() if value]
            figures |= {"flat": max(times) / min(times) if times else None, "ttft_ms": median(times)}
            figures["tok_s"] = median(row["tok_s"] for row in made)
            measured[server.system].append({**figures, "errors": 0.0})
        return running.report(rows, measured, "ttft_ms")


def _question(words: int, i: int) -> str:
    """A question of so many words; others for other `i`, from the first words on."""
    topic = TOPICS[i % len(TOPICS)] + ("" if i < len(TOPICS) else f" {i // len(TOPICS)}")
    text = [*topic.split(), *QUESTION.split()]
    return " ".join(text[:words]).capitalize() + "?"


def _ask(plan: Plan, target: Target, server: Server, asked: dict[int, list[str]], number: int) -> list[Row]:
    """By a client that costs next to nothing: on the server's own cores another one takes as long as some steps."""
    rows: list[Row] = []

    def ask(text: str, max_tokens: int) -> Stream:
        path, body = target.request(Arrival("", "", 0.0, text, max_tokens), f"[{number}] {SYSTEM_PROMPT}")
        (made,), _ = streams(target.url, path, [body])
        return made

    ask("Hello.", 2)
    for i in range(plan.limit):
        for words, texts in asked.items():
            made = ask(texts[i], plan.max_tokens)
            figures = {
                "ttft_ms": None if made.first is None else made.first * 1e3,
                "tok_s": made.tok_s,
                "tokens": made.tokens,
            }
            rows.append({"system": server.system, "round": number + 1, "id": f"{words}/{i + 1}", **figures})
            rows[-1] |= {"category": f"{words} words", "words": words}
    return rows


# ---- overhead


def overhead(plan: Plan, say: Say) -> dict[str, Any]:
    """Our server against our engine: `tok_s@32` with 32 streams at once. Systems are `umbra` (the server) and
    `engine`."""
    before, most, rng = machine(), max(plan.clients), random.Random(plan.seed)
    prompts = load_prompts(plan.prompts)
    rows: list[Row] = []
    measured: Measured = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        say("loading the engine")
        workers = stack.enter_context(Workers(["umbra"]))
        engine = workers["umbra"]
        with engine.turn():
            engine.load(our_setup(_with_slots(plan, most)))
            ids = engine.call("encode", [prompt.turns[0] for prompt in prompts])
        say("starting the server")
        server = our_server(_with_slots(plan, most), None)
        stack.callback(server.close)
        model = server.model()
        server.suspend()
        for number in range(-1, plan.rounds):  # the first is not counted
            turn: dict[str, Summary] = {"engine": {}, "umbra": {}}
            for clients in plan.clients:
                say(f"round {number + 1} of {plan.rounds}: {clients} streams")
                chosen = [_unknown(ids[(i + number * clients) % len(ids)], rng) for i in range(clients)]
                with engine.turn():
                    run = engine.generate(chosen, plan.max_tokens)
                turn["engine"] |= _figures(clients, [one.ttft for one in run.streams], plan.max_tokens, run.seconds)
                with server.turn():
                    made, seconds = streams(server.url, "/v1/completions", _bodies(model, chosen, plan.max_tokens))
                turn["umbra"] |= _figures(clients, [one.first for one in made], plan.max_tokens, seconds)
            if number >= 0:
                for system, figures in turn.items():
                    measured[system].append({**figures, "tok_s": figures[f"tok_s@{most}"], "errors": 0.0})
                    rows.append({"system": system, "round": number + 1, "id": f"round {number + 1}", **figures})
    summary = {system: summary_of(measured[system]) for system in ("umbra", "engine")}
    first = f"ttft_ms@{plan.clients[0]}"
    summary["umbra"]["ttft_more_ms"] = (summary["umbra"][first] or 0) - (summary["engine"][first] or 0)
    return report(plan, before, engine.versions, {"engine": engine.settings}, rows, summary)


def _unknown(ids: Sequence[int], rng: random.Random) -> list[int]:
    """A prompt of which neither the engine nor the server has the beginning: a part of it comes first, reordered."""
    start = list(ids[:8])
    rng.shuffle(start)
    return [*start, *ids]


def _with_slots(plan: Plan, slots: int) -> Plan:
    return dataclasses.replace(plan, sequences=slots)


def _bodies(model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
    shared = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return [{**shared, "prompt": list(prompt)} for prompt in prompts]


def _figures(clients: int, first: Sequence[float | None], tokens: int, seconds: float) -> Summary:
    return {
        f"tok_s@{clients}": clients * tokens / seconds,
        f"ttft_ms@{clients}": (median(first) or 0.0) * 1e3,
    }


# ---- events


def events(plan: Plan, say: Say) -> dict[str, Any]:
    """Tokens and events a second that one client gets of a source that makes `--rate` tokens a second."""
    before = machine()
    rows: list[Row] = []
    figures: list[Summary] = []
    command = [sys.executable, "-m", "umbra.scripts.bench.fast_source", f"{plan.rate:g}"]
    server = Server("umbra", command, dict(os.environ), None)
    try:
        body = {"model": server.model(), "prompt": [1], "max_tokens": plan.max_tokens}
        streams(server.url, "/v1/completions", [{**body, "max_tokens": 100}])
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            (made,), seconds = streams(server.url, "/v1/completions", [body])
            figures.append(_rates(made, seconds))
            rows.append({"system": "umbra", "round": number + 1, "id": f"round {number + 1}", **figures[-1]})
    finally:
        server.close()
    return report(plan, before, {}, {"umbra": {"source": plan.rate}}, rows, {"umbra": summary_of(figures)})


def _rates(made: Stream, seconds: float) -> Summary:
    return {
        "tok_s": made.tokens / seconds,
        "events_s": made.events_s,
        "ttft_ms": None if made.first is None else made.first * 1e3,
        "errors": 0.0,
    }
