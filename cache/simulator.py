"""A discrete-event simulation of serving with tiers: what a request waits for, on a machine that need not be there.

Time goes from step to step, as in the engine: requests wait for a slot; their blocks are looked up in all tiers when
they arrive and brought up while they wait; a step computes a chunk of prompts and one token of every running answer.

    step       = max(floor, tokens / compute) + bytes of KV that decoding reads / device bandwidth
    transfer   = latency + blocks * overhead + bytes / bandwidth; a tier moves one request's blocks after another's

Results of profiles that were not measured on the machine they name are simulated, and must be shown as such.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .policies import LRU, LRU2, S3FIFO, Policy
from .replay import TierModel
from .traces import TracedRequest

GB = 1e9


@dataclass(frozen=True)
class TierProfile:
    """A place for blocks. Times are seconds, bandwidth bytes a second."""

    name: str
    capacity: float
    """Bytes."""
    latency: float
    bandwidth: float
    overhead: float = 0.0
    """Of one block: dispatch, verification."""

    def seconds(self, blocks: int, nbytes: float) -> float:
        """How long the tier is busy with `blocks` blocks."""
        return blocks * self.overhead + nbytes / self.bandwidth


@dataclass(frozen=True)
class Profile:
    """A machine with a model on it."""

    name: str
    tiers: tuple[TierProfile, ...]
    """The device first."""
    kv_bytes: float
    """Of a token, all layers."""
    compute: float
    """Prompt tokens a second, when there are many."""
    floor: float
    """Seconds of a step with one token: reading the weights."""
    attention: float = 0.0
    """Seconds more per prompt token and token before it."""
    slots: int = 16
    chunk: int = 128
    margin: float = 1.3
    measured: bool = False
    """Whether its numbers were measured on the machine it names."""

    def step_seconds(self, prompt: int, context: int, answers: int, held: int) -> float:
        """A step with `prompt` prompt tokens at position `context`, and `answers` answers that hold `held` tokens."""
        work = (prompt + answers) / self.compute + prompt * (context + prompt / 2) * self.attention
        return max(self.floor, work) + held * self.kv_bytes / self.tiers[0].bandwidth

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Computing `tokens` of a prompt behind `context` others, alone."""
        seconds, done = 0.0, 0
        while done < tokens:
            part = min(self.chunk, tokens - done)
            seconds += self.step_seconds(part, context + done, 0, 0)
            done += part
        return seconds


def fitted(
    name: str,
    prefills: Sequence[tuple[int, int, float]],
    *,
    step: float,
    kv_bytes: float,
    tiers: tuple[TierProfile, ...],
    slots: int = 16,
    chunk: int = 128,
) -> Profile:
    """A profile of what was measured on a machine.

    Args:
        name: of the machine.
        prefills: (tokens before, prompt tokens, seconds), at least two of different size.
        step: seconds of a step with one token.
        kv_bytes: of a token.
        tiers: as measured, the device first.
        slots, chunk: the engine's.

    Compute and attention are those whose relative errors have the least squares.
    """
    rows = np.array([(tokens, tokens * (before + tokens / 2)) for before, tokens, _ in prefills], float)
    seconds = np.array([taken for *_, taken in prefills])
    (per_token, per_pair), *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(seconds)), rcond=None)
    if per_token <= 0:
        raise ValueError("these prefills do not tell the time of a token; measure them at more lengths")
    return Profile(name, tiers, kv_bytes, 1 / per_token, step, max(per_pair, 0.0), slots, chunk, measured=True)


