"""Continuations of given token ids, many at once, with what a shadow network is trained on."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..model.training.jobs import Completion, Job, Message, Speaker
from .engine.request import Emission, SamplingParams
from .offline import Submits, encoder

if TYPE_CHECKING:
    from ..model.load import Model
    from .engine import Engine

MARK = "umbra-user-turn"
"""Stands for what a user says, to find where the template puts it."""


class CompletionFailed(RuntimeError):
    """The engine failed while it was generating."""


def complete(engine: Submits, jobs: Sequence[Job], in_flight: int) -> Iterator[tuple[int, Completion]]:
    """Runs `jobs` with `in_flight` at once; gives (index, completion) as they end. A prompt that the engine refuses
    (too long) has an empty completion. Leaving the iteration early cancels what is running."""
    inbox: queue.SimpleQueue[Sequence[tuple[str, Emission]]] = queue.SimpleQueue()
    running: dict[str, tuple[int, list[Emission]]] = {}
    waiting = iter(enumerate(jobs))
    try:
        while True:
            while len(running) < in_flight and (following := next(waiting, None)) is not None:
                index, job = following
                try:
                    name = engine.submit(job.prompt_ids, _params(job), sink=inbox.put)
                except ValueError:
                    yield index, Completion((), None, False)
                    continue
                running[name] = (index, [])
            if not running:
                return
            for name, emission in inbox.get():
                if name not in running:
                    continue
                index, emissions = running[name]
                emissions.append(emission)
                if emission.finish_reason is not None:
                    del running[name]
                    yield index, _completion(emissions)
    finally:
        for name in running:
            engine.cancel(name)


def _params(job: Job) -> SamplingParams:
    return SamplingParams(temperature=job.temperature, seed=job.seed, max_tokens=job.max_tokens)


def _completion(emissions: Sequence[Emission]) -> Completion:
    last = emissions[-1]
    if last.finish_reason == "error":
        raise CompletionFailed(f"generation failed: {last.error}")
    ids = tuple(token for emission in emissions for token in emission.token_ids)
    parts = [emission.features for emission in emissions if emission.features is not None and emission.token_ids]
    features = np.concatenate(parts) if parts else None
    return Completion(ids, features, last.finish_reason == "stop_token")


def speaker(model: Model, engine: Engine, in_flight: int) -> Speaker:
    """`model` in conversation, over an engine that keeps features."""
    tokenizer, template = model.tokenizer, model.chat_template

    def encode_open(system: str) -> list[int]:
        assert tokenizer is not None and template is not None
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": MARK}]
        text = template.render(messages, add_generation_prompt=False)
        return tokenizer.encode_parts(tokenizer.split_special(text[: text.index(MARK)]), add_bos=tokenizer.add_bos)

    return Speaker(
        encode=encoder(model),
        encode_open=encode_open if tokenizer is not None and template is not None else None,
        decode=tokenizer.decode if tokenizer is not None else None,
        generate=lambda jobs: complete(engine, jobs, in_flight),
        context_length=engine.config.context(model.config),
    )
