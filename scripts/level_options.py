"""Options of the scripts for levels and thinking, and what they mean."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ..configs.levels import ADAPTIVE, DEFAULT_LEVEL, EFFORTS, LEVELS, check_budget, find_effort, find_level

if TYPE_CHECKING:
    from ..serving.effort import Effort


@dataclasses.dataclass(frozen=True)
class Think:
    """How much to think: in a word, or in tokens."""

    effort: str | None = None
    budget: int | None = None

    def __str__(self) -> str:
        if self.budget is not None:
            return {0: "off", ADAPTIVE: "adaptive"}.get(self.budget, f"{self.budget} tokens")
        return self.effort or "off"


UNSAID = Think()
"""Nothing was said: no thoughts."""


def level(text: str) -> str:
    """A level's name, for argparse."""
    try:
        return find_level(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def think(text: str) -> Think:
    """`off`, a word for effort, `adaptive`, or a number of tokens; for argparse and for commands."""
    word = text.strip().lower()
    try:
        if word in ("off", "adaptive"):
            return Think(budget=0 if word == "off" else ADAPTIVE)
        if word.removeprefix("-").isdecimal():
            return Think(budget=check_budget(int(word)))
        find_effort(word)
    except ValueError:
        supported = ", ".join(("off", "adaptive", *EFFORTS))
        message = f"{text[:40]!r} is not supported; supported: {supported}, or a number of tokens"
        raise argparse.ArgumentTypeError(message) from None
    return Think(effort=word)


def add_level_option(parser: argparse._ActionsContainer, *, default: str | None = None) -> None:
    parser.add_argument(
        "--level", type=level, default=default, metavar="LEVEL",
        help=f"how much may be computed: {', '.join(LEVELS)}; it makes nobody think (default: {DEFAULT_LEVEL})",
    )  # fmt: skip


def add_think_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--think", type=think, default=UNSAID, metavar="EFFORT",
        help="thoughts before the answer: off, low, medium, high, adaptive, or a number of tokens",
    )  # fmt: skip


def add_lossy_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--lossy", action="store_true",
        help="let the levels minimal and low change tokens, within the bound calibrated for the model",
    )  # fmt: skip


def effort(level: str | None, think: Think) -> Effort:
    """What both options ask for together: --level is the level, else what --think means, else the default. To be called
    after `prepare` has set up the process."""
    from ..serving.effort import ask  # only now: it imports JAX

    asked = ask(level or DEFAULT_LEVEL, effort=think.effort, budget=think.budget)
    return asked if level is None else dataclasses.replace(asked, level=level)
