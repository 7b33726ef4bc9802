"""Umbra's own engine, used as a library."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...model_options import open_engine, prepare
from .base import Run, Setup, Stream, System

if TYPE_CHECKING:
    from ....model.load import Model
    from ....serving.engine import Emission

PACKAGES = ("umbra", "jax", "jaxlib", "numpy")


class Ours(System):
    model: Model

    def load(self, setup: Setup) -> dict[str, Any]:
        prepare(setup.threads, setup.mesh)
        began = time.perf_counter()
        self.model, self.engine = open_engine(setup.model, setup.quant, setup.mesh, slots=setup.sequences)
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "settings": {
                "weights": self.model.quant,
                "weights_id": self.model.weights_id,
                "threads": setup.threads,
                "numerics": self.engine.numerics_class,
                "slots": setup.sequences,
                "context": self.engine.context_length,
                "ready_s": round(time.perf_counter() - began, 3),
            },
        }

    def describe(self, model: str, quant: str, threads: int) -> dict[str, Any]:
        """Load a model, but start no engine: what a client of its servers needs to know."""
        prepare(threads, None)
        from ....configs.engine import EngineConfig
        from ....model.load import load_model

        self.model = load_model(model, quant=quant)
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "weights": self.model.quant,
            "gguf": self.gguf_file(),
            "eos_ids": list(self.model.eos_ids),
            "has_tokenizer": self.model.tokenizer is not None,
            "context": EngineConfig().context(self.model.config),
        }

    def gguf_file(self) -> str | None:
        """Path of the GGUF file the model came from; None if it came from something else."""
        from ....model.load import RANDOM, open_source

        if self.model.name in RANDOM:
            return None
        path = open_source(self.model.name).path
        return str(path) if path.suffix == ".gguf" else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as the only user message of a conversation."""
        from ....serving.offline import encoder

        encode = encoder(self.model)
        return [encode([{"role": "user", "content": text}]) for text in texts]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        from ....serving.engine import SamplingParams

        inbox: queue.SimpleQueue[tuple[float, Sequence[tuple[str, Emission]]]] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        emissions: dict[str, list[tuple[float, Emission]]] = {}
        for prompt in prompts:
            request = self.engine.submit(prompt, params, sink=lambda pairs: inbox.put((time.perf_counter(), pairs)))
            emissions[request] = []
        running = len(prompts)
        while running:
            when, pairs = inbox.get()
            for request, emission in pairs:
                emissions[request].append((when - began, emission))
                running -= emission.finish_reason is not None
        seconds = time.perf_counter() - began
        streams = [_stream(len(prompt), made) for prompt, made in zip(prompts, emissions.values(), strict=True)]
        return Run(streams, seconds)


def _stream(prompt_tokens: int, emissions: Sequence[tuple[float, Emission]]) -> Stream:
    end = emissions[-1][1]
    if end.error:
        raise RuntimeError(end.error)
    made = [(when, emission) for when, emission in emissions if emission.token_ids]
    return Stream(
        prompt_tokens=prompt_tokens,
        token_ids=[token for _, emission in made for token in emission.token_ids],
        ttft=made[0][0],
        first_tokens=len(made[0][1].token_ids),
        last=made[-1][0],
        passes=end.timings.passes if end.timings else None,
        cached_tokens=end.usage.cached_tokens if end.usage else 0,
    )
