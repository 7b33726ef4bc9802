"""Invariant 1: a request's ids and raw logits do not depend on batch mates, chunking, sharing, preemption or bursts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from umbra.configs.engine import EngineConfig
from umbra.kernels.backend import choose
from umbra.serving.engine import Completion, Engine, SamplingParams

SHARED = [(i * 37 + 11) % 512 for i in range(300)]


def requests(n: int, seed: int, longest: int = 400) -> list[tuple[list[int], SamplingParams]]:
    """Prompts (some with a common start) and settings of every kind."""
    rng = random.Random(seed)
    made = []
    for i in range(n):
        own = [rng.randrange(512) for _ in range(rng.choice([1, 3, 17, 33, 128, 140]))]
        prompt = (SHARED[: rng.choice([0, 0, 128, 256, 300])] + own)[:longest]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 50]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            logit_bias=rng.choice([(), ((9, 3.0),)]),
            seed=i,
            max_tokens=rng.choice([1, 20, 60]),
            logprobs=rng.choice([None, 2]),
        )
        made.append((prompt, params))
    return made


def answers(engine: Engine, work: list[tuple[list[int], SamplingParams]], digest: bool) -> list[Completion]:
    params = [SamplingParams(**{**vars(p), "digest": digest}) for _, p in work]
    return engine.generate([prompt for prompt, _ in work], params)


def alone(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return [answers(engine, [one], digest=True)[0] for one in work]


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.token_ids == b.token_ids, f"request {i}: ids differ"
        if a.digests:
            assert a.digests == b.digests, f"request {i}: same ids, other logits"
        assert a.text == b.text and a.finish_reason == b.finish_reason


# The last six answers outgrow the blocks they were admitted with.
WORK = requests(20, seed=1) + [
    (SHARED[i : i + 90], SamplingParams(temperature=i % 2, seed=i, max_tokens=220 + i)) for i in range(6)
]


KINDS = [("tiny-gemma", "xla", "none"), ("tiny-gemma", "cpu", "none"), ("tiny", "cpu", "int4")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def expected(request: pytest.FixtureRequest, random_model: Callable) -> tuple[object, list[Completion]]:
    """Every request alone, on an engine that shares nothing between them."""
    name, kernels, quant = request.param
    model = random_model(name, kernels=kernels, quant=quant)
    config = EngineConfig(slots=1, context_length=512, blocks=6, prefill_chunk=32, logits=True)
    with Engine(model, config) as engine:
        engine.start()
        results = []
        for work in WORK:
            results += answers(engine, [work], digest=True)
            engine.forget()
        assert all(result.usage.cached_tokens == 0 for result in results)
    return model, results


@pytest.fixture(scope="module")
def busy(expected: tuple) -> Iterator[Engine]:
    """Eight slots, plenty of blocks."""
    config = EngineConfig(slots=8, context_length=512, blocks=60, prefill_chunk=100, logits=True)
    with Engine(expected[0], config) as engine:
        engine.start()
        yield engine


def test_in_a_batch_with_shared_prefixes(busy: Engine, expected: tuple) -> None:
    got = answers(busy, WORK, digest=True)
    assert_same(got, expected[1])
    assert sum(answer.usage.cached_tokens for answer in got) > 0, "no prefix was shared"
    assert_same(answers(busy, WORK[::-1], digest=False)[::-1], expected[1])


def test_with_cancelled_batch_mates(busy: Engine, expected: tuple) -> None:
    stop = threading.Event()

    def disturb() -> None:
        rng = random.Random(9)
        while not stop.is_set():
            emissions = busy.stream(
                [rng.randrange(512) for _ in range(rng.randint(1, 200))], SamplingParams(max_tokens=50)
            )
            for _ in range(rng.randint(1, 5)):
                next(emissions)
            emissions.close()  # type: ignore[attr-defined]

    mates = [threading.Thread(target=disturb) for _ in range(3)]
    for mate in mates:
        mate.start()
    try:
        assert_same(answers(busy, WORK, digest=True), expected[1])
    finally:
        stop.set()
        for mate in mates:
            mate.join()


def test_with_preemption_and_bursts(expected: tuple) -> None:
    """Blocks for about two sequences, six slots, and four passes in one device loop."""
    config = EngineConfig(slots=6, context_length=512, blocks=8, prefill_chunk=48, decode_steps=4)
    with Engine(expected[0], config) as engine:
        engine.start()
        assert_same(answers(engine, WORK, digest=False), expected[1])
        assert engine.stats().preemptions > 0, "nothing was paused"
        with pytest.raises(ValueError, match="logits=True"):
            answers(engine, WORK[:1], digest=True)
        engine.check()
        assert engine.stats().used_blocks == 0


def test_continuing_from_own_answer_uses_its_blocks(busy: Engine) -> None:
    """KV written while decoding and KV written by a prompt are the same bytes."""
    prompt, params = SHARED[:100], SamplingParams(max_tokens=200, digest=True)
    first = answers(busy, [(prompt, params)], digest=True)[0]
    longer = prompt + list(first.token_ids[:190])
    again = SamplingParams(max_tokens=10)
    cached = answers(busy, [(longer, again)], digest=True)[0]
    assert cached.usage.cached_tokens == 289
    assert cached.token_ids == first.token_ids[190:] and cached.digests == first.digests[190:]
    busy.forget()
    computed = answers(busy, [(longer, again)], digest=True)[0]
    assert computed.usage.cached_tokens == 0
    assert computed.digests == cached.digests


@pytest.mark.real
def test_the_default_model_alone_and_in_a_batch() -> None:
    from umbra.configs.prompt_sets import DEFAULT, load_prompts
    from umbra.model.load import load_model

    model = load_model("smollm2", kernels=choose("cpu").kernels)
    assert model.chat_template is not None
    prompts = [
        model.chat_template.encode(model.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in load_prompts(DEFAULT)[:8]
    ]
    work = [
        (prompt, SamplingParams(temperature=0.8 * (i % 2), top_p=0.95, seed=i, max_tokens=16 + i))
        for i, prompt in enumerate(prompts)
    ]
    with Engine(model, EngineConfig(slots=8, context_length=2048, kv_memory=0.5, logits=True)) as engine:
        engine.start()
        expected = alone(engine, work)
        engine.forget()
        assert_same(answers(engine, work, digest=True), expected)
