"""What OpenAI requests say about levels and thinking.

`reasoning_effort` is OpenAI's own word and means a level and its thinking budget. The others are for clients that know
more: `level` and `thinking_budget` (tokens; -1 adaptive, 0 off) are ours, `reasoning` has the same two under the names
of OpenAI's newer protocol and of routers, `thinking` is a switch with a budget. A number beats a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ...configs.levels import ADAPTIVE, check_budget, find_effort, find_level
from ..effort import Effort, ask
from .errors import bad_request, unsupported
from .schemas import ChatBody, SamplingBody, ThinkingOptions

T = TypeVar("T", str, int)


def level_of(body: SamplingBody, default_level: str) -> str:
    """The name of the request's level."""
    if body.level is None:
        return default_level
    _check("level", body.level, find_level)
    return find_level(body.level).name


def effort_of(body: ChatBody, default_level: str) -> Effort:
    """The request's level and thinking budget. Unknown words, numbers out of range and contradictions are refused."""
    reasoning, thinking = body.reasoning, body.thinking
    for name, options, supported in (
        ("reasoning", reasoning, "effort, max_tokens"),
        ("thinking", thinking, "type, budget_tokens"),
    ):
        for key in (options.model_extra or {}) if options is not None else ():
            raise unsupported(f"{name}.{key[:40]}", f"'{name}.{key[:40]}' is not supported; supported: {supported}")
    level_of(body, default_level)
    word = _one(
        {
            "reasoning_effort": body.reasoning_effort,
            "reasoning.effort": reasoning.effort if reasoning is not None else None,
        },
        find_effort,
    )
    number = _one(
        {
            "thinking_budget": body.thinking_budget,
            "reasoning.max_tokens": reasoning.max_tokens if reasoning is not None else None,
            "thinking.budget_tokens": thinking.budget_tokens if thinking is not None else None,
            "thinking.type": _switch(thinking) if thinking is not None else None,
        },
        check_budget,
    )
    if thinking is not None and thinking.type == "enabled" and number is word is body.level is None:
        number = ADAPTIVE
    return ask(default_level, level=body.level, effort=word, budget=number)


def _switch(thinking: ThinkingOptions) -> int | None:
    """The budget that the switch itself says."""
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        text = f"Invalid value for 'thinking.type': {thinking.type[:40]!r}; supported: enabled, disabled, adaptive"
        raise bad_request(text, "thinking.type", "invalid_value")
    return {"enabled": None, "disabled": 0, "adaptive": ADAPTIVE}[thinking.type]


def _one(given: Mapping[str, T | None], check: Callable[[T], object]) -> T | None:
    """The value that was given, under whichever names; None for none."""
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        _check(name, value, check)
    if len(set(values.values())) > 1:
        names = " and ".join(f"'{name}'" for name in values)
        raise bad_request(f"Invalid value: {names} contradict each other; give one of them.", next(iter(values)))
    return next(iter(values.values()), None)


def _check(name: str, value: T, check: Callable[[T], object]) -> None:
    try:
        check(value)
    except ValueError as error:
        raise bad_request(f"Invalid value for '{name}': {error}", name, "invalid_value") from None