# For smollm2 (135M parameters in 16 bits, int8 KV). Memory sizes, bandwidths and compute of the chips are data-sheet
# figures, of which prompts reach 40 %; 16 GB/s is a PCIe link, 2.2 GB/s a local SSD, 12 GB/s and 0.3 ms a data-centre
# network. `design` has the latencies that the tiers were designed for, on the same chip.
_KV_BYTES = 30 * 3 * (128 + 4)
_PARAMETERS = 134.5e6
_MEMORY = TierProfile("memory", 64 * GB, 20e-6, 16 * GB, 5e-6)
_DISK = TierProfile("disk", 1000 * GB, 100e-6, 2.2 * GB, 50e-6)
_OBJECTS = TierProfile("objects", 100_000 * GB, 300e-6, 12 * GB, 50e-6)


def _chip(name: str, hbm: float, memory: float, peak: float, *below: TierProfile, latency: float = 1e-6) -> Profile:
    device = TierProfile("device", memory - 4 * _PARAMETERS, latency, hbm)
    step = 2 * _PARAMETERS / hbm + 20e-6
    return Profile(name, (device, *below), _KV_BYTES, 0.4 * peak / (2 * _PARAMETERS), step, chunk=1024)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _chip("v5e", 820 * GB, 17.2 * GB, 197e12, _MEMORY, _DISK),
        _chip("v6e", 1640 * GB, 34.4 * GB, 920e12, _MEMORY, _DISK),
        _chip("pool", 820 * GB, 17.2 * GB, 197e12, _MEMORY, _OBJECTS),
        _chip(
            "design", 820 * GB, 17.2 * GB, 197e12, _MEMORY, dataclasses.replace(_DISK, latency=1.2e-3), latency=150e-9
        ),
    )
}


@dataclass
class Outcome:
    """What became of one request. Times in seconds."""

    arrived: float
    ttft: float = 0.0
    finished: float = 0.0
    load: float = 0.0
    """From arrival until its blocks were on the device."""
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens by the tier they came from."""
    recomputed: int = 0
    """Tokens that a tier had, but that were faster to compute."""


@dataclass
class _Running:
    request: TracedRequest
    outcome: Outcome
    ready: float  # when its blocks are there
    prompt_left: int
    position: int
    answer_left: int


class Simulator:
    """One engine on one machine. `run` may be called once."""

    def __init__(self, profile: Profile, block_tokens: int) -> None:
        """`block_tokens`: tokens of one block of the trace."""
        self.profile, self.block_tokens = profile, block_tokens
        self._block_bytes = block_tokens * profile.kv_bytes
        self._tiers = [
            TierModel(_policy(i), max(1, int(tier.capacity // self._block_bytes)))
            for i, tier in enumerate(profile.tiers)
        ]
        self._busy_until = [0.0] * len(profile.tiers)

    def warm(self, blocks: Sequence[int], tier: int) -> None:
        """Let a tier, and all slower ones, have a chain."""
        for model in self._tiers[tier:]:
            model.add(blocks)

    def run(self, requests: Sequence[TracedRequest]) -> list[Outcome]:
        """Serve all requests; what became of each, in their order."""
        arrivals = deque(requests)
        waiting: deque[_Running] = deque()
        running: list[_Running] = []
        outcomes = []
        now = 0.0
        while arrivals or waiting or running:
            while arrivals and arrivals[0].arrived <= now:
                item = self._arrive(arrivals.popleft())
                outcomes.append(item.outcome)
                waiting.append(item)
            while waiting and len(running) < self.profile.slots:
                running.append(waiting.popleft())
            seconds = self._step(running, now)
            if seconds is None:
                events = [item.ready for item in running] + [request.arrived for request in list(arrivals)[:1]]
                now = max(now, min(events))
                continue
            now += seconds
            running = [item for item in running if not self._ended(item, now)]
        return outcomes

    def _arrive(self, request: TracedRequest) -> _Running:
        """Look up, decide, and queue the transfers."""
        outcome = Outcome(request.arrived)
        usable = request.blocks[: max(request.input_length - 1, 0) // self.block_tokens]
        reached, ready = 0, request.arrived
        for i, (tier, model) in enumerate(zip(self.profile.tiers, self._tiers, strict=True)):
            more = model.find(usable) - reached
            if more <= 0:
                continue
            tokens = more * self.block_tokens
            if i:
                start = max(request.arrived, self._busy_until[i])
                busy = tier.seconds(more, more * self._block_bytes)
                compute = self.profile.prefill_seconds(tokens, reached * self.block_tokens)
                if self.profile.margin * (tier.latency + busy) >= compute:
                    outcome.recomputed += tokens
                    break
                self._busy_until[i] = start + busy
                ready = max(ready, start + busy + tier.latency)
            outcome.cached[tier.name] = tokens
            reached += more
        outcome.load = ready - request.arrived
        cached = reached * self.block_tokens
        return _Running(request, outcome, ready, request.input_length - cached, cached, request.output_length)

    def _step(self, running: list[_Running], now: float) -> float | None:
        """The next step's seconds; None if nobody has anything to compute."""
        budget, prompt, context = self.profile.chunk, 0, 0
        answers = [item for item in running if not item.prompt_left and item.answer_left]
        for item in running:
            if item.prompt_left and item.ready <= now and budget:
                part = min(budget, item.prompt_left)
                context = max(context, item.position)
                item.prompt_left -= part
                item.position += part
                budget -= part
                prompt += part
        if not prompt and not answers:
            return None
        held = sum(item.position for item in answers)
        for item in answers:
            item.answer_left -= 1
            item.position += 1
        return self.profile.step_seconds(prompt, context, len(answers), held)

    def _ended(self, item: _Running, now: float) -> bool:
        if item.prompt_left:
            return False
        if not item.outcome.ttft:
            item.outcome.ttft = now - item.request.arrived
            item.answer_left = max(item.answer_left - 1, 0)
            for model in self._tiers:
                model.add(item.request.blocks)
        if item.answer_left:
            return False
        item.outcome.finished = now
        return True


