"""Drafting changes how many tokens come out of a pass, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.configs.engine import EngineConfig
from umbra.kernels.draft import SHADOW
from umbra.model.load import Model
from umbra.serving.engine import Engine, SamplingParams
from umbra.serving.engine.blocking import Completion
from umbra.serving.engine.prediction import came_true
from umbra.serving.engine.request import Usage
from umbra.serving.engine.thoughts import Thinking

BASE = EngineConfig(slots=4, context_length=512, blocks=40, prefill_chunk=48, logits=True)
REPEATING = [3, 1, 4, 1, 5, 9, 2, 6] * 6


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(512) for _ in range(5 + 9 * i)] for i in range(5)] + [REPEATING]


ASKED = {
    "greedy": SamplingParams(max_tokens=50, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=40, temperature=0.8, seed=5),
    "hot": SamplingParams(max_tokens=40, temperature=2.0, seed=3, stop_token_ids=tuple(range(16))),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.7, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=7, logprobs=2
    ),
    "greedy penalties": SamplingParams(max_tokens=40, repetition_penalty=1.1, presence_penalty=0.2),
    "bias": SamplingParams(max_tokens=40, logit_bias=((65, -50.0), (66, 3.0))),
    "stop string": SamplingParams(max_tokens=50, stop=(" w300", "A", "zz")),
    "layers": SamplingParams(max_tokens=40, layers=(0, 1)),
    "log-probabilities": SamplingParams(max_tokens=30, logprobs=3),
}


def answers(engine: Engine, params: SamplingParams, digest: bool = True) -> list[Completion]:
    return engine.generate(prompts(), dataclasses.replace(params, digest=digest))


def uncached(usage: Usage) -> Usage:
    """Where the KV of a prompt came from depends on who was there before."""
    return dataclasses.replace(usage, cached_tokens=0, cached_by_tier=())


def same(got: list[Completion], expected: list[Completion], digest: bool = True) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.token_ids == b.token_ids and a.text == b.text and a.finish_reason == b.finish_reason
        assert a.logprobs == b.logprobs and uncached(a.usage) == uncached(b.usage)
        assert not digest or a.digests == b.digests


@pytest.fixture(scope="module")
def model(random_model: Callable, random_shadow: Callable) -> Model:
    loaded = random_model("tiny")
    return dataclasses.replace(loaded, shadow=random_shadow(512, loaded.config.d_model))


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[str, list[Completion]]:
    """What the trunk says alone."""
    with Engine(model, dataclasses.replace(BASE, draft_rows=0)) as engine:
        engine.start(warm=False)
        return {name: answers(engine, params) for name, params in ASKED.items()}


@pytest.fixture(scope="module")
def drafting(model: Model) -> Iterator[Engine]:
    with Engine(model, dataclasses.replace(BASE, draft_rows=24)) as engine:
        engine.start()
        yield engine
        engine.check()


CASES = [("auto", asked) for asked in ASKED]
CASES += [(draft, asked) for draft in ("lookup", "shadow", "off") for asked in ("greedy", "penalties")]


@pytest.mark.parametrize(("draft", "asked"), CASES)
def test_answers_are_those_of_the_trunk(draft: str, asked: str, drafting: Engine, expected: dict) -> None:
    got = answers(drafting, dataclasses.replace(ASKED[asked], draft=draft))  # type: ignore[arg-type]
    same(got, expected[asked])
    drafted = sum(answer.timings.drafted for answer in got)
    if draft == "off":
        assert drafted == 0 and all(not answer.timings.accepted for answer in got)
    for answer in got:
        assert sum(n for _, n in answer.timings.accepted) == len(answer.token_ids) - answer.timings.passes or (
            answer.finish_reason != "max_tokens"  # what a stop string cut off was accepted as well
        )


def test_copies_come_several_at_a_time(drafting: Engine) -> None:
    greedy = SamplingParams(max_tokens=200, ignore_eos=True)
    (answer,) = drafting.generate([REPEATING], greedy)
    assert len(answer.token_ids) / answer.timings.passes > 1.5, "a small random trunk falls into a loop"
    assert dict(answer.timings.accepted)["lookup"] > 50


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(slots=1, context_length=512, blocks=6, logits=True),
        EngineConfig(slots=3, context_length=512, blocks=6, prefill_chunk=16),
        EngineConfig(slots=6, context_length=512, blocks=7, draft_rows=90, decode_steps=3),
        EngineConfig(slots=2, context_length=512, blocks=40, draft_length=5),
    ],
    ids=["one slot", "pauses", "bursts", "fixed length"],
)
def test_on_other_engines(config: EngineConfig, model: Model, expected: dict) -> None:
    with Engine(model, config) as engine:
        engine.start(warm=False)
        for name in ("greedy", "penalties", "layers"):
            same(answers(engine, ASKED[name], config.logits), expected[name], config.logits)
        engine.check()
        assert engine.stats().used_blocks == 0


def test_the_shadow_is_not_asked_where_rows_are_too_dear(model: Model, expected: dict) -> None:
    with Engine(model, dataclasses.replace(BASE, draft_rows=24)) as engine:
        engine.start(warm=False)
        rows = np.arange(engine.device.rows + 2, dtype=np.float32)
        for cost, asks in ((np.ones_like(rows), True), (0.1 + rows, False)):
            engine.device.set_cost(cost)
            got = answers(engine, dataclasses.replace(ASKED["greedy"], draft="shadow"))
            same(got, expected["greedy"])
            assert any(completion.timings.drafted for completion in got) == asks


def test_mixed_in_one_batch(drafting: Engine, expected: dict) -> None:
    """Every kind of request at once, drafting or not."""
    work = [(name, i) for i in range(len(prompts())) for name in ASKED]
    random.Random(3).shuffle(work)
    sources = ("auto", "off", "lookup", "shadow")
    params = [
        dataclasses.replace(ASKED[name], digest=True, draft=sources[n % 4])  # type: ignore[arg-type]
        for n, (name, _) in enumerate(work)
    ]
    got = drafting.generate([prompts()[i] for _, i in work], params)
    for (name, i), answer in zip(work, got, strict=True):
        same([answer], [expected[name][i]])


def test_relaxed_acceptance_is_what_is_asked_for(drafting: Engine, expected: dict) -> None:
    """With a wide margin every drafted token stands; the answer is another one, and greedy rows only are relaxed."""
    params = dataclasses.replace(ASKED["greedy"], relax=100.0)
    got = answers(drafting, params)
    assert any(a.token_ids != b.token_ids for a, b in zip(got, expected["greedy"], strict=True))
    seeded = dataclasses.replace(ASKED["seeded"], relax=100.0, draft="off")
    same(answers(drafting, seeded), expected["seeded"])


def test_what_cannot_be_is_refused(random_model: Callable, drafting: Engine) -> None:
    with Engine(random_model("tiny"), dataclasses.replace(BASE, logits=False)) as engine:
        engine.start(warm=False)
        assert engine._intake._sources("auto") & SHADOW == 0
        with pytest.raises(ValueError, match="'shadow' is not possible with tiny here; possible: auto, off, lookup"):
            engine.generate([[1, 2]], SamplingParams(draft="shadow"))
    with pytest.raises(ValueError, match="supported: auto, off, lookup, shadow"):
        SamplingParams(draft="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers are numbered 0 to"):
        drafting.generate([[1, 2]], SamplingParams(layers=(0, 99)))
    with pytest.raises(ValueError, match="ascending"):
        SamplingParams(layers=(1, 0))


CLOSE = ((500, 501), (502,))
THINKING = Thinking(budget=9, close=CLOSE, conclude=(7, 8, 500, 501))


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_thoughts_end_at_their_budget(draft: str, drafting: Engine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, thinking=THINKING, draft=draft)  # type: ignore[arg-type]
    for prompt, answer in zip(prompts(), answers(drafting, params), strict=True):
        ids = list(answer.token_ids)
        assert ids[9:13] == [7, 8, 500, 501] and answer.usage.thought_tokens == 13
        assert answer.usage.completion_tokens == 40
        plain = drafting.generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True, draft="off"))[0]
        assert ids[:9] == list(plain.token_ids), "thoughts are what the model says anyway"
        again = SamplingParams(max_tokens=27, ignore_eos=True, draft="off")
        rest = drafting.generate([[*prompt, *ids[:13]]], again)[0]
        assert ids[13:] == list(rest.token_ids), "the answer follows from prompt, thoughts and conclusion"


def test_thoughts_that_end_by_themselves(drafting: Engine) -> None:
    """The model writes what ends thoughts: here, a token that it says early."""
    prompt = prompts()[1]
    plain = drafting.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    end = next(i for i in range(1, 30) if plain[i] != plain[0])
    thinking = Thinking(budget=29, close=((plain[end],),), conclude=(9, plain[end]))
    for draft in ("off", "auto"):
        got = drafting.generate(
            [prompt],
            SamplingParams(max_tokens=30, ignore_eos=True, thinking=thinking, draft=draft),  # type: ignore[arg-type]
        )[0]
        assert got.token_ids == plain and got.usage.thought_tokens == end + 1


def test_the_end_of_the_text_among_thoughts_starts_their_conclusion(model: Model, drafting: Engine) -> None:
    prompt = prompts()[2]
    plain = drafting.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    at = next(i for i in range(1, 30) if plain[i] not in plain[:i])
    for draft in ("off", "auto"):
        got = drafting.generate(
            [prompt],
            SamplingParams(
                max_tokens=30, stop_token_ids=(plain[at],), thinking=THINKING.__class__(25, CLOSE, (7, 8, 502)),
                draft=draft,  # type: ignore[arg-type]
            ),
        )[0]  # fmt: skip
        assert got.token_ids[: at + 3] == (*plain[:at], 7, 8, 502)
        assert got.usage.thought_tokens == at + 3 and len(got.token_ids) > at + 3


def test_thoughts_survive_pauses(model: Model) -> None:
    """Conclusions of sequences that are put aside in the middle of their thoughts."""
    thinking = Thinking(budget=150, close=CLOSE[:1], conclude=(7, 8, 9, 500, 501))
    params = SamplingParams(max_tokens=250, ignore_eos=True, thinking=thinking)
    work = [np.random.default_rng(i).integers(0, 490, 100).tolist() for i in range(4)]
    outcomes = []
    for blocks in (40, 6):
        config = EngineConfig(slots=4, context_length=512, blocks=blocks)
        with Engine(model, config) as engine:
            engine.start(warm=False)
            outcomes.append([(a.token_ids, a.usage.thought_tokens) for a in engine.generate(work, params)])
            assert (engine.stats().preemptions > 0) == (blocks == 6)
    assert outcomes[0] == outcomes[1]
    assert all(tokens[150:155] == (7, 8, 9, 500, 501) and thoughts == 155 for tokens, thoughts in outcomes[0])


def test_a_prediction_changes_no_ids(drafting: Engine, model: Model) -> None:
    """A wrong beginning, most of what comes, an end that does not; and one that there is no room for."""
    prompt = [300 + i for i in range(30)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=9, draft="lookup", ignore_eos=True)
    (plain,) = drafting.generate([prompt], params)
    predicted = (7, 8, 9, *plain.token_ids[4:50], 11, 12)
    (got,) = drafting.generate([prompt], dataclasses.replace(params, prediction=predicted))
    assert got.token_ids == plain.token_ids
    assert dict(got.timings.accepted)["lookup"] > 25 and got.timings.passes < plain.timings.passes - 20
    assert got.usage.accepted_prediction_tokens >= 46
    assert got.usage.accepted_prediction_tokens + got.usage.rejected_prediction_tokens == len(predicted)
    for other in (predicted * 20, (5,) * 2000):
        assert drafting.generate([prompt], dataclasses.replace(params, prediction=other))[0].token_ids == got.token_ids
    with pytest.raises(ValueError, match="prediction has a token id"):
        drafting.generate([prompt], dataclasses.replace(params, prediction=(512,)))


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_what_came_true(prediction: list[int], answer: list[int]) -> None:
    assert came_true(prediction, prediction) == len(prediction)
    assert 0 <= came_true(prediction, answer) <= min(len(prediction), len(answer))
    assert came_true(prediction, [9, *prediction]) >= len(prediction) - 1
    assert came_true([], answer) == came_true(prediction, []) == 0
