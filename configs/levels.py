"""Levels: how much computation a request may use, as data.

A level is chosen before the first token. Everything it names is compiled ahead, so that changing it between requests
costs nothing. The levels are exact: they emit the ids that the trunk alone would. `LOSSY` are the forms of the lower
ones that may not, which a server uses only when it is told to, within bounds that were calibrated for its trunk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

ADAPTIVE = -1
"""A thinking budget chosen by the request's complexity."""

MAX_CLOSE = 4  # token sequences that end thoughts
MAX_CLOSE_TOKENS = 8  # of one of them
MAX_CONCLUDE_TOKENS = 48  # of what concludes thoughts at the budget

ROOM_SHARE = 3
"""Thoughts get at most one part in this many of the tokens that fit after the prompt."""

Draft = Literal["auto", "off", "lookup", "shadow"]
DRAFTS: tuple[str, ...] = get_args(Draft)
LAYERS = ("all", "calibrated")
"""Which layers run: all, or the smallest subset whose calibrated bound holds."""

RELAXED = Path(__file__).parent / "relaxed"
"""Folder of the calibrated margins of relaxed acceptance, a file per trunk."""


@dataclasses.dataclass(frozen=True)
class Level:
    """`thinking`: tokens of thought when a request asks for them; 0: none. `draft`: where drafted tokens come from.
    `relaxed`: whether a draft within the calibrated margin is accepted, else only the token that the trunk chooses.
    `layers`: which layers run."""

    name: str
    thinking: int
    draft: Draft = "auto"
    relaxed: bool = False
    layers: str = "all"

    def __post_init__(self) -> None:
        if self.thinking < 0:
            raise ValueError(f"the thinking budget of level {self.name} must not be negative, got {self.thinking}")
        if self.draft not in DRAFTS:
            raise ValueError(f"draft {self.draft!r} is not supported; supported: {', '.join(DRAFTS)}")
        if self.layers not in LAYERS:
            raise ValueError(f"layers {self.layers!r} are not supported; supported: {', '.join(LAYERS)}")

    @property
    def exact(self) -> bool:
        """Whether the emitted ids are those of the trunk alone."""
        return not self.relaxed and self.layers == "all"


MINIMAL = Level("minimal", thinking=0)
LOW = Level("low", thinking=1024)
MEDIUM = Level("medium", thinking=7500)
HIGH = Level("high", thinking=16384)

LEVELS: Mapping[str, Level] = {level.name: level for level in (MINIMAL, LOW, MEDIUM, HIGH)}
LOSSY: Mapping[str, Level] = {
    **LEVELS,
    "minimal": dataclasses.replace(MINIMAL, relaxed=True, layers="calibrated"),
    "low": dataclasses.replace(LOW, relaxed=True),
}
DEFAULT_LEVEL = MEDIUM.name

EFFORTS: Mapping[str, str | None] = {"none": None, **{name: name for name in LEVELS}, "xhigh": HIGH.name}
"""Words that requests use for how much to think, and the level each means; None: no thinking."""


def find_level(name: str, *, lossy: bool = False) -> Level:
    """The level of this name, in lower or upper case. Raises `ValueError`."""
    level = (LOSSY if lossy else LEVELS).get(name.lower())
    if level is None:
        raise ValueError(f"level {name[:40]!r} is not supported; supported: {', '.join(LEVELS)}")
    return level


def find_effort(word: str) -> Level | None:
    """The level that a word for effort means; None: no thinking. Raises `ValueError`."""
    if word.lower() not in EFFORTS:
        raise ValueError(f"effort {word[:40]!r} is not supported; supported: {', '.join(EFFORTS)}")
    name = EFFORTS[word.lower()]
    return None if name is None else LEVELS[name]


def check_budget(tokens: int) -> int:
    """`tokens` if it can be a thinking budget: -1 (adaptive), 0 (off) or a number of tokens. Raises `ValueError`."""
    if not ADAPTIVE <= tokens < 2**31:
        raise ValueError(
            f"thinking budget {tokens if abs(tokens) < 2**63 else 'of more than 63 bits'} is not supported; supported: "
            "-1 (adaptive), 0 (off), or a number of tokens"
        )
    return tokens


def fit_budget(asked: int, room: int) -> int:
    """The budget, conclusion included, for a request that asked for `asked` tokens of thought: never more than a third
    of the `room` tokens that may follow the prompt."""
    return max(0, min(asked, room // ROOM_SHARE))


@dataclasses.dataclass(frozen=True)
class Complexity:
    """How the complexity of a request is scored, for adaptive budgets: points per finding of a feature, at most `most`
    points for each; and the budget from each score on."""

    points: Mapping[str, float]
    most: Mapping[str, float]
    budgets: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if self.points.keys() != self.most.keys():
            raise ValueError("every feature needs its points and a limit")
        if any(value < 0 for value in (*self.points.values(), *self.most.values())):
            raise ValueError("points must not be negative: more of a feature never means less complexity")
        scores, tokens = [score for score, _ in self.budgets], [tokens for _, tokens in self.budgets]
        if not scores or scores[0] != 0 or scores != sorted(scores) or tokens != sorted(tokens):
            raise ValueError("budgets must start at score 0 and rise with the score")

    def budget(self, score: float) -> int:
        """Tokens of thought for a request of this score."""
        return max((tokens for least, tokens in self.budgets if score >= least), default=0)


COMPLEXITY = Complexity(
    points={"maths": 1.0, "numbers": 0.5, "code": 1.5, "steps": 1.0, "reasoning": 1.5, "tools": 1.0, "length": 1.0},
    most={"maths": 4.0, "numbers": 2.0, "code": 4.0, "steps": 3.0, "reasoning": 3.0, "tools": 2.0, "length": 3.0},
    budgets=((0.0, 0), (1.5, 512), (3.0, LOW.thinking), (5.0, 4096), (7.0, MEDIUM.thinking), (10.0, HIGH.thinking)),
)


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """What relaxed acceptance was found to cost on one trunk with one shadow: with drafts accepted down to `margin`
    below the chosen token's log-probability, at most a share of `bound` of the tokens differs, with `confidence`."""

    margin: float
    bound: float
    confidence: float
    prompts: int

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"the margin of relaxed acceptance must not be negative, got {self.margin}")
        if not 0 <= self.bound <= 1 or not 0 < self.confidence < 1:
            raise ValueError(f"bound {self.bound} and confidence {self.confidence} must be shares")


def relaxation(trunk: str, weights_id: str, shadow_id: str, folder: Path | None = None) -> Relaxation:
    """The calibrated margin for the trunk configuration `trunk` with these weights and this shadow, which decides what
    there is to be accepted; a margin of 0 when none passed. Raises `ValueError` when there is no file, when it is
    damaged, and when it is about others."""
    file = (folder or RELAXED) / f"{trunk}.json"
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        calibrated_on, drafted_by = data["weights_id"], data["shadow_id"]
        margin, bound, confidence = (float(data[name]) for name in ("margin", "bound", "confidence"))
        prompts = int(data["prompts"])
    except FileNotFoundError:
        raise ValueError(f"relaxed acceptance was not calibrated for {trunk}; supported: exact levels") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error})") from None
    if calibrated_on != weights_id:
        raise ValueError(f"{file} was calibrated on other weights; lossy levels need a file for these")
    if drafted_by != shadow_id:
        raise ValueError(f"{file} was calibrated with another shadow; lossy levels need a file for this one")
    return Relaxation(margin, bound, confidence, prompts)