def _policy(tier: int) -> Policy[bytes]:
    """The tiers' own: LRU-2 on the device, S3-FIFO in memory, LRU beyond."""
    return (LRU2(), S3FIFO(), LRU())[min(tier, 2)]


def resume_seconds(profile: Profile, history: int, new: int, tier: int | None, block_tokens: int = 128) -> float:
    """Time to the first token of a prompt of `history` known and `new` unknown tokens, alone on the machine.

    `tier`: index of the fastest tier that has the history; None: none, everything is computed.
    """
    blocks = tuple(range(-(-(history + new) // block_tokens)))
    simulator = Simulator(profile, block_tokens)
    if tier is not None:
        simulator.warm(blocks[: history // block_tokens], tier)
    return simulator.run([TracedRequest(0.0, history + new, 1, blocks)])[0].ttft


@dataclass(frozen=True)
class Summary:
    """Of many outcomes. Times in seconds."""

    requests: int
    ttft_p50: float
    ttft_p95: float
    load_p50: float
    cached: dict[str, float]
    """Share of prompt tokens, by tier."""
    recomputed: float
    tokens_per_second: float


def summarise(requests: Sequence[TracedRequest], outcomes: Sequence[Outcome]) -> Summary:
    """Medians and shares. Both sequences belong together, and are not empty."""
    prompt = sum(request.input_length for request in requests)
    cached: Counter[str] = Counter()
    for outcome in outcomes:
        cached.update(outcome.cached)
    ttft = sorted(outcome.ttft for outcome in outcomes)
    span = max(outcome.finished for outcome in outcomes) - requests[0].arrived
    return Summary(
        requests=len(outcomes),
        ttft_p50=statistics.median(ttft),
        ttft_p95=ttft[int(0.95 * (len(ttft) - 1))],
        load_p50=statistics.median(outcome.load for outcome in outcomes),
        cached={name: tokens / prompt for name, tokens in cached.items()},
        recomputed=sum(outcome.recomputed for outcome in outcomes) / prompt,
        tokens_per_second=sum(request.output_length for request in requests) / span if span else 0.0,
    )
