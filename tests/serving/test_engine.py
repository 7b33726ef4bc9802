"""The engine on the tiny trunk: what it emits, how requests end, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from umbra.configs.engine import EngineConfig
from umbra.model.trunk import logits
from umbra.serving.engine import Emission, Engine, EngineStopped, PromptTooLong, QueueFull, SamplingParams
from umbra.serving.engine.scheduler import Turns

PROMPT = [7, 30, 99, 250, 301, 12]


def one(engine: Engine, prompt: list[int] = PROMPT, **params: object):
    return engine.generate([prompt], SamplingParams(**params))[0]  # type: ignore[arg-type]


def wait_idle(engine: Engine, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while engine.stats().running or engine.stats().waiting or engine.stats().paused:
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma"])
def test_greedy_follows_the_whole_sequence_logits(name: str, random_model: Callable) -> None:
    model = random_model(name)
    config = EngineConfig(slots=2, context_length=256, blocks=9, prefill_chunk=32)
    prompt = np.random.default_rng(1).integers(0, 512, 140).tolist()
    with Engine(model, config) as engine:
        engine.start(warm=False)
        answer = one(engine, prompt, max_tokens=20)
    whole = np.asarray(logits(model.config, model.params, np.array(prompt + list(answer.token_ids))))
    assert whole[139:159].argmax(-1).tolist() == list(answer.token_ids)


def test_usage_timings_and_text(tiny_engine: Engine) -> None:
    answer = one(tiny_engine, max_tokens=9)
    assert answer.usage.prompt_tokens == len(PROMPT) and answer.usage.completion_tokens == 9
    assert answer.finish_reason == "max_tokens"
    assert answer.text == tiny_engine.model.tokenizer.decode(list(answer.token_ids))
    assert 0 < answer.timings.queued <= answer.timings.ttft <= answer.timings.total
    assert answer.timings.passes + sum(n for _, n in answer.timings.accepted) == 9


def test_what_prompts_have_in_common_within_a_block_is_computed_once(random_model: Callable) -> None:
    """Beginnings that end within a block, of prompts and of an answer; every answer as if it came alone."""
    model = random_model("tiny")
    config = EngineConfig(slots=2, context_length=512, blocks=20, prefill_chunk=64)
    rng = np.random.default_rng(3)
    system = rng.integers(1, 512, 185).tolist()
    asked = [system + rng.integers(1, 512, n).tolist() for n in (9, 30, 5, 70)]

    def alone(prompt: list[int]) -> tuple[int, ...]:
        with Engine(model, config) as engine:
            engine.start(warm=False)
            return one(engine, prompt, max_tokens=12).token_ids

    with Engine(model, config) as engine:
        engine.start(warm=False)
        cached = []
        for prompt in asked:
            answer = one(engine, prompt, max_tokens=12)
            assert answer.token_ids == alone(prompt)
            cached.append(answer.usage.cached_tokens)
        assert cached[0] == 0 and all(n >= 185 for n in cached[1:])
        longer = [*asked[2], *one(engine, asked[2], max_tokens=12).token_ids, 77, 78]
        got = one(engine, longer, max_tokens=12)
        assert got.usage.cached_tokens == len(longer) - 3  # the answer's last token was never run
        assert got.token_ids == alone(longer)
        ends: list[tuple[str, Emission]] = []
        params = SamplingParams(max_tokens=2)
        other = engine.submit(asked[0], params, sink=lambda pairs: ends.extend(pairs), principal="b")
        deadline = time.monotonic() + 20
        while not any(one == other and e.finish_reason for one, e in ends) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ends[-1][1].usage.cached_tokens == 0, "another tenant's blocks"
        engine.check()


def test_stop_ids_end_with_their_token(tiny_engine: Engine) -> None:
    free = one(tiny_engine, max_tokens=12)
    at = 5
    stopped = one(tiny_engine, max_tokens=12, stop_token_ids=(free.token_ids[at],))
    first = free.token_ids.index(free.token_ids[at])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop_token"


def test_model_end_ids_and_ignore_eos(random_model: Callable, tiny_engine: Engine) -> None:
    free = one(tiny_engine, max_tokens=12)
    eos = free.token_ids[3]
    config = EngineConfig(slots=2, context_length=256, blocks=9, prefill_chunk=32)
    with Engine(random_model("tiny", eos_ids=(eos,)), config) as engine:
        engine.start(warm=False)
        assert one(engine, max_tokens=12).finish_reason == "stop_token"
        assert one(engine, max_tokens=12, ignore_eos=True).token_ids == free.token_ids


def test_as_many_stop_ids_as_allowed_beside_the_models_own(random_model: Callable) -> None:
    config = EngineConfig(slots=2, context_length=256, blocks=9, prefill_chunk=32)
    with Engine(random_model("tiny", eos_ids=tuple(range(400, 416))), config) as engine:
        engine.start(warm=False)
        assert one(engine, max_tokens=4, stop_token_ids=tuple(range(100, 116))).finish_reason
        with pytest.raises(ValueError, match="at most 16 stop token ids"):
            SamplingParams(stop_token_ids=tuple(range(17)))
    with pytest.raises(ValueError, match="17 end ids; at most 16"):
        Engine(random_model("tiny", eos_ids=tuple(range(17))), config)


def test_generate_waits_for_room_and_cleans_up(tiny_engine: Engine) -> None:
    others = []
    with pytest.raises(QueueFull):
        while True:
            others.append(tiny_engine.submit(PROMPT, SamplingParams(max_tokens=900), sink=lambda pairs: None))
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.extend(tiny_engine.generate([PROMPT], SamplingParams(max_tokens=3)))
    )
    waiting.start()
    time.sleep(0.2)
    for request in others:
        tiny_engine.cancel(request)
    waiting.join(30)
    assert len(answers[0].token_ids) == 3
    with pytest.raises(PromptTooLong):
        tiny_engine.generate([PROMPT, [1] * 2000], SamplingParams(max_tokens=900))
    wait_idle(tiny_engine)


def test_stop_strings_never_leak(tiny_engine: Engine) -> None:
    free = one(tiny_engine, max_tokens=30)
    for start in range(0, len(free.text) - 4, 3):
        stop = free.text[start : start + 4]
        emissions = list(tiny_engine.stream(PROMPT, SamplingParams(max_tokens=30, stop=(stop, "never seen"))))
        text = "".join(e.text for e in emissions)
        assert text == free.text[: free.text.index(stop)]
        assert emissions[-1].finish_reason == "stop_string"


def test_context_end_has_its_own_reason(tiny_engine: Engine) -> None:
    prompt = [i % 500 for i in range(1000)]
    for params in ({}, {"max_tokens": 10_000}):
        answer = one(tiny_engine, prompt, **params)
        assert answer.finish_reason == "context_length"
        assert len(answer.token_ids) == 24
    assert one(tiny_engine, prompt, max_tokens=24).finish_reason == "max_tokens"
    assert len(one(tiny_engine, [1] * 1023).token_ids) == 1


def test_refusals_name_what_is_wrong(tiny_engine: Engine) -> None:
    def submit(prompt: list[int], **params: object) -> None:
        tiny_engine.submit(prompt, SamplingParams(**params), sink=lambda pairs: None)  # type: ignore[arg-type]

    with pytest.raises(PromptTooLong, match="1024 tokens; this server's context is 1024"):
        submit([1] * 1024)
    with pytest.raises(ValueError, match="empty"):
        submit([])
    with pytest.raises(ValueError, match="prompt has a token id outside 0 to 511"):
        submit([1, 512])
    with pytest.raises(ValueError, match="logit_bias has a token id outside"):
        submit([1], logit_bias=((-1, 1.0),))
    for bad in (
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1},
        {"max_tokens": 0}, {"top_k": -1}, {"presence_penalty": 3.0}, {"repetition_penalty": 0.0}, {"logprobs": 21},
        {"stop": ("",)}, {"seed": 2**64}, {"logit_bias": ((1, float("inf")),)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad)).split("_")[0]):
            SamplingParams(**bad)  # type: ignore[arg-type]
    wait_idle(tiny_engine)


def test_request_ids_are_unique_while_in_use(tiny_engine: Engine) -> None:
    tiny_engine.submit(PROMPT, SamplingParams(max_tokens=300), sink=lambda pairs: None, request_id="same")
    with pytest.raises(ValueError, match="in use"):
        tiny_engine.submit(PROMPT, SamplingParams(max_tokens=1), sink=lambda pairs: None, request_id="same")
    tiny_engine.cancel("same")
    tiny_engine.cancel("same")
    tiny_engine.cancel("unknown")
    wait_idle(tiny_engine)


def test_seeds_reproduce_and_differ(tiny_engine: Engine) -> None:
    runs = [one(tiny_engine, temperature=1.0, seed=seed, max_tokens=16).token_ids for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    choices = tiny_engine.choice_params(SamplingParams(temperature=1.0, seed=1, max_tokens=16), 3)
    answers = tiny_engine.generate([PROMPT] * 3, choices)
    assert answers[0].token_ids == runs[0]
    assert len({answer.token_ids for answer in answers}) == 3


def test_penalties_and_bias_act(tiny_engine: Engine) -> None:
    free = one(tiny_engine, max_tokens=30)
    banned = free.token_ids[0]
    assert banned not in one(tiny_engine, max_tokens=30, logit_bias=((banned, -100.0),)).token_ids
    assert set(one(tiny_engine, max_tokens=10, logit_bias=((5, 100.0),)).token_ids) == {5}
    spread = one(tiny_engine, max_tokens=30, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(spread.token_ids)) > len(set(free.token_ids))


def test_logprobs(tiny_engine: Engine) -> None:
    answer = one(tiny_engine, max_tokens=8, logprobs=5)
    model = tiny_engine.model
    ids, device = np.array(PROMPT + list(answer.token_ids)), tiny_engine.device
    whole = np.asarray(logits(model.config, model.params, ids, kernels=device.kernels, kv=device.kv), np.float64)
    expected = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    assert len(answer.logprobs) == 8
    for i, entry in enumerate(answer.logprobs):
        row = expected[len(PROMPT) - 1 + i]
        assert entry.token_id == answer.token_ids[i]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:5].tolist()
    assert one(tiny_engine, max_tokens=3).logprobs == ()
    assert one(tiny_engine, max_tokens=3, logprobs=0).logprobs[0].top == ()


def test_cancel_frees_within_three_steps(tiny_engine: Engine) -> None:
    wait_idle(tiny_engine)
    for wait_for in (0, 1, 3):  # emissions: 0 is during the prompt, which takes four steps
        emissions: list[Emission] = []
        request = tiny_engine.submit(
            PROMPT * 20,
            SamplingParams(max_tokens=800),
            sink=lambda pairs, got=emissions: got.extend(e for _, e in pairs),
        )
        while not tiny_engine.stats().running or len(emissions) < wait_for:
            time.sleep(0)
        before = tiny_engine.stats().steps
        tiny_engine.cancel(request)
        while tiny_engine.stats().running:
            time.sleep(0)
        assert tiny_engine.stats().steps - before <= 3
    stats = tiny_engine.stats()
    assert stats.free_slots == stats.total_slots and stats.used_blocks == 0


def test_cancelled_requests_say_so(tiny_engine: Engine) -> None:
    ends: dict[str, Emission] = {}

    def sink(pairs) -> None:
        ends.update({request: emission for request, emission in pairs if emission.finish_reason})

    requests = [tiny_engine.submit(PROMPT, SamplingParams(max_tokens=900), sink=sink) for _ in range(20)]
    for request in requests:
        tiny_engine.cancel(request)
    wait_idle(tiny_engine)
    time.sleep(0.05)
    assert {ends[request].finish_reason for request in requests} == {"cancelled"}


def test_what_is_forgotten_is_not_found(random_model: Callable, tiny_engine: Engine) -> None:
    prompt = [7, 8, 9] * 60
    for cached in (0, 179):
        assert tiny_engine.generate([prompt], SamplingParams(max_tokens=2))[0].usage.cached_tokens == cached
    running = tiny_engine.submit(prompt, SamplingParams(max_tokens=600), sink=lambda pairs: None)
    for _ in range(50):  # beside a request, whose blocks stay
        tiny_engine.forget()
    tiny_engine.cancel(running)
    wait_idle(tiny_engine)
    tiny_engine.forget()
    assert tiny_engine.stats().cached_blocks == 0
    assert tiny_engine.generate([prompt], SamplingParams(max_tokens=2))[0].usage.cached_tokens == 0
    with pytest.raises(EngineStopped):
        Engine(random_model("tiny"), EngineConfig(slots=1, context_length=256, blocks=4)).forget()


def test_full_queue_is_refused_with_a_time(tiny_engine: Engine) -> None:
    requests = []
    with pytest.raises(QueueFull) as refused:
        for _ in range(200):
            requests.append(tiny_engine.submit(PROMPT, SamplingParams(max_tokens=900), sink=lambda pairs: None))
    assert refused.value.retry_after >= 1
    assert len(requests) >= 64
    for request in requests:
        tiny_engine.cancel(request)
    wait_idle(tiny_engine)


def test_an_embedding_is_the_mean_of_the_hidden_states(random_model: Callable, tiny_engine: Engine) -> None:
    """However the prompt is cut into chunks, whoever runs beside it, and whatever is cached."""
    model = random_model("tiny")
    rng = np.random.default_rng(2)
    short, long = rng.integers(0, 512, 5).tolist(), rng.integers(0, 512, 200).tolist()
    embed = SamplingParams(max_tokens=1, embed=True)
    made: dict[str, np.ndarray] = {}

    def sink(pairs: Sequence[tuple[str, Emission]]) -> None:
        made.update({name: emission.embedding for name, emission in pairs if emission.finish_reason})

    for chunk in (32, 128):
        sizes = EngineConfig(
            slots=2, context_length=256, blocks=9, features=True, embeddings=True, prefill_chunk=chunk, draft_rows=0
        )
        with Engine(model, sizes) as engine:
            engine.start(warm=False)
            one(engine, long, max_tokens=2)  # now its blocks could be found
            for name, prompt in (("long", long), ("short", short), ("again", long)):
                engine.submit(prompt, embed, sink=sink, request_id=f"{name} {chunk}")
            wait_idle(engine)
            single = SamplingParams(max_tokens=1)
            rows = [list(engine.stream(short[: n + 1], single))[0].features[0] for n in range(len(short))]
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in made.values()) and len(made) == 6
    for other in ("again 32", "long 128", "again 128"):
        assert np.allclose(made["long 32"], made[other], atol=1e-5)
    weight = np.asarray(model.params["final_norm"], np.float32)
    hidden = np.stack(rows).astype(np.float32)  # float16
    mean = (hidden / np.sqrt((hidden * hidden).mean(1, keepdims=True) + model.config.norm_eps) * weight).mean(0)
    for chunk in (32, 128):
        assert np.allclose(made[f"short {chunk}"], mean / np.linalg.norm(mean), atol=2e-3)
    with pytest.raises(ValueError, match="embeddings need"):
        tiny_engine.submit(short, embed, sink=sink)


def test_priority_is_worth_some_waiting(tiny_engine: Engine) -> None:
    """Who waits is admitted by priority, in the order of arrival among equals."""
    ended: list[str] = []
    lock = threading.Lock()

    def sink(pairs: Sequence[tuple[str, Emission]]) -> None:
        with lock:
            ended.extend(name for name, emission in pairs if emission.finish_reason is not None)

    slots = tiny_engine.config.slots
    running = [tiny_engine.submit(PROMPT, SamplingParams(max_tokens=100), sink=sink) for _ in range(slots)]
    names = {"low": -1, "normal-1": 0, "normal-2": 0, "high": 1}
    for name, priority in names.items():
        tiny_engine.submit(PROMPT, SamplingParams(max_tokens=1), sink=sink, request_id=name, priority=priority)
    tiny_engine.cancel(running[0])  # one slot, so that they come one after the other
    wait_idle(tiny_engine)
    assert [name for name in ended if name in names] == ["high", "normal-1", "normal-2", "low"]


def test_principals_are_admitted_in_turn() -> None:
    """Who sends many at once does not keep the others waiting; what one sends stays in its order."""
    turns = Turns()
    many = [turns.turn("many", 0, 100.0, 1.0) for _ in range(50)]
    few = [turns.turn("few", 0, at, 1.0) for at in (103.5, 103.6)]
    assert many == sorted(many) and few == sorted(few)
    assert sum(turn < few[0] for turn in many) == 4 and sum(turn < few[1] for turn in many) == 5
    later = turns.turn("many", 0, 1000.0, 1.0)
    assert later == 1000.0, "an old burst is forgotten"
    high, low = (turns.turn("few", priority, 103.7, 1.0) for priority in (1, -1))
    assert high < min(many) and many[18] < low < many[19]
    for i in range(3000):
        turns.turn(str(i), 0, 2000.0 + i, 1.0)
    assert len(turns._next) < 1100


def test_who_waits_waits_for_as_long_as_it_asks_for() -> None:
    """Among the requests of one principal; in the order sent among equals, and never at another's expense."""

    def waiting(turn: float, submitted: float, size: int, principal: str = "a") -> SimpleNamespace:
        return SimpleNamespace(turn=turn, submitted=submitted, size=size, flow=(principal, 0))

    def order(queue: list[SimpleNamespace], now: float) -> list[SimpleNamespace]:
        out = []
        while queue:
            out.append(Turns.first(queue, now))
            queue.remove(out[-1])
        return out

    long = [waiting(float(i), 0.0, 256) for i in range(3)]
    short, other = waiting(3.0, 9.0, 4), waiting(0.5, 9.5, 500, "b")
    assert order([*long, short, other], 10.0) == [short, other, *long], "the other keeps its place"
    assert order([*long, waiting(3.0, 9.99, 4)], 10.0)[:3] == long, "it must have waited for its share"


