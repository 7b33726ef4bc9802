"""Thoughts in the engine: the budget is met to the token, what follows is what the model says then, however it ran."""

from __future__ import annotations

import dataclasses

import pytest

from umbra.serving.engine import SamplingParams
from umbra.serving.engine.thoughts import Thinking

PROMPT = [5, 17, 300, 8, 41, 17, 300, 8, 77, 260]
CLOSE = ((400, 401),)
CONCLUDE = (410, 411, 412, 400, 401)
THINKING = Thinking(10, CLOSE, CONCLUDE)
GREEDY = SamplingParams(max_tokens=40)


def run(engine, params, prompt=PROMPT):
    """Ids, thought, answer and the last emission."""
    emissions = list(engine.stream(prompt, params))
    ids = [token for emission in emissions for token in emission.token_ids]
    return ids, "".join(e.thought for e in emissions), "".join(e.text for e in emissions), emissions[-1]


def text(engine, ids):
    return engine.model.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def plain(tiny_engine):
    """What the model says without thinking."""
    return run(tiny_engine, GREEDY)[0]


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}]
)
def test_the_conclusion_comes_exactly_at_the_budget(tiny_engine, how):
    params = dataclasses.replace(GREEDY, **how)
    free = run(tiny_engine, params)[0]
    ids, thought, answer, last = run(tiny_engine, dataclasses.replace(params, thinking=THINKING))
    at = THINKING.budget + len(CONCLUDE)
    assert ids[: THINKING.budget] == free[: THINKING.budget]
    assert tuple(ids[THINKING.budget : at]) == CONCLUDE
    assert len(ids) == 40 and last.finish_reason == "max_tokens"
    assert (last.usage.completion_tokens, last.usage.thought_tokens) == (40, at)
    assert thought == text(tiny_engine, [*ids[: THINKING.budget], *CONCLUDE[:3]]).strip()
    assert answer == text(tiny_engine, ids[at:]).lstrip()


def test_the_answer_is_what_follows_the_thoughts(tiny_engine):
    ids = run(tiny_engine, dataclasses.replace(GREEDY, thinking=THINKING))[0]
    at = THINKING.budget + len(CONCLUDE)
    after = run(tiny_engine, SamplingParams(max_tokens=40 - at), [*PROMPT, *ids[:at]])[0]
    assert ids[at:] == after


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("budget", [1, 2, 10, 29])
def test_drafting_and_neighbours_change_nothing(tiny_engine, how, budget):
    thinking = dataclasses.replace(THINKING, budget=budget)
    params = dataclasses.replace(GREEDY, thinking=thinking, **how)
    alone = run(tiny_engine, dataclasses.replace(params, draft="off"))[0]
    assert run(tiny_engine, dataclasses.replace(params, draft="lookup"))[0] == alone
    others = [dataclasses.replace(params, thinking=None), dataclasses.replace(params, draft="off"), params]
    many = tiny_engine.generate([PROMPT, PROMPT, PROMPT, PROMPT[1:]], [*others, params])
    assert list(many[1].token_ids) == list(many[2].token_ids) == alone
    assert list(many[0].token_ids) != alone


def test_thoughts_that_end_by_themselves_are_not_concluded(tiny_engine, plain):
    close = (tuple(plain[4:6]),)
    ends = next(i for i in range(2, len(plain)) if tuple(plain[i - 2 : i]) == close[0])
    thinking = Thinking(10, close, (499, *close[0]))
    ids, thought, answer, last = run(tiny_engine, dataclasses.replace(GREEDY, thinking=thinking))
    assert ids == plain and last.usage.thought_tokens == ends
    assert thought == text(tiny_engine, plain[: ends - 2]).strip()
    assert answer == text(tiny_engine, plain[ends:]).lstrip()


def test_tokens_may_run_out_among_the_thoughts(tiny_engine, plain):
    for most in (1, 9, 10, 12, 15, 16):
        params = SamplingParams(max_tokens=most, thinking=THINKING)
        ids, _, answer, last = run(tiny_engine, params)
        assert len(ids) == most and last.finish_reason == "max_tokens"
        assert last.usage.thought_tokens == min(most, 15)
        assert ids == [*plain[:10], *CONCLUDE, *ids[15:]][:most]
        assert bool(answer) == (most > 15)


def test_stop_strings_among_the_thoughts_do_not_stop(tiny_engine, plain):
    stop = text(tiny_engine, plain[3:4])
    params = dataclasses.replace(GREEDY, thinking=THINKING, stop=(stop,))
    ids, thought, answer, last = run(tiny_engine, params)
    assert stop in thought and stop not in answer
    assert last.usage.thought_tokens == 15 and len(ids) >= 15


def test_the_models_end_among_the_thoughts_begins_their_conclusion(tiny_engine, plain):
    first = plain.index(plain[6])
    params = dataclasses.replace(GREEDY, thinking=THINKING, stop_token_ids=(plain[6],))
    ids, thought, _, last = run(tiny_engine, params)
    assert ids[:first] == plain[:first] and tuple(ids[first : first + 5]) == CONCLUDE
    assert last.usage.thought_tokens == first + 5 and last.usage.completion_tokens > first + 5
    assert thought == text(tiny_engine, [*ids[:first], *CONCLUDE[:3]]).strip()


def test_choices_think_each_for_themselves(tiny_engine):
    params = dataclasses.replace(GREEDY, thinking=THINKING, temperature=1.0, seed=11)
    found = [run(tiny_engine, one) for one in tiny_engine.choice_params(params, 3)]
    assert len({tuple(ids) for ids, *_ in found}) == 3
    assert all(tuple(ids[10:15]) == CONCLUDE and last.usage.thought_tokens == 15 for ids, _, _, last in found)


def test_a_paused_thought_is_taken_up(random_model):
    """With blocks for less than both, one is paused among its thoughts and goes on as if nothing was."""
    from umbra.configs.engine import EngineConfig
    from umbra.serving.engine import Engine

    params = SamplingParams(max_tokens=150, thinking=dataclasses.replace(THINKING, budget=135))
    prompts = [[i, *PROMPT] for i in (1, 2)]
    with Engine(random_model("tiny"), EngineConfig(slots=2, context_length=256, blocks=4, prefill_chunk=32)) as engine:
        engine.start(warm=False)
        many = [list(one.token_ids) for one in engine.generate(prompts, params)]
        assert engine.stats().preemptions > 0
        alone = [list(engine.generate([prompt], params)[0].token_ids) for prompt in prompts]
    assert many == alone and all(tuple(ids[135:140]) == CONCLUDE for ids in many)
