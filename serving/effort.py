"""From what a request asks for (a level, a word for effort, a budget) to a prompt and parameters for the engine.

Every protocol and script goes this way, so that the same words mean the same everywhere:

    effort = ask("medium", effort="low")
    prepared = prepare(thinker, engine.context_length, messages, params, effort)
    engine.submit(prepared.prompt, prepared.params, sink=sink)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..configs.levels import (
    ADAPTIVE,
    LEVELS,
    LOSSY,
    Draft,
    check_budget,
    find_effort,
    find_level,
    fit_budget,
    relaxation,
)
from ..model.thinking import Thinker
from .engine.request import SamplingParams
from .engine.thoughts import Thinking
from .thinking import Assessment, assess

if TYPE_CHECKING:
    from ..model.load import Model


@dataclasses.dataclass(frozen=True)
class Effort:
    """A level, and a thinking budget: tokens, 0 for no thoughts, or -1 for one that adapts to the request."""

    level: str
    budget: int = 0


def ask(
    default_level: str, *, level: str | None = None, effort: str | None = None, budget: int | None = None
) -> Effort:
    """What a request asks for. `level` is the level; else the one that `effort` means; else the default. The budget is
    `budget`; else that of `effort`; else that of `level`; the default level alone makes nobody think. Raises
    `ValueError` that names what is supported."""
    chosen = find_level(default_level if level is None else level)
    tokens = chosen.thinking if level is not None else 0
    if effort is not None:
        meant = find_effort(effort)
        tokens = 0 if meant is None else meant.thinking
        if level is None and meant is not None:
            chosen = meant
    return Effort(chosen.name, tokens if budget is None else check_budget(budget))


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a level means to the engine, for one model: fields of `SamplingParams`, and in words what they may cost."""

    draft: Draft = "auto"
    relax: float = 0.0
    layers: tuple[int, ...] | None = None
    cost: str = ""  # empty: the ids are those of the trunk alone


EXACT: Mapping[str, Policy] = {name: Policy(level.draft) for name, level in LEVELS.items()}
"""The policies of levels that lose nothing, for any model."""


def lossy_policies(model: Model) -> Mapping[str, Policy]:
    """The policies of `model` where the lower levels use what was calibrated for it. Raises `ValueError` when nothing
    was, or nothing that helps was found to be within its bound."""
    from ..model.skipping import skips_for  # only now: it imports JAX

    relaxed = relaxation(model.config.name, model.weights_id, model.shadow_id)
    skips = skips_for(model)
    subset = skips.allowed if skips is not None else None
    made = {}
    for name, level in LOSSY.items():
        policy, costs = EXACT[name], []
        if level.relaxed and relaxed.margin:
            policy = dataclasses.replace(policy, relax=relaxed.margin)
            bound = _bound(relaxed.bound, relaxed.confidence, relaxed.prompts)
            costs.append(f"drafts up to {relaxed.margin:g} nats below the best stand, {bound}")
        if level.layers == "calibrated" and skips is not None and subset is not None:
            policy = dataclasses.replace(policy, layers=subset.layers)
            bound = _bound(subset.bound, skips.confidence, skips.prompts)
            costs.append(f"{len(subset.layers)} of {model.config.n_layers} layers, {bound}")
        made[name] = dataclasses.replace(policy, cost="; ".join(costs))
    if made == EXACT:
        raise ValueError(f"no lossy setting of {model.config.name} is within its bound; supported: exact levels")
    return made


def _bound(share: float, confidence: float, prompts: int) -> str:
    return f"at most {share:.1%} other tokens with {confidence:.0%} confidence ({prompts} prompts)"


def at_level(params: SamplingParams, name: str, policies: Mapping[str, Policy] = EXACT) -> SamplingParams:
    """`params` at a level. What they say themselves stays."""
    policy = policies[name]
    return dataclasses.replace(
        params,
        level=name,
        draft=policy.draft if params.draft == "auto" else params.draft,
        relax=params.relax or policy.relax,
        layers=policy.layers if params.layers is None else params.layers,
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The thinking budget of one request, which bounds all that counts as thoughts, and where it comes from."""

    level: str
    asked: int  # tokens; after the detector, before what there is room for
    budget: int
    assessment: Assessment | None = None  # for adaptive budgets

    def __str__(self) -> str:
        """For logs and headers, for example `1024 of 7500; adaptive: score 7 (maths 4, numbers 2, steps 1)`."""
        if self.budget == self.asked:
            text = str(self.budget) if self.budget else "off"
        else:
            text = f"{self.budget} of {self.asked}" if self.budget else f"off: no room for {self.asked}"
        return text if self.assessment is None else f"{text}; adaptive: {self.assessment}"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the engine gets. `choice`: how much is thought; None for prompts that are no conversation."""

    prompt: Sequence[int]
    params: SamplingParams
    choice: Choice | None = None


def prepare(
    thinker: Thinker,
    context_length: int,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    effort: Effort,
    *,
    policies: Mapping[str, Policy] = EXACT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> Prepared:
    """Encode a conversation, with thoughts if `effort` asks for them and the context has room. `extra` are variables
    of the chat template. Raises `ChatTemplateError`, and `ValueError` for thoughts of a model that cannot think."""
    assessment = assess(messages, tools=tools) if effort.budget == ADAPTIVE else None
    asked = effort.budget if assessment is None else assessment.budget
    params = dataclasses.replace(at_level(params, effort.level, policies), thinking=None)
    if asked:
        prompt = thinker.encode(messages, thinking=True, tools=tools, **extra)
        room = context_length - len(prompt)
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        budget = fit_budget(asked, room)
        if conclude := thinker.conclusion(budget):
            thinking = Thinking(budget - len(conclude), thinker.close, conclude)
            params = dataclasses.replace(params, thinking=thinking)
            return Prepared(prompt, params, Choice(effort.level, asked, budget, assessment))
    prompt = thinker.encode(messages, thinking=False, tools=tools, **extra)
    return Prepared(prompt, params, Choice(effort.level, asked, 0, assessment))
