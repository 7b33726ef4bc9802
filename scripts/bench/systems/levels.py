"""The adapter that answers at levels, with thoughts, with subsets of layers and with relaxed acceptance, and that says
what the whole trunk alone would have chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ....configs.levels import ROOM_SHARE
from .base import Setup, Stream
from .ours import Ours


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to answer: what is measured beside the others."""

    name: str
    level: str = "medium"
    budget: int = 0  # tokens of thought
    draft: str | None = None  # None: the level's
    relax: float = 0.0  # margin of relaxed acceptance, in nats
    layers: tuple[int, ...] | None = None  # None: all


class Levels(Ours):
    def load(self, setup: Setup) -> dict[str, Any]:
        from ....model.thinking import Thinker

        loaded = super().load(setup)
        tokenizer, template = self.model.tokenizer, self.model.chat_template
        self.thinker = Thinker(tokenizer, template) if tokenizer and template else None
        loaded["settings"]["thinks"] = self.thinker.kind if self.thinker and self.thinker.close else None
        return loaded

    def trunk_name(self) -> str:
        return self.model.config.name

    def lossy(self) -> dict[str, Any]:
        """What was calibrated for these weights: `margin` of relaxed acceptance and its `bound` and `confidence`, and
        measured `subsets` of layers, of which `allowed` is the number of layers of the one within its bound."""
        from ....configs.levels import relaxation
        from ....model.skipping import skips_for

        skips = skips_for(self.model)
        try:
            model = self.model
            found = relaxation(model.config.name, model.weights_id, model.shadow_id)
            relaxed: dict[str, Any] = dataclasses.asdict(found)
        except ValueError as error:
            relaxed = {"margin": 0.0, "why": str(error)}
        return {
            "relaxed": relaxed,
            "subsets": [dataclasses.asdict(subset) for subset in skips.subsets] if skips else [],
            "allowed": len(skips.allowed.layers) if skips and skips.allowed else self.model.config.n_layers,
            "n_layers": self.model.config.n_layers,
        }

    def weight_bytes(self, n_layers: int) -> int:
        """Bytes of the weights if only so many layers were loaded."""
        params = self.model.params
        layers = sum(_bytes(value) for name, value in params.items() if name.startswith("layers."))
        rest = sum(_bytes(value) for name, value in params.items() if not name.startswith("layers."))
        return rest + layers * n_layers // self.model.config.n_layers

    def answer(self, way: dict[str, Any], text: str, max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """One conversation of one user message, alone, greedily: text of the answer, figures, ids and the prompt's."""
        prompt, params = self._prepare(_way(way), text, max_tokens, ignore_eos)
        (emissions,) = self._answer([prompt], [params], self._begin())
        stream = self._stream(len(prompt), emissions)
        usage = emissions[-1][1].usage
        return {
            "text": "".join(emission.text for _, emission in emissions),
            "prompt": list(prompt),
            "stream": dataclasses.asdict(stream),
            "thought_tokens": usage.thought_tokens if usage else 0,
        }

    def answers_of(self, way: dict[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Ids of greedy answers to prompts that are run at once, their end included."""
        params = self._params(_way(way), max_tokens, ignore_eos=False)
        emissions = self._answer(prompts, [params] * len(prompts), self._begin())
        streams = [self._stream(len(prompt), made) for prompt, made in zip(prompts, emissions, strict=True)]
        return [stream.token_ids for stream in streams]

    def choices(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """Of each pair of ids and the index where an answer begins: what the whole trunk alone would have chosen for
        each token of the answer, after the same tokens."""
        from ....model.reading import Reader, Text

        reader = Reader(self.model, max(len(ids) for ids, _ in texts), self.engine.device.kv)
        return [reader.choices(Text(ids, begin)).tolist() for ids, begin in texts]

    def measure_skips(self, texts: Sequence[tuple[Sequence[int], int]], save: bool) -> dict[str, Any]:
        """Layer subsets of the model, from its own answers; with `save` kept where the program looks for them."""
        from ....model.reading import Text
        from ....model.skipping import measure_skips, skips_path

        skips = measure_skips(self.model, [Text(ids, begin) for ids, begin in texts])
        if save:
            skips.save(skips_path(self.model.config.name))
        return dataclasses.asdict(skips)

    def _prepare(self, way: Way, text: str, max_tokens: int, ignore_eos: bool) -> tuple[Sequence[int], Any]:
        # Thoughts never get more than their share of the room, so there must be enough of it.
        params = self._params(way, max(max_tokens + way.budget, ROOM_SHARE * way.budget), ignore_eos)
        if self.thinker is None:
            return self.encode([text])[0], params
        from ....serving.effort import Effort, prepare

        messages = [{"role": "user", "content": text}]
        made = prepare(self.thinker, self.engine.context_length, messages, params, Effort(way.level, way.budget))
        return made.prompt, made.params

    def _params(self, way: Way, max_tokens: int, ignore_eos: bool) -> Any:
        more: dict[str, Any] = {} if way.draft is None else {"draft": way.draft}
        return self.params(
            max_tokens, ignore_eos=ignore_eos, level=way.level, relax=way.relax, layers=way.layers, **more
        )


def _way(values: dict[str, Any]) -> Way:
    layers = values.get("layers")
    return Way(**{**values, "layers": None if layers is None else tuple(layers)})


def stream_of(values: dict[str, Any]) -> Stream:
    """The stream of what `Levels.answer` gave."""
    return Stream(**values["stream"])


def _bytes(tree: Any) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