def test_long_answers_that_hold_all_slots_make_way(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd of one principal keeps a newcomer of the same waiting for a moment only, and loses nothing by it."""
    monkeypatch.setattr("umbra.serving.engine.engine.MAKE_WAY_AFTER", 0.05)
    ends: dict[str, Emission] = {}
    texts: dict[str, list[int]] = {}

    def sink(pairs: Sequence[tuple[str, Emission]]) -> None:
        for name, emission in pairs:
            texts.setdefault(name, []).extend(emission.token_ids)
            if emission.finish_reason is not None:
                ends[name] = emission

    crowd = SamplingParams(max_tokens=900, ignore_eos=True)
    alone = one(tiny_engine, max_tokens=900, ignore_eos=True).token_ids
    before = tiny_engine.stats().preemptions
    names = [tiny_engine.submit(PROMPT, crowd, sink=sink) for _ in range(3 * tiny_engine.config.slots)]
    for _ in range(3):
        answer = one(tiny_engine, max_tokens=2)
        assert answer.finish_reason == "max_tokens" and not ends, "the newcomer has waited for the crowd"
    assert tiny_engine.stats().preemptions > before
    wait_idle(tiny_engine, 120)
    assert all(tuple(texts[name]) == alone for name in names)
    tiny_engine.check()


def test_bursts_with_random_cancels_leak_nothing(tiny_engine: Engine) -> None:
    rng = random.Random(3)
    ends: dict[str, Emission] = {}
    counts: dict[str, int] = {}

    def sink(pairs) -> None:
        for request, emission in pairs:
            assert request not in ends, "an emission after the last one"
            counts[request] = counts.get(request, 0) + len(emission.token_ids)
            if emission.finish_reason:
                ends[request] = emission

    submitted, refused, doomed = [], 0, []
    for i in range(300):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]), max_tokens=rng.randint(1, 30), top_p=rng.choice([1.0, 0.8]),
            seed=i, logprobs=rng.choice([None, 3]),
        )  # fmt: skip
        prompt = [rng.randrange(512) for _ in range(rng.choice([1, 5, 40, 300]))]
        try:
            submitted.append(tiny_engine.submit(prompt, params, sink=sink))
        except QueueFull:
            refused += 1
            time.sleep(0.05)
            continue
        if rng.random() < 0.3:
            doomed.append(submitted[-1])
        if doomed and rng.random() < 0.5:
            tiny_engine.cancel(doomed.pop(0))
    for request in doomed:
        tiny_engine.cancel(request)
    wait_idle(tiny_engine, 60)
    time.sleep(0.05)
    assert len(submitted) + refused == 300
    assert set(ends) == set(submitted)
    for request, end in ends.items():
        assert end.usage is not None and end.usage.completion_tokens == counts[request]
    stats = tiny_engine.stats()
    assert stats.free_slots == stats.total_slots and stats.used_blocks == 0
    tiny_engine.check()


def test_nothing_compiles_after_ready(tiny_engine: Engine) -> None:
    before = tiny_engine.stats().compilations_after_ready
    rng = random.Random(5)
    prompts, params = [], []
    for i in range(200):
        prompts.append([rng.randrange(512) for _ in range(rng.choice([1, 2, 31, 32, 33, 127, 128, 129, 400]))])
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.5, 1.5]),
                top_k=rng.choice([0, 1, 40]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.1]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                logit_bias=rng.choice([(), ((3, 5.0),)]),
                seed=i,
                max_tokens=rng.randint(1, 8),
                logprobs=rng.choice([None, 0, 20]),
                stop=rng.choice([(), ("w3",)]),
            )  # fmt: skip
        )
    answers = tiny_engine.generate(prompts, params)
    assert len(answers) == 200
    assert tiny_engine.stats().compilations_after_ready == before


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one(tiny_engine, max_tokens=5).token_ids
    original = tiny_engine.device.run

    def fail(*args: object) -> None:
        monkeypatch.setattr(tiny_engine.device, "run", original)
        raise RuntimeError("out of memory\nwith details")

    monkeypatch.setattr(tiny_engine.device, "run", fail)
    last = list(tiny_engine.stream(PROMPT, SamplingParams(max_tokens=5)))[-1]
    assert last.finish_reason == "error" and last.error == "the step failed: RuntimeError: out of memory"
    assert one(tiny_engine, max_tokens=5).token_ids == expected
    wait_idle(tiny_engine)
    tiny_engine.check()


@pytest.fixture
def unstarted(random_model: Callable) -> Iterator[Engine]:
    with Engine(random_model("tiny"), EngineConfig(slots=2, context_length=256, blocks=9)) as engine:
        yield engine


def test_life_cycle(unstarted: Engine) -> None:
    assert not unstarted.ready
    with pytest.raises(EngineStopped, match="not running"):
        unstarted.submit([1], SamplingParams(), sink=lambda pairs: None)
    unstarted.start(warm=False)
    with pytest.raises(RuntimeError, match="already started"):
        unstarted.start()
    ends = []
    unstarted.submit(PROMPT, SamplingParams(), sink=lambda pairs: ends.extend(e.finish_reason for _, e in pairs))
    unstarted.close()
    assert ends[-1] == "cancelled"
    assert not unstarted.ready
    with pytest.raises(EngineStopped):
        unstarted.submit([1], SamplingParams(), sink=lambda pairs: None)


def test_configuration_errors(random_model: Callable) -> None:
    model = random_model("tiny")
    with pytest.raises(ValueError, match="cannot hold one context of 2048 tokens; 17 blocks"):
        Engine(model, EngineConfig(blocks=4))
    with pytest.raises(ValueError, match="more than the 2048 positions of tiny"):
        Engine(model, EngineConfig(context_length=4096))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_a_long_answer(random_model: Callable) -> None:
    """Its end is what a prompt with all before it leads to, it leaks nothing, and memory grows by no more than it
    takes. Longer ones: UMBRA_TEST_LONG."""
    tokens, tail = int(os.environ.get("UMBRA_TEST_LONG", "3000")), 40
    model = random_model("tiny")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, context_length=tokens + 256))
    sizes = EngineConfig(slots=2, context_length=tokens + 256, blocks=2 * (tokens // 128 + 4))
    resident: list[int] = []
    ids: list[int] = []

    with Engine(model, sizes) as engine:
        engine.start()
        for emission in engine.stream(PROMPT, SamplingParams(max_tokens=tokens, temperature=0.7, seed=1)):
            if len(ids) // 500 != (len(ids) + len(emission.token_ids)) // 500:
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            ids += emission.token_ids
        assert len(ids) == tokens and emission.finish_reason == "max_tokens"
        wait_idle(engine)
        engine.check()
        assert engine.stats().used_blocks == 0
        trunk = model.config
        kv = engine.device.kv.bytes_per_token(trunk.n_layers, trunk.n_kv_heads, trunk.head_dim)
        assert resident[-1] - resident[1] < 20e6 + (200 + kv) * tokens, "memory grew by more than the answer and its KV"
    with Engine(model, sizes) as engine:
        engine.start()
        known = [*PROMPT, *ids[:-tail]]
        (again,) = engine.generate([known], SamplingParams(max_tokens=tail, temperature=0.7, seed=1))
    assert list(again.token_ids) == ids[-tail:]
