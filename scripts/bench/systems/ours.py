"""Umbra's own engine, used as a library."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...model_options import open_engine, prepare
from .base import Run, Scores, Setup, Stream, System, between

if TYPE_CHECKING:
    from ....model.load import Model
    from ....serving.engine import Emission, SamplingParams
    from .steps import Steps

PACKAGES = ("umbra", "jax", "jaxlib", "numpy")


class Ours(System):
    model: Model
    kernels: str | None = None
    """What is used whatever `--kernels` says; None: what it says."""

    def load(self, setup: Setup) -> dict[str, Any]:
        kernels = self.kernels or setup.kernels
        prepare(setup.threads, setup.mesh, kernels)
        began = time.perf_counter()
        self.setup = setup
        sizes: dict[str, Any] = {} if setup.chunk is None else {"prefill_chunk": setup.chunk}
        if setup.draft_length is not None:
            sizes["draft_length"] = setup.draft_length
        self.model, self.engine = open_engine(
            setup.model, setup.quant, setup.mesh, kernels=kernels, embedding=setup.embedding, slots=setup.sequences,
            kv=setup.kv, logits=setup.logits, draft="off" if setup.plain else "auto", shadow=setup.shadow, **sizes,
        )  # fmt: skip
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "settings": {
                "weights": self.model.quant,
                "weights_id": self.model.weights_id,
                "shadow_id": self.model.shadow_id,
                "weight_bytes": _bytes(self.model.params),
                "embedding_bytes": _bytes(self.model.params["embed"]),
                "kernels": self.engine.device.kernels._asdict(),
                "instructions": instructions(self.engine.device.kernels),
                "kv": self.engine.device.kv.name,
                "threads": setup.threads,
                "numerics": self.engine.numerics_class,
                "slots": setup.sequences,
                "chunk": self.engine.config.prefill_chunk,
                "context": self.engine.context_length,
                "pass_bytes": self._pass_bytes(),
                "kv_token_bytes": self._kv_token_bytes(),
                "draft": setup.draft,
                **({} if setup.draft_length is None else {"draft_length": setup.draft_length}),
                "ready_s": round(time.perf_counter() - began, 3),
            },
        }

    def describe(self, setup: Setup) -> dict[str, Any]:
        """Load a model, but start no engine: what a client of its servers needs to know."""
        prepare(setup.threads, None, setup.kernels)
        import jax

        from ....configs.engine import EngineConfig
        from ....kernels.backend import choose
        from ....model.load import load_model

        chosen = choose(jax.default_backend(), setup.kernels)
        self.model = load_model(setup.model, quant=setup.quant, kernels=chosen.kernels, embedding=setup.embedding)
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "weights": self.model.quant,
            "kernels": chosen.kernels._asdict(),
            "instructions": instructions(chosen.kernels),
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

    def encode_answers(self, asked: Sequence[tuple[str, str, str]]) -> list[tuple[list[int], int]]:
        """Of each question, beginning of its answer and rest of it: all token ids, and where the rest begins."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.model.name} has no tokenizer")
        made = []
        for prompt, (_, opening, rest) in zip(self.encode([text for text, _, _ in asked]), asked, strict=True):
            begun = [*prompt, *tokenizer.encode(opening)]
            made.append(([*begun, *tokenizer.encode(rest)], len(begun)))
        return made

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        began = self._begin()
        params = [
            self.params(max_tokens, ignore_eos=True, temperature=self.setup.temperature, seed=i)
            for i in range(len(prompts))
        ]
        emissions = self._answer(prompts, params, began)
        seconds = time.perf_counter() - began
        streams = [self._stream(len(prompt), made) for prompt, made in zip(prompts, emissions, strict=True)]
        return Run(streams, seconds)

    def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy answers, which end where the model ends them; its end token is not part of them."""
        began = self._begin()
        emissions = self._answer(prompts, [self.params(max_tokens)] * len(prompts), began)
        streams = [self._stream(len(prompt), made) for prompt, made in zip(prompts, emissions, strict=True)]
        return [[token for token in stream.token_ids if token not in self.model.eos_ids] for stream in streams]

    def params(self, max_tokens: int, **more: Any) -> SamplingParams:
        """Greedy, drafting as this system does, unless `more` says otherwise."""
        from ....serving.engine import SamplingParams

        return SamplingParams(max_tokens=max_tokens, **{"draft": self.setup.draft, **more})

    def _begin(self) -> float:
        """The time, from which on nothing of any prompt is known."""
        self.engine.forget()
        return time.perf_counter()

    def _answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], began: float
    ) -> list[list[tuple[float, Emission]]]:
        """Run all prompts at once: of each, when its emissions came (seconds after `began`) and what they were."""
        inbox: queue.SimpleQueue[tuple[float, Sequence[tuple[str, Emission]]]] = queue.SimpleQueue()
        emissions: dict[str, list[tuple[float, Emission]]] = {}

        def sink(pairs: Sequence[tuple[str, Emission]]) -> None:
            inbox.put((time.perf_counter(), pairs))

        for prompt, each in zip(prompts, params, strict=True):
            emissions[self.engine.submit(prompt, each, sink=sink)] = []
        running = len(prompts)
        while running:
            when, pairs = inbox.get()
            for request, emission in pairs:
                emissions[request].append((when - began, emission))
                running -= emission.finish_reason is not None
        return list(emissions.values())

    def _stream(self, prompt_tokens: int, emissions: Sequence[tuple[float, Emission]]) -> Stream:
        end = emissions[-1][1]
        if end.error:
            raise RuntimeError(end.error)
        made = [(when, emission) for when, emission in emissions if emission.token_ids]
        ids = [token for _, emission in made for token in emission.token_ids]
        ends = (i for i, token in enumerate(ids, 1) if token in self.model.eos_ids)
        return Stream(
            prompt_tokens=prompt_tokens,
            token_ids=ids,
            ttft=made[0][0],
            first_tokens=len(made[0][1].token_ids),
            last=made[-1][0],
            passes=end.timings.passes if end.timings else None,
            cached_tokens=end.usage.cached_tokens if end.usage else 0,
            gaps=between([when for when, _ in made]),
            emitted=[len(emission.token_ids) for _, emission in made],
            answer=next(ends, len(ids)),
        )

    def _pass_bytes(self) -> int:
        """Bytes of weights that a pass reads: all layers and the head."""
        params = self.model.params
        layers = {name: value for name, value in params.items() if name.startswith("layers.")}
        return _bytes(layers) + _bytes(params.get("head", params["embed"]))

    def _kv_token_bytes(self) -> int:
        config = self.model.config
        return self.engine.device.kv.bytes_per_token(config.n_layers, config.n_kv_heads, config.head_dim)

    # ---- passes of the compiled programs, without requests

    def _steps(self) -> Steps:
        from .steps import Steps

        return Steps(self.engine)

    def passes(self, ids: Sequence[int], widths: Sequence[int], repeats: int) -> dict[str, list[float]]:
        """Seconds of passes of each width at a short context, and of `decode`, a pass of one token; taken in turns."""
        steps = self._steps()
        start = len(ids) - max(widths)
        steps.fill(ids[:start])
        made: dict[str, list[float]] = {"decode": [], **{str(width): [] for width in widths}}
        for _ in range(repeats + 1):
            made["decode"].append(steps.seconds(ids[start : start + 1], start))
            for width in widths:
                made[str(width)].append(steps.seconds(ids[start : start + width], start))
        return {name: seconds[1:] for name, seconds in made.items()}  # without the first turn

    def draft_seconds(self, ids: Sequence[int], repeats: int) -> list[float] | None:
        """Seconds in which the shadow alone drafts four tokens for one sequence; None: this model has no shadow.

        As in a step: right after the head, which has driven the shadow's weights out of the caches of the cores.
        Programs of many turns, with drafting and without, are timed in turns: calling one takes as long as drafting."""
        shadow = self.model.shadow
        if shadow is None:
            return None
        import jax
        import jax.numpy as jnp

        from ....kernels.draft import SHADOW, DraftInput, draft
        from ....model.trunk import Execution, Trunk

        config, kernels, turns = self.model.config, self.engine.device.kernels, 20
        one = jnp.ones(1, jnp.int32)
        inputs = DraftInput(
            hidden=jax.random.normal(jax.random.key(0), (1, config.d_model)),
            token=jnp.asarray(ids[-1:], jnp.int32), position=one * (len(ids) - 1),
            history=jnp.asarray(ids, jnp.int32)[None], active=one > 0, sources=one * SHADOW, temperature=0.0 * one,
            seed=jnp.zeros((1, 2), jnp.uint32), room=4 * one, predicted=0 * one, floor=jnp.float32(0.0),
        )  # fmt: skip

        def program(drafts: bool) -> Any:
            def run(params: Any, weights: Any, inputs: DraftInput) -> tuple[jax.Array, jax.Array]:
                def turn(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    token, drafted = carry  # the next turn waits for this one
                    hidden = inputs.hidden + token[:, None].astype(jnp.float32) * 1e-9
                    token = Trunk(config, params).greedy(hidden, jnp.int32(1), Execution(kernels))
                    if not drafts:
                        return token, drafted
                    made = draft(weights, inputs._replace(token=token), backend=kernels.draft)
                    return jnp.clip(made.tokens[:, 3], 0, config.vocab_size - 1), drafted + made.length[0]

                return jax.lax.fori_loop(0, turns, turn, (inputs.token, jnp.int32(0)))

            return jax.jit(run)

        params = self.engine.device.fixed.params
        with_drafts, without = program(True), program(False)
        if int(with_drafts(params, shadow, inputs)[1]) != 4 * turns:
            raise RuntimeError("the shadow drafts fewer tokens than it was asked for")

        def seconds(run: Any) -> float:
            began = time.perf_counter()
            jax.block_until_ready(run(params, shadow, inputs))
            return time.perf_counter() - began

        seconds(without)
        return [(seconds(with_drafts) - seconds(without)) / turns for _ in range(repeats)]

    def fill(self, ids: Sequence[int]) -> int:
        """Compute the KV of a long context; gives the bytes of it that a pass reads."""
        steps = self._steps()
        steps.fill(ids)
        return steps.kv_bytes(len(ids))

    def decode_at(self, ids: Sequence[int], positions: Sequence[int], repeats: int) -> list[list[float]]:
        """Seconds of passes of one token at each position, taken in turns. What is before them must be filled."""
        steps = self._steps()
        turns = [[steps.seconds([ids[position]], position) for position in positions] for _ in range(repeats + 1)]
        return [list(seconds) for seconds in zip(*turns[1:], strict=True)]

    def score(self, sequences: Sequence[Sequence[int]], begins: Sequence[int]) -> list[Scores]:
        steps, scores = self._steps(), []
        for ids, begin in zip(sequences, begins, strict=True):
            one = Scores()
            if begin > 1:
                steps.fill(ids[: begin - 1])
            for first in range(begin - 1, len(ids) - 1, steps.widest):
                part = ids[first : min(first + steps.widest, len(ids) - 1)]
                one.add(steps.logits(part, first), ids[first + 1 : first + 1 + len(part)])
            scores.append(one)
        return scores


class PlainJax(Ours):
    """The same without kernels of our own."""

    kernels = "xla"


def _bytes(tree: Any) -> int:
    import jax

    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def instructions(kernels: Any) -> str:
    """The instruction set path that computes: our native kernels', or what XLA finds."""
    if "cpu" in kernels:
        from ....kernels import native

        return native.isa()
    from ....serving.engine.identity import instruction_set

    return instruction_set()
