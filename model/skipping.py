"""Which layers a trunk can do without: contributions of single layers, and subsets chosen by what they change.

Letters: D model width, L layers, T tokens of a text.

The measure is the Kullback-Leibler divergence of a subset's next-token distribution from that of all layers, on texts
the trunk wrote itself. Subsets are chosen greedily: at each step the layer goes whose absence adds least divergence;
the first two and the last two always stay. (Block influence, the change of direction of the hidden state, is measured
beside it: "ShortGPT", Men and others, 2024.) How often a subset would have chosen another token than all layers is then
bounded on further texts, by prompt (calibration.py): that is the loss a level may allow.

What is measured is shipped as data, one small file per trunk, tied to its weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..configs.files import write_text
from .calibration import CONFIDENCE, TARGET, fixed_sequence
from .load import Model
from .reading import Comparison, Reader, Text

__all__ = ["Contribution", "SkipError", "Skips", "Subset", "Text", "layer_share", "measure_skips", "skips_for"]

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "skips"
"""Measured subsets of the trunks that are supported by name, shipped with the package."""

KEPT_ENDS = 2
"""Layers at either end that are never left out."""

SHORTLIST = 8
"""Candidates that are tried at each step after the first: those that cost least the last time they were tried."""

Progress = Callable[[str, int, int], None]


class SkipError(Exception):
    """Measured subsets that cannot be used; one sentence."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one layer does, on average over tokens."""

    layer: int
    update: float
    """Length of what it adds to the hidden state, over the length of the hidden state before it."""
    influence: float
    """1 minus the cosine between the hidden states before and after it."""
    kl: float
    """Divergence when it alone is left out, in nats a token."""


@dataclasses.dataclass(frozen=True)
class Subset:
    """A subset of layers against all of them, on answers of all layers."""

    layers: tuple[int, ...]
    kl: float
    """Nats a token."""
    agreement: float
    """Share of tokens for which it holds the same token most likely."""
    perplexity_change: float
    """Its perplexity over that of all layers, minus 1."""
    loss: float
    """Mean over prompts of the share of tokens that differ."""
    bound: float
    """That mean is at most this over prompts like these, with the confidence of the measurement."""
    passed: bool
    """Whether this and every larger subset keep within the target, with that confidence (learn then test)."""
    speed_bound: float
    """Passes of all layers in the time of one, if time goes with the bytes of weights: no program can gain more."""


