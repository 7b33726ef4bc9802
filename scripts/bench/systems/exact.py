"""The adapter that answers the same requests in engines of different sizes, and keeps what they chose from."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...model_options import prepare
from .base import Setup
from .ours import PACKAGES, Ours, instructions

if TYPE_CHECKING:
    from ....serving.engine import Engine
    from .steps import Steps


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One way to run requests; `threads` is of native kernels, None: all."""

    name: str
    slots: int = 1
    chunk: int = 128
    context: int = 2048
    threads: int | None = None
    draft: str = "off"


class Exact(Ours):
    def load(self, setup: Setup) -> dict[str, Any]:
        self.setup = setup
        prepare(setup.threads, None, setup.kernels)
        import jax

        from ....kernels.backend import choose
        from ....model.load import load_model

        chosen = choose(jax.default_backend(), setup.kernels).kernels
        self.model = load_model(
            setup.model, quant=setup.quant, kernels=chosen, embedding=setup.embedding, shadow=setup.shadow
        )
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "settings": {
                "weights": self.model.quant,
                "weights_id": self.model.weights_id,
                "kernels": chosen._asdict(),
                "instructions": instructions(chosen),
            },
        }

    def sources(self) -> list[str]:
        """Where drafts can come from."""
        return ["lookup"] if self.model.shadow is None else ["lookup", "shadow"]

    def _open(self, sizes: Sizes, *, plain: bool = True) -> Engine:
        """An engine; `plain`: whose programs cannot draft where nothing is to be drafted."""
        from ....configs.engine import EngineConfig
        from ....kernels import native
        from ....serving.engine import Engine

        if self.model.kernels.linear == "cpu":
            native.set_threads(sizes.threads or self.setup.threads)
        context = min(sizes.context, self.model.config.context_length)
        config = EngineConfig(
            slots=sizes.slots, prefill_chunk=sizes.chunk, context_length=context, max_queue=4096, logits=True,
            kv=self.setup.kv,  # type: ignore[arg-type]
            draft_rows=0 if sizes.draft == "off" and plain else None,
        )  # fmt: skip
        engine = Engine(self.model, config)
        engine.start()
        return engine

    def complete(self, sizes: dict[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Answers to all prompts, in turn greedy and seeded, so that both ways of choosing are compared: their ids and
        a CRC of every row of logits."""
        from ....serving.engine import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                digest=True,
                temperature=0.8 * (i % 2),
                top_p=0.95,
                seed=i,
                draft=sizes["draft"],
            )  # fmt: skip
            for i in range(len(prompts))
        ]
        with self._open(Sizes(**sizes)) as engine:
            made = engine.generate(prompts, params)
            return {
                "ids": [one.token_ids for one in made],
                "digests": [one.digests for one in made],
                "passes": sum(one.timings.passes for one in made),
                "numerics": engine.numerics_class,
            }

    def read(self, widths: Sequence[int], texts: Sequence[Sequence[int]], begins: Sequence[int]) -> dict[str, Any]:
        """CRCs of the rows of logits that follow each token of a text from index `begins` - 1 to the last but one, read
        in passes of every width: width -> text -> CRCs."""
        from .steps import Steps

        digests: dict[str, Any] = {str(width): [] for width in widths}
        with self._open(Sizes("", slots=max(widths)), plain=False) as engine:
            steps = Steps(engine)
            for ids, begin in zip(texts, begins, strict=True):
                if begin > 1:
                    steps.fill(ids[: begin - 1])
                for width in widths:  # each writes the KV of the answer anew
                    digests[str(width)].append(_digests(steps, width, ids, begin))
        return digests


def _digests(steps: Steps, width: int, ids: Sequence[int], begin: int) -> list[int]:
    digests: list[int] = []
    for first in range(begin - 1, len(ids) - 1, width):
        part = ids[first : min(first + width, len(ids) - 1)]
        digests += [zlib.crc32(row.tobytes()) for row in steps.logits(part, first)]
    return digests
