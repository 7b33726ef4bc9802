"""From words and numbers to a prompt and parameters, in the room there is."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.configs import levels
from umbra.configs.levels import EFFORTS, LEVELS
from umbra.model import skipping
from umbra.serving.effort import EXACT, Choice, Effort, Policy, ask, at_level, lossy_policies, prepare
from umbra.serving.engine.request import SamplingParams

CLOSE, CONCLUDE = ((7, 8), (9,)), (5, 6, 7, 8)


class FakeThinker:
    """Prompts of 10 tokens, 20 with thoughts."""

    close = CLOSE

    def conclusion(self, budget):
        return CONCLUDE if budget > len(CONCLUDE) else ()

    def encode(self, messages, *, thinking, tools=None, **extra):
        self.seen = tools, extra
        return [1] * (20 if thinking else 10)


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("low", 0)),
        ({"level": "high"}, ("high", 16384)),
        ({"level": "minimal"}, ("minimal", 0)),
        ({"effort": "none"}, ("low", 0)),
        ({"effort": "medium"}, ("medium", 7500)),
        ({"effort": "xhigh"}, ("high", 16384)),
        ({"level": "minimal", "effort": "high"}, ("minimal", 16384)),
        ({"level": "high", "effort": "none"}, ("high", 0)),
        ({"budget": 5}, ("low", 5)),
        ({"budget": -1, "effort": "high"}, ("high", -1)),
        ({"budget": 0, "level": "high"}, ("high", 0)),
    ],
)
def test_what_is_asked(given, wanted):
    assert ask("low", **given) == Effort(*wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"level": "x"}, "level 'x'"), ({"effort": "x"}, "effort 'x'"), ({"budget": -5}, "thinking budget -5")],
)
def test_what_is_not_known(given, message):
    with pytest.raises(ValueError, match=f"{message} is not supported; supported: "):
        ask("medium", **given)


@given(st.sampled_from(list(EFFORTS)), st.sampled_from(list(LEVELS)), st.none() | st.sampled_from(list(LEVELS)))
def test_the_default_never_makes_anybody_think(effort, default, level):
    assert ask(default).budget == 0
    assert ask(default, effort=effort, level=level).budget == ask("medium", effort=effort, level=level).budget


def test_no_thoughts_are_no_other_prompt():
    made = prepare(FakeThinker(), 100, HI, SamplingParams(seed=3), Effort("high"))
    assert len(made.prompt) == 10 and made.params == SamplingParams(seed=3, level="high")
    assert made.choice == Choice("high", 0, 0) and str(made.choice) == "off"


def test_thoughts():
    made = prepare(FakeThinker(), 1000, HI, SamplingParams(), Effort("low", 70))
    thinking = made.params.thinking
    assert len(made.prompt) == 20 and (thinking.most, thinking.close, thinking.conclude) == (70, CLOSE, CONCLUDE)
    assert made.choice == Choice("low", 70, 70) and str(made.choice) == "70"


@given(st.integers(1, 400), st.none() | st.integers(1, 400), st.integers(1, 500))
def test_thoughts_leave_room_for_the_answer(context, max_tokens, asked):
    made = prepare(FakeThinker(), context, HI, SamplingParams(max_tokens=max_tokens), Effort("low", asked))
    room = min(context - 20, max_tokens or context)
    if made.params.thinking is None:
        assert len(made.prompt) == 10 and made.choice.budget == 0 and min(asked, room // 3) <= len(CONCLUDE)
        assert str(made.choice) == f"off: no room for {asked}"
    else:
        budget = made.params.thinking.most
        assert budget == min(asked, room // 3) and len(made.prompt) == 20
        assert made.choice == Choice("low", asked, budget)


def test_adaptive_thoughts():
    easy = prepare(FakeThinker(), 9000, HI, SamplingParams(), Effort("low", -1))
    assert easy.params.thinking is None and str(easy.choice) == "off; adaptive: score 0"
    hard = [{"role": "user", "content": "Prove that 2 + 2 = 4, then explain why."}]
    made = prepare(FakeThinker(), 2000, hard, SamplingParams(), Effort("low", -1))
    assert made.params.thinking.most == 660
    assert str(made.choice).startswith("660 of 7500; adaptive: score 7.5 (reasoning 3, ")


def test_tools_and_variables_reach_the_template_and_tools_count():
    thinker, tools = FakeThinker(), [{"name": "a"}] * 2
    made = prepare(thinker, 9000, HI, SamplingParams(), Effort("low", -1), tools=tools, date="today")
    assert thinker.seen == (tools, {"date": "today"})
    assert made.choice.assessment.features == (("tools", 2.0),) and made.params.thinking.most == 512


def test_a_level_sets_what_the_parameters_leave_open():
    policies = {**EXACT, "low": Policy("lookup", 0.5, (0, 2), "something")}
    assert at_level(SamplingParams(), "low", policies) == SamplingParams(
        level="low", draft="lookup", relax=0.5, layers=(0, 2)
    )
    own = SamplingParams(draft="off", relax=0.1, layers=(1,))
    assert at_level(own, "low", policies) == dataclasses.replace(own, level="low")
    assert at_level(SamplingParams(), "high", policies) == SamplingParams(level="high")
    assert all(not policy.cost and not policy.relax and policy.layers is None for policy in EXACT.values())


# ---- lossy levels


MODEL = SimpleNamespace(name="m", weights_id="w", shadow_id="s", config=SimpleNamespace(name="tiny", n_layers=12))


def calibrate(monkeypatch, tmp_path, margin, subset):
    monkeypatch.setattr(levels, "RELAXED", tmp_path)
    data = {"weights_id": "w", "shadow_id": "s", "margin": margin, "bound": 0.031, "confidence": 0.95, "prompts": 80}
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    skips = subset and SimpleNamespace(allowed=subset, confidence=0.9, prompts=40)
    monkeypatch.setattr(skipping, "skips_for", lambda model: skips)


SUBSET = SimpleNamespace(layers=tuple(range(11)), bound=0.044)


def test_lossy_levels_use_what_was_calibrated(monkeypatch, tmp_path):
    calibrate(monkeypatch, tmp_path, 0.4, SUBSET)
    found = lossy_policies(MODEL)
    relaxed = "drafts up to 0.4 nats below the best stand, at most 3.1% other tokens with 95% confidence (80 prompts)"
    skipped = "11 of 12 layers, at most 4.4% other tokens with 90% confidence (40 prompts)"
    assert found["minimal"] == Policy("auto", 0.4, SUBSET.layers, f"{relaxed}; {skipped}")
    assert found["low"] == Policy("auto", 0.4, None, relaxed)
    assert {name: found[name] for name in ("medium", "high")} == {name: EXACT[name] for name in ("medium", "high")}


def test_lossy_levels_with_one_of_both(monkeypatch, tmp_path):
    calibrate(monkeypatch, tmp_path, 0.0, SUBSET)
    found = lossy_policies(MODEL)
    assert found["minimal"].layers == SUBSET.layers and not found["minimal"].relax and found["low"] == EXACT["low"]
    calibrate(monkeypatch, tmp_path, 0.2, None)
    assert lossy_policies(MODEL)["minimal"].layers is None


@pytest.mark.parametrize("skips", [None, SimpleNamespace(allowed=None)])
def test_lossy_levels_that_would_change_nothing_are_refused(monkeypatch, tmp_path, skips):
    calibrate(monkeypatch, tmp_path, 0.0, None)
    monkeypatch.setattr(skipping, "skips_for", lambda model: skips)
    with pytest.raises(ValueError, match="no lossy setting of tiny is within its bound; supported: exact levels"):
        lossy_policies(MODEL)
    monkeypatch.setattr(levels, "RELAXED", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not calibrated for tiny; supported: exact levels"):
        lossy_policies(MODEL)
