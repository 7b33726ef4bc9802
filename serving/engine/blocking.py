"""The engine for callers that wait: one request as an iterator, many as a list."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .request import Emission, FinishReason, Keep, QueueFull, SamplingParams, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from .engine import Engine

Pair = tuple[str, Emission]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A whole answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    digests: tuple[int, ...] = ()


class _Inbox:
    """A sink that keeps what it receives until it is asked for. What a step brought wakes whoever asks once: each time
    costs the engine's thread more than all the rest of an emission."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Sequence[Pair]] = queue.SimpleQueue()
        self._pairs: deque[Pair] = deque()

    def __call__(self, pairs: Sequence[Pair]) -> None:
        self._steps.put(pairs)

    def get(self) -> Pair:
        while not self._pairs:
            self._pairs.extend(self._steps.get())
        return self._pairs.popleft()


def stream(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams, principal: str, keep: Keep
) -> Iterator[Emission]:
    """See `Engine.stream`."""
    inbox = _Inbox()
    request = engine.submit(prompt_ids, params, sink=inbox, principal=principal, keep=keep)
    try:
        while True:
            _, emission = inbox.get()
            yield emission
            if emission.finish_reason is not None:
                return
    finally:
        engine.cancel(request)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
    principal: str, keep: Keep,
) -> list[Completion]:  # fmt: skip
    """See `Engine.generate`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    todo = deque(zip(prompts, each, strict=True))
    inbox = _Inbox()
    received: dict[str, list[Emission]] = {}  # in the order of the prompts
    running: set[str] = set()
    try:
        while todo or running:
            with contextlib.suppress(QueueFull):
                while todo:
                    request = engine.submit(*todo[0], sink=inbox, principal=principal, keep=keep)
                    todo.popleft()
                    received[request] = []
                    running.add(request)
            if not running:  # the queue is full of others' requests
                time.sleep(0.05)
                continue
            request, emission = inbox.get()
            received[request].append(emission)
            if emission.finish_reason is not None:
                running.remove(request)
        return [_join(emissions) for emissions in received.values()]
    finally:
        for request in running:
            engine.cancel(request)


def _join(emissions: list[Emission]) -> Completion:
    last = emissions[-1]
    assert last.finish_reason is not None and last.usage is not None and last.timings is not None
    if last.finish_reason == "error":
        raise RuntimeError(last.error)
    chain = itertools.chain.from_iterable
    return Completion(
        token_ids=tuple(chain(e.token_ids for e in emissions)),
        text="".join(e.text for e in emissions),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings=last.timings,
        logprobs=tuple(chain(e.logprobs for e in emissions)),
        digests=tuple(chain(e.digests for e in emissions)),
    )
