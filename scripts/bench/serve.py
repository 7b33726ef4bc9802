"""The serving benchmark over HTTP: ours and a peer's server in turn. What is sent to them is a scenario: arrivals (open
loop, here), or one of scenarios.py."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...configs.prompt_sets import Prompt, load_prompts
from .arrivals import Arrival, poisson, trace
from .client import Outcome, Target, replay
from .harness import our_setup
from .machine import machine
from .plan import Plan
from .processes import BenchError, Workers, gguf_path
from .report import Row, Summary, median, percentile, report
from .servers import Server, empty_cache, our_server, peer_server

Say = Callable[[str], None]

SUPPORTED_PEERS = ("llama.cpp",)

WARM_UP = Arrival("warm-up", "warm-up", 0.0, "Say hello.", 4)

COMPILATIONS = "umbra_compilations_after_ready_total"


Measured = dict[str, list[Summary]]
"""Figures of every round, by system."""


@dataclasses.dataclass
class Session:
    """The servers under test, all stopped but the one whose turn it is."""

    plan: Plan
    before: dict[str, Any]
    described: dict[str, Any]
    servers: list[Server]
    targets: dict[str, Target]
    starts: dict[str, float | None]
    say: Say

    def turns(self) -> Iterator[tuple[int, Server, Target]]:
        """Every server once a round, with the number of the round; who begins changes from round to round."""
        for number in range(self.plan.rounds):
            shift = number % len(self.servers)
            for server in [*self.servers[shift:], *self.servers[:shift]]:
                self.say(f"round {number + 1} of {self.plan.rounds}: {server.system}")
                target = self.targets[server.system]
                with server.turn():
                    warm, _ = asyncio.run(replay(target, [WARM_UP], 1))
                    if warm[0].error:
                        raise BenchError(f"the server of {server.system} refused the first request: {warm[0].error}")
                    time.sleep(0.2)
                    yield number, server, target

    def report(self, rows: Sequence[Row], measured: Measured, of: str = "tok_s") -> dict[str, Any]:
        """The report of what was measured; called while the servers are there."""
        plan, described, ours = self.plan, self.described, self.servers[0]
        with ours.turn():
            self.starts["compilations_after_ready"] = ours.metric(COMPILATIONS)
        summary: dict[str, Summary] = {system: summary_of(rounds) for system, rounds in measured.items()}
        summary["umbra"] |= self.starts
        versions: dict[str, str] = described["versions"]
        settings: dict[str, Any] = {"umbra": {"slots": plan.sequences}}
        settings["umbra"] |= {key: described[key] for key in ("weights", "kernels", "instructions")}
        if plan.against:
            summary["llama.cpp"]["start_s"] = self.servers[1].start_s
            versions["llama-cpp-python"] = version("llama-cpp-python")
            settings["llama.cpp"] = {"weights": "as in the file", "n_ctx": described["context"]}
        return report(plan, self.before, versions, settings, rows, summary, of)


@contextlib.contextmanager
def session(plan: Plan, texts: Sequence[str], say: Say) -> Iterator[Session]:
    """Start the servers; `texts` are the messages that they will be sent."""
    before = machine()
    say("reading the model")
    described, ids = _describe(plan, texts)
    with contextlib.ExitStack() as stack:
        ours, starts = _start_ours(plan, stack, say)
        servers = [ours]
        if plan.against:
            say("starting llama.cpp's server")
            servers.append(peer_server(plan, gguf_path(described["gguf"], plan.model), described["context"]))
            stack.callback(servers[-1].close)
            servers[-1].suspend()
        targets = {}
        for server in servers:
            with server.turn():
                targets[server.system] = Target(server.url, server.model(), described["eos_ids"], ids)
        yield Session(plan, before, described, servers, targets, starts, say)


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    prompts = load_prompts(plan.prompts)
    arrivals = [_arrivals(plan, prompts, number) for number in range(plan.rounds)]
    rows: list[Row] = []
    measured: Measured = collections.defaultdict(list)
    with session(plan, [arrival.text for one_round in arrivals for arrival in one_round], say) as running:
        for number, server, target in running.turns():
            outcomes, seconds = asyncio.run(replay(target, arrivals[number], plan.sequences))
            rows += [row_of(server.system, number + 1, outcome) for outcome in outcomes]
            measured[server.system].append(round_figures(outcomes, seconds))
        return running.report(rows, measured)


def _arrivals(plan: Plan, prompts: Sequence[Prompt], number: int) -> list[Arrival]:
    if plan.trace is None:
        return poisson(prompts, plan.limit, plan.rate, plan.max_tokens, plan.seed, number)
    scales = {"time_scale": plan.time_scale, "length_scale": plan.length_scale}
    return trace(plan.trace, prompts, plan.limit, number, **scales)


def _describe(plan: Plan, texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[int]] | None]:
    """What must be known of the model to ask servers for it; token ids of the texts if it has no tokenizer."""
    with Workers(["umbra"]) as workers, workers["umbra"].turn() as ours:
        described = ours.describe(our_setup(plan))
        if described["has_tokenizer"]:
            return described, None
        texts = [WARM_UP.text, *texts]
        return described, dict(zip(texts, ours.call("encode", texts), strict=True))


def _start_ours(plan: Plan, stack: contextlib.ExitStack, say: Say) -> tuple[Server, dict[str, float | None]]:
    """Our server, stopped, and the seconds its starts took."""
    home: Path | None = None
    starts: dict[str, float | None] = {}
    if plan.starts == 2:
        home = stack.enter_context(empty_cache())
        say("starting our server for the first time, with nothing compiled")
        first = our_server(plan, home)
        first.close()
        starts["first_start_s"] = first.start_s
    say("starting our server")
    server = our_server(plan, home)
    stack.callback(server.close)
    server.suspend()
    starts["second_start_s" if plan.starts == 2 else "start_s"] = server.start_s
    return server, starts


def row_of(system: str, number: int, outcome: Outcome) -> Row:
    row: Row = {
        "system": system,
        "round": number,
        "id": outcome.arrival.id,
        "category": outcome.arrival.category,
        "arrival_s": outcome.arrival.at,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "tokens": outcome.tokens,
        "tok_s": outcome.tok_s,
        "ttft_ms": outcome.pieces[0] * 1e3 if outcome.pieces else None,
        "total_ms": outcome.end * 1e3,
        "tokens_per_pass": None,
    }
    return row if outcome.error is None else {**row, "error": outcome.error}


def round_figures(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    """Figures of one round. Requests that failed count as errors and in nothing else."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ttft = [outcome.pieces[0] * 1e3 for outcome in good if outcome.pieces]
    gaps = [gap * 1e3 for outcome in good for gap in outcome.gaps]
    return {
        "tok_s": sum(outcome.tokens for outcome in good) / seconds,
        "requests_s": len(good) / seconds,
        **{f"ttft{name}_ms": percentile(ttft, p) for name, p in (("", 50), ("_p90", 90), ("_p99", 99))},
        **{f"between{name}_ms": percentile(gaps, p) for name, p in (("", 50), ("_p90", 90), ("_p99", 99))},
        "errors": float(len(outcomes) - len(good)),
    }


def summary_of(rounds: Sequence[Summary]) -> Summary:
    """Medians over rounds; errors are added up."""
    figures: Summary = {figure: median(one[figure] for one in rounds) for figure in rounds[0] if figure != "errors"}
    return {**figures, "errors": int(sum(one["errors"] for one in rounds))}
