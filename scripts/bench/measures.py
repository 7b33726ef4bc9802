"""The single-process benchmarks: which sequences are run together, and which row of figures comes of it."""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from ...configs.prompt_sets import Prompt
from .plan import MIN_TOKENS, Plan
from .report import percentile
from .systems.base import Run, Stream


@dataclasses.dataclass(frozen=True)
class Job:
    """Sequences that are run in one call, and how they are named in the rows."""

    id: str
    category: str
    prompts: list[list[int]]  # token ids
    max_tokens: int


class Measure(abc.ABC):
    """One benchmark. `sequences` is how many sequences a call has at most."""

    whole_file = False
    """Whether prompts beyond `--limit` are used too, so that rounds differ."""

    def __init__(self, plan: Plan, prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> None:
        self.plan, self.prompts, self.ids = plan, prompts, ids

    @abc.abstractmethod
    def jobs(self, round_number: int) -> list[Job]:
        """What every system runs in this round; round -1 is the warm-up."""

    @abc.abstractmethod
    def row(self, job: Job, run: Run) -> dict[str, Any]:
        """The figures of one call."""

    def context(self) -> int:
        """Tokens of the longest sequence, prompt and continuation."""
        jobs = [job for number in range(self.plan.rounds) for job in self.jobs(number)]
        return max(len(ids) + job.max_tokens for job in jobs for ids in job.prompts)


class Decode(Measure):
    """One stream at a time: tokens after the first emission over the time after it."""

    def jobs(self, round_number: int) -> list[Job]:
        jobs = [
            Job(prompt.id, prompt.category, [ids], self.plan.max_tokens)
            for prompt, ids in zip(self.prompts, self.ids, strict=True)
        ]
        return jobs if round_number >= 0 else [_warm_up(jobs[0])]

    def row(self, job: Job, run: Run) -> dict[str, Any]:
        stream = run.streams[0]
        tokens = len(stream.token_ids)
        return {
            "prompt_tokens": stream.prompt_tokens,
            "cached_tokens": stream.cached_tokens,
            "tokens": tokens,
            "passes": stream.passes or tokens,
            "decode_s": stream.last - stream.ttft,
            "tok_s": stream.tok_s,
            "ttft_ms": stream.ttft * 1e3,
            "between_p50_ms": percentile(stream.gaps, 50, 1e3),
            "between_p99_ms": percentile(stream.gaps, 99, 1e3),
            "tokens_per_pass": _tokens_per_pass([stream]),
            "repeats": repeats(stream.token_ids),
            "answer_tok_s": stream.answer_tok_s,
            **_answer(stream),
            **({"short": True} if tokens < MIN_TOKENS else {}),
        }


class Prefill(Measure):
    """One prompt of a given length at a time: prompt tokens over the time to the first token.

    Prompts are cut out of the prompt set's tokens, put end to end, each at another place, so that none begins like one
    that was run before and no prefix can be reused.
    """

    whole_file = True
    STRIDE = 61  # a prime: starts repeat only after a whole turn

    def jobs(self, round_number: int) -> list[Job]:
        flat = [token for ids in self.ids for token in ids]
        per_round = self.plan.limit if round_number >= 0 else 1
        begins = [((round_number + 1) * self.plan.limit + i) * self.STRIDE % len(flat) for i in range(per_round)]
        laps = -(-self.plan.prompt_tokens // len(flat)) + 1
        windows = [(flat * laps)[begin : begin + self.plan.prompt_tokens] for begin in begins]
        return [Job(f"{len(w)}@{b}", "prefill", [w], 1) for b, w in zip(begins, windows, strict=True)]

    def row(self, job: Job, run: Run) -> dict[str, Any]:
        stream = run.streams[0]
        return {
            "prompt_tokens": stream.prompt_tokens,
            "cached_tokens": stream.cached_tokens,
            "tokens": len(stream.token_ids),
            "tok_s": (stream.prompt_tokens - stream.cached_tokens) / stream.ttft,
            "ttft_ms": stream.ttft * 1e3,
            "tokens_per_pass": _tokens_per_pass([stream]),
        }


class Batch(Measure):
    """Several streams at once: all output tokens over wall time, prompts included; and, as `decode_tok_s`, while all
    of them decode: from the first token of the last to begin to the last token of the first to end.

    A round goes on in the prompt file where the one before ended, so that no prompt is found in a cache before all
    were used.
    """

    whole_file = True

    def jobs(self, round_number: int) -> list[Job]:
        n = self.plan.sequences
        count = max(1, self.plan.limit // n)
        begin = max(0, round_number) * count * n
        groups = [[self.ids[(begin + g * n + i) % len(self.ids)] for i in range(n)] for g in range(count)]
        jobs = [Job(f"batch-{g + 1}", "mixed", group, self.plan.max_tokens) for g, group in enumerate(groups)]
        return jobs if round_number >= 0 else [_warm_up(jobs[0])]

    def row(self, job: Job, run: Run) -> dict[str, Any]:
        tokens = sum(len(stream.token_ids) for stream in run.streams)
        all_started = max(stream.ttft for stream in run.streams)
        one_ended = min(stream.last for stream in run.streams)
        together = sum(_tokens_within(stream, all_started, one_ended) for stream in run.streams)
        return {
            "sequences": len(run.streams),
            "prompt_tokens": sum(stream.prompt_tokens for stream in run.streams),
            "cached_tokens": sum(stream.cached_tokens for stream in run.streams),
            "tokens": tokens,
            "tok_s": tokens / run.seconds,
            "decode_tok_s": together / (one_ended - all_started) if one_ended > all_started else None,
            "ttft_ms": statistics.median(stream.ttft for stream in run.streams) * 1e3,
            "tokens_per_pass": _tokens_per_pass(run.streams),
        }


def _warm_up(job: Job) -> Job:
    """A short run of the same shape. Prompts are reversed, so that nothing of the job itself is cached afterwards."""
    return Job("warm-up", job.category, [ids[::-1] for ids in job.prompts], min(8, job.max_tokens))


class Flat(Decode):
    """One long stream at a time: tokens/s over windows of it, once the first tokens are out."""

    SKIPPED, WINDOW = 200, 100

    def row(self, job: Job, run: Run) -> dict[str, Any]:
        return {**super().row(job, run), "windows": windows(run.streams[0], self.SKIPPED, self.WINDOW)}


MEASURES: dict[str, type[Measure]] = {"decode": Decode, "prefill": Prefill, "batch": Batch, "flat": Flat}


def repeats(ids: Sequence[int], length: int = 8, times: int = 3) -> bool:
    """Whether some sequence of `length` tokens occurs `times` times or more: text that goes round in circles, which
    flatters every drafter. Figures are given without such answers too."""
    seen = collections.Counter(tuple(ids[i : i + length]) for i in range(len(ids) - length + 1))
    return max(seen.values(), default=0) >= times


def windows(stream: Stream, skipped: int, window: int) -> list[dict[str, float]]:
    """Tokens/s of each whole window of about `window` tokens after the first `skipped`: from the emission that
    completes one window to the emission that completes the next. `at` is the position in the middle."""
    times = itertools.accumulate(stream.gaps, initial=stream.ttft)
    reached = list(zip(itertools.accumulate(stream.emitted), times, strict=True))
    made: list[dict[str, float]] = []
    begin, wanted = None, skipped
    for tokens, when in reached:
        if tokens < wanted:
            continue
        if begin is not None:
            middle = stream.prompt_tokens + (begin[0] + tokens) / 2
            made.append({"at": middle, "tok_s": (tokens - begin[0]) / (when - begin[1])})
        begin, wanted = (tokens, when), wanted + window
    return made


def _answer(stream: Stream) -> dict[str, Any]:
    """The stream up to where the model would have ended it."""
    if stream.answer is None or stream.answer_passes is None:
        return {}
    return {
        "answer_tokens": stream.answer,
        "answer_passes": stream.answer_passes,
        "answer_tokens_per_pass": stream.answer / stream.answer_passes,
        "answer_repeats": repeats(stream.token_ids[: stream.answer]),
    }


def _tokens_per_pass(streams: Sequence[Stream]) -> float:
    tokens = sum(len(stream.token_ids) for stream in streams)
    passes = sum(stream.passes or len(stream.token_ids) for stream in streams)
    return tokens / passes if passes else 1.0


def _tokens_within(stream: Stream, begin: float, end: float) -> int:
    """Tokens that came behind `begin`, until `end`."""
    times = itertools.accumulate(stream.gaps, initial=stream.ttft)
    emitted = stream.emitted or [stream.first_tokens, *[1] * len(stream.gaps)]
    return sum(n for n, when in zip(emitted, times, strict=True) if begin < when <= end + 1e-6)