@dataclasses.dataclass(frozen=True)
class Skips:
    """Everything measured of one trunk."""

    trunk: str
    weights_id: str
    weights: str
    """The form of the weights they were measured with."""
    prompts: int
    tokens: int
    target: float
    confidence: float
    contributions: tuple[Contribution, ...]
    subsets: tuple[Subset, ...]
    """From the most layers to the fewest."""

    @property
    def allowed(self) -> Subset | None:
        """The smallest subset that passed; None: all layers are needed."""
        return next((subset for subset in reversed(self.subsets) if subset.passed), None)

    def of(self, n_layers: int) -> Subset:
        """The subset of so many layers."""
        for subset in self.subsets:
            if len(subset.layers) == n_layers:
                return subset
        sizes = ", ".join(str(len(subset.layers)) for subset in self.subsets)
        raise SkipError(f"no subset of {n_layers} layers of {self.trunk} was measured; there are {sizes or 'none'}")

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(_short(dataclasses.asdict(self)), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, model: Model) -> Skips:
        """The file's contents; a `SkipError` when they are not of this model's weights."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            contributions = tuple(Contribution(**one) for one in values.pop("contributions"))
            subsets = tuple(Subset(**{**one, "layers": tuple(one["layers"])}) for one in values.pop("subsets"))
            skips = cls(**values, contributions=contributions, subsets=subsets)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SkipError(f"{path} does not hold measured layer subsets: {error}") from error
        if skips.weights_id != model.weights_id:
            raise SkipError(
                f"the layer subsets in {path.name} were measured on {skips.trunk} with weights "
                f"{skips.weights_id[:12]}, and these are {model.weights_id[:12]} of {model.config.name}: "
                "measure them with scripts/bench.py skips"
            )
        return skips


def skips_path(trunk: str) -> Path:
    """Where the measured subsets of the trunk of this name are shipped."""
    return FOLDER / f"{trunk}.json"


def skips_for(model: Model) -> Skips | None:
    """The shipped subsets of `model`; None when there are none, or when they are of other weights, which is logged."""
    path = skips_path(model.config.name)
    if not path.is_file():
        return None
    try:
        return Skips.load(path, model)
    except SkipError as error:
        log.warning("all layers are used: %s", error)
        return None


def measure_skips(
    model: Model, texts: Sequence[Text], *, search_tokens: int = 1024, target: float = TARGET,
    confidence: float = CONFIDENCE, progress: Progress | None = None,
) -> Skips:  # fmt: skip
    """Contributions and subsets of `model`, from texts of its own.

    Layers and subsets are chosen on the first texts, until their answers have `search_tokens` tokens, and judged on the
    others, so that a bound is of texts that chose nothing; there must be others. `progress` is told what is done.
    """
    chosen_on = _first(texts, search_tokens)
    judged_on = texts[len(chosen_on) :]
    if not judged_on:
        raise ValueError(f"{len(texts)} texts are too few to choose subsets on some and judge them on others")
    reader = Reader(model, max(len(text.ids) for text in texts))
    tell = progress or (lambda what, done, total: None)
    contributions = _contributions(reader, chosen_on, tell)
    subsets = _choose(reader, chosen_on, contributions, tell)
    judged = _judge(reader, judged_on, subsets, tell)
    n = model.config.n_layers
    tested = fixed_sequence([[1.0 - one.same.mean() for one in each] for each in judged],
                            target=target, confidence=confidence)  # fmt: skip
    share = layer_share(model.params)
    return Skips(
        trunk=model.config.name,
        weights_id=model.weights_id,
        weights=model.quant,
        prompts=len(judged_on),
        tokens=sum(len(text.ids) - text.begin for text in judged_on),
        target=target,
        confidence=confidence,
        contributions=contributions,
        subsets=tuple(
            _subset(layers, each, one.loss, one.bound, one.passed, 1.0 / (1.0 - share * (n - len(layers)) / n))
            for layers, each, one in zip(subsets, judged, tested, strict=True)
        ),
    )


def sizes(n_layers: int) -> list[int]:
    """How many layers are left out in the subsets that are measured: one by one at first, then up to 43 % of all."""
    most = n_layers - 2 * KEPT_ENDS
    wanted = {1, 2, 3, 4, 5, 6, *(round(n_layers * share) for share in (0.27, 0.33, 0.43))}
    return sorted(n for n in wanted if 1 <= n <= most)


def layer_share(params: dict[str, Any]) -> float:
    """Share of the layers in the bytes of weights that a pass reads: the rest is the head, tied or not."""
    layers = sum(_bytes(value) for name, value in params.items() if name.startswith("layers."))
    return layers / (layers + _bytes(params.get("head", params["embed"])))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _first(texts: Sequence[Text], tokens: int) -> Sequence[Text]:
    """The first texts whose answers have at least so many tokens together."""
    had = 0
    for i, text in enumerate(texts):
        if had >= tokens:
            return texts[:i]
        had += len(text.ids) - text.begin
    return texts


def _contributions(reader: Reader, texts: Sequence[Text], tell: Progress) -> tuple[Contribution, ...]:
    L = reader.model.config.n_layers
    update, influence = [], []
    for i, text in enumerate(texts):
        states = reader.states(text.ids)[:, text.begin - 1 : -1]  # [L + 1, tokens of the answer, D]
        before, after = states[:-1], states[1:]
        lengths = np.linalg.norm(states, axis=-1)
        update.append(np.linalg.norm(after - before, axis=-1) / lengths[:-1])
        influence.append(1.0 - np.sum(before * after, axis=-1) / (lengths[:-1] * lengths[1:]))
        tell("hidden states", i + 1, len(texts))
    without = _divergences(reader, texts, [_without(L, {i}) for i in range(L)], "single layers", tell)
    means = [np.concatenate(each, axis=1).mean(axis=1) for each in (update, influence)]
    return tuple(Contribution(i, float(means[0][i]), float(means[1][i]), without[i]) for i in range(L))


def _choose(
    reader: Reader, texts: Sequence[Text], contributions: Sequence[Contribution], tell: Progress
) -> list[tuple[int, ...]]:
    """Greedily chosen subsets of the sizes that are measured, from the most layers to the fewest."""
    L = reader.model.config.n_layers
    wanted = sizes(L)
    cost = {one.layer: one.kl for one in contributions[KEPT_ENDS : L - KEPT_ENDS]}
    gone: set[int] = set()
    subsets = []
    for n in range(1, max(wanted, default=0) + 1):
        tried = sorted(cost, key=lambda layer: cost[layer])[:SHORTLIST]
        if n > 1:  # leaving out a single layer was measured already
            what = f"{n} layers left out"
            made = _divergences(reader, texts, [_without(L, gone | {i}) for i in tried], what, tell)
            cost |= dict(zip(tried, made, strict=True))
        best = min(tried, key=lambda layer: cost[layer])
        del cost[best]
        gone.add(best)
        if n in wanted:
            subsets.append(_without(L, gone))
    return subsets


def _without(n_layers: int, gone: set[int]) -> tuple[int, ...]:
    return tuple(layer for layer in range(n_layers) if layer not in gone)


def _divergences(
    reader: Reader, texts: Sequence[Text], subsets: Sequence[Sequence[int]], what: str, tell: Progress
) -> list[float]:
    """Divergence of each subset, in nats a token."""
    return [
        float(np.concatenate([one.kl for one in each]).mean()) for each in _judge(reader, texts, subsets, tell, what)
    ]


def _judge(
    reader: Reader, texts: Sequence[Text], subsets: Sequence[Sequence[int]], tell: Progress, what: str = "subsets"
) -> list[list[Comparison]]:
    """Subset -> text -> comparison with all layers."""
    made: list[list[Comparison]] = [[] for _ in subsets]
    for i, text in enumerate(texts):
        for each, one in zip(made, reader.compare(text, subsets), strict=True):
            each.append(one)
        tell(what, i + 1, len(texts))
    return made


def _subset(
    layers: tuple[int, ...], each: Sequence[Comparison], loss: float, bound: float, passed: bool, speed_bound: float
) -> Subset:
    whole = Comparison(*(np.concatenate(part) for part in zip(*each, strict=True)))
    change = float(np.exp(whole.nats.mean() - whole.all_nats.mean()) - 1.0)
    return Subset(
        layers, float(whole.kl.mean()), float(whole.same.mean()), change, loss, bound, passed, speed_bound
    )  # fmt: skip


def _short(value: Any) -> Any:
    """Floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
