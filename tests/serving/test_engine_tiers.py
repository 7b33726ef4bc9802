"""The engine with tiers behind its pool: the same ids wherever KV comes from, nothing lost, nothing foreign."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.configs.engine import BLOCK
from umbra.configs.trunk import RopeScaling
from umbra.kernels.attention import KVFormat
from umbra.model.load import load_model
from umbra.serving.engine import Emission, Engine, SamplingParams
from umbra.serving.engine.blocking import Completion
from umbra.serving.engine.device import Device
from umbra.serving.engine.identity import kv_fingerprint
from umbra.serving.engine.request import KEEPS
from umbra.serving.metrics import EngineMetrics, exposition
from umbra.serving.storage import open_store

sys.path.insert(0, str(Path(__file__).parent))
from tiers import ALWAYS, SMALL, SharedPrograms, ask, prompt_of, running, settle, tiers  # noqa: E402


@pytest.fixture(scope="module")
def model(random_model: Callable[..., object]) -> object:
    return random_model("tiny")


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shared = SharedPrograms()
        patch.setattr(Device, "_get", lambda device, kind: shared(device, kind))
        yield


def test_after_a_restart_the_disk_has_it(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(600)
    with running(model, None) as engine:
        alone = ask(engine, prompt)
    with running(model, tmp_path) as engine:
        first = ask(engine, prompt)
        assert first.token_ids == alone.token_ids and first.usage.cached_tokens == 0
        assert tiers(ask(engine, prompt)) == {"device": 599}
    metrics = EngineMetrics()
    with running(model, tmp_path, metrics=metrics) as engine:
        again = ask(engine, prompt)
        assert again.token_ids == alone.token_ids
        assert tiers(again) == {"disk": 512} and again.usage.cached_tokens == 512
        assert 0 < again.timings.cache < again.timings.ttft
        assert tiers(ask(engine, prompt[:300])) == {"device": 299}
        text = exposition(metrics.registry).decode()
    with running(model, tmp_path) as engine:
        assert tiers(ask(engine, prompt[:300])) == {"disk": 299}, "the beginning of a block, too"
    assert 'ctx_hit_tokens_total{tier="disk"} 512.0' in text
    assert "ctx_resume_ttft_seconds_count 1.0" in text and "ctx_hot_window_seconds_count 1.0" in text
    assert 'ctx_l1_mode{mode="unknown"} 1.0' in text and "ctx_crc_fail_total 0.0" in text


def test_a_stored_conversation_goes_on_at_its_last_token(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    with running(model, tmp_path) as engine:
        first = ask(engine, prompt, 20, keep="conversation")
    longer = [*prompt, *first.token_ids, 5, 6, 7]
    with running(model, None) as engine:
        alone = ask(engine, longer)
    with running(model, tmp_path) as engine:
        second = ask(engine, longer, keep="conversation")
        # The last token of an answer was never run through the trunk.
        assert tiers(second) == {"disk": 219} and second.token_ids == alone.token_ids
        assert tiers(ask(engine, longer)) == {"device": 222}, "no read for what the device has as well"


def test_nothing_kept_leaves_no_trace(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(600)
    with running(model, tmp_path) as engine:
        ask(engine, prompt, keep="nothing")
        assert engine.store.cache.disk.written_bytes == 0
        assert tiers(ask(engine, prompt, keep="nothing")) == {"device": 599}
        assert tiers(ask(engine, prompt)) == {"device": 599}, "now its owner lets it be kept"
        settle(engine)
        assert len(engine.store.cache.disk.index) == 4
    secret = np.asarray(prompt[:8], "<u4").tobytes()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(secret in path.read_bytes() for path in files), "what is looked for would be found"


def test_host_memory_keeps_what_the_pool_gives_up(model: object, tmp_path: Path) -> None:
    prompts = [prompt_of(500, seed) for seed in range(12)]  # the pool has 32 blocks, they fill 36
    with running(model, None) as engine:
        alone = [ask(engine, prompt).token_ids for prompt in prompts]
    with running(model, tmp_path, cache=dataclasses.replace(ALWAYS, memory=64 << 20, disk_quota=0)) as engine:
        for _ in range(2):
            answers = [ask(engine, prompt) for prompt in prompts]
            assert [answer.token_ids for answer in answers] == alone
        assert "memory" in {tier for answer in answers for tier in tiers(answer)}


def test_nobody_finds_what_is_another_s(random_model: Callable[..., object], model: object, tmp_path: Path) -> None:
    prompt, subset = prompt_of(400), tuple(range(1))
    with running(model, tmp_path) as engine:
        ask(engine, prompt, principal="alice")
        ask(engine, prompt, principal="alice", layers=subset)
        assert ask(engine, prompt, principal="bob").usage.cached_tokens == 0
    with running(model, tmp_path) as engine:
        assert ask(engine, prompt, principal="carol").usage.cached_tokens == 0
        assert tiers(ask(engine, prompt, principal="alice")) == {"disk": 384}, "the positive control"
        assert tiers(ask(engine, prompt, principal="alice", layers=subset)) == {"disk": 384}
        assert ask(engine, prompt, principal="carol", layers=subset).usage.cached_tokens == 0
    with running(random_model("tiny", seed=1), tmp_path) as engine:  # other weights
        assert ask(engine, prompt, principal="alice").usage.cached_tokens == 0
    with running(model, tmp_path) as engine:
        assert tiers(ask(engine, prompt, principal="alice")) == {"disk": 384}, "it is still there"


def test_what_decides_the_bytes_of_kv(random_model: Callable[..., object], model: object) -> None:
    def fingerprint(of: object = model, numerics: str = "cpu/native", kv: str = "int8", layers=None, **trunk: object):
        config = dataclasses.replace(of.config, **trunk)
        return kv_fingerprint(dataclasses.replace(of, config=config), numerics, KVFormat(kv), layers)

    same = [fingerprint(), fingerprint(name="other"), fingerprint(of=dataclasses.replace(model, name="another"))]
    assert len(set(same)) == 1, "names decide nothing"
    others = [
        fingerprint(of=random_model("tiny", seed=1)), fingerprint(of=dataclasses.replace(model, tokenizer=None)),
        fingerprint(numerics="cpu/avx2"), fingerprint(kv="float32"), fingerprint(layers=(0, 1)),
        fingerprint(layers=(0,)), fingerprint(rope_theta=5e5), fingerprint(rope_scaling=RopeScaling("linear", 2.0)),
        fingerprint(norm_eps=1e-6), fingerprint(sliding_window=64),
    ]  # fmt: skip
    assert len({*same, *others}) == 1 + len(others)
    with pytest.raises(ValueError, match="layers are numbered 0 to 2"):
        fingerprint(layers=(0, 3))


def test_a_store_of_other_settings_is_refused(model: object, tmp_path: Path) -> None:
    with (
        open_store(tmp_path, model, SMALL, ALWAYS) as store,  # type: ignore[arg-type]
        pytest.raises(ValueError, match="opened for another model"),
    ):
        Engine(model, dataclasses.replace(SMALL, kv="float32"), store=store)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [0, 2, 3])
def test_damaged_blocks_are_computed_again(block: int, model: object, tmp_path: Path) -> None:
    prompt = prompt_of(600)
    with running(model, tmp_path) as engine:
        first = ask(engine, prompt)
        settle(engine)
        where = [
            (entry.place[0].path, entry.place[1].place.offset + 4096 + 100) for entry in engine.store.cache.disk.index
        ]
    path, at = where[block]
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with running(model, tmp_path) as engine:
        again = ask(engine, prompt)
        assert again.token_ids == first.token_ids
        assert tiers(again) == ({"disk": block * BLOCK} if block else {})
        assert sum(engine.store.cache.disk.lost.values()) == 1


def test_cancelled_while_it_loads(model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(900)
    with running(model, tmp_path) as engine:
        first = ask(engine, prompt)
    with running(model, tmp_path, cache=dataclasses.replace(ALWAYS, load_bytes=1)) as engine:
        read = engine.store.cache.disk.read

        def slowly(*args):
            time.sleep(0.02)
            return read(*args)

        monkeypatch.setattr(engine.store.cache.disk, "read", slowly)
        ends: list[str] = []
        for wait in (0.0, 0.01, 0.05, 0.1):
            request = engine.submit(
                prompt, SamplingParams(max_tokens=2), sink=lambda pairs: ends.extend(e.finish_reason for _, e in pairs)
            )
            time.sleep(wait)
            engine.cancel(request)
            settle(engine)
        assert ends[0] == "cancelled" and "error" not in ends
        assert ask(engine, prompt).token_ids == first.token_ids
    assert engine.store.cache.stats().leases == 0


def test_others_go_on_while_one_loads(model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, other = prompt_of(900), prompt_of(20, 1)
    with running(model, tmp_path) as engine:
        first, second = ask(engine, prompt), ask(engine, other, 40)
    with running(model, tmp_path) as engine:
        ask(engine, other, 2)
        gate, read = threading.Event(), engine.store.cache.disk.read
        monkeypatch.setattr(engine.store.cache.disk, "read", lambda *args: (gate.wait(20), read(*args))[1])
        ids: list[int] = []
        params = SamplingParams(max_tokens=12)
        engine.submit(prompt, params, sink=lambda pairs: [ids.extend(e.token_ids) for _, e in pairs])
        assert ask(engine, other, 40).token_ids == second.token_ids
        assert not ids
        gate.set()
        settle(engine)
        assert tuple(ids) == first.token_ids


def test_a_full_disk_and_a_folder_that_cannot_be_written(model: object, small_disk: Path) -> None:
    prompts = [prompt_of(900, seed) for seed in range(6)]
    with running(model, None) as engine:
        alone = [ask(engine, prompt).token_ids for prompt in prompts]
    cache = dataclasses.replace(ALWAYS, disk_quota=1 << 30)
    metrics = EngineMetrics()
    with running(model, small_disk, cache=cache, metrics=metrics) as engine:
        with contextlib.suppress(OSError), (small_disk / "others").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert [ask(engine, prompt).token_ids for prompt in prompts] == alone
        settle(engine)
        assert engine.store.cache.stats().tiers["disk"].read_only is not None
        assert "ctx_l3_readonly 1.0" in exposition(metrics.registry).decode()
    (small_disk / "others").unlink()
    with running(model, small_disk, cache=cache) as engine:
        assert ask(engine, prompts[0]).token_ids == alone[0]
        settle(engine)
        assert engine.store.cache.stats().tiers["disk"].read_only is None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with running(model, small_disk, cache=cache) as engine:
        assert [ask(engine, prompt).token_ids for prompt in prompts] == alone
        assert engine.store.cache.stats().tiers["disk"].hit_tokens == 896, "what was written before is there"


def test_two_engines_on_one_folder(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(500)
    with running(model, tmp_path) as first:
        ids = ask(first, prompt).token_ids
        settle(first)
        with running(model, tmp_path) as second:
            assert ask(second, prompt).token_ids == ids and tiers(ask(second, prompt)) == {"device": 499}
            assert first.store.cache.disk.folder.path != second.store.cache.disk.folder.path
        assert tiers(ask(first, prompt)) == {"device": 499}


def test_many_at_once_with_a_pool_that_holds_none_of_it(model: object, tmp_path: Path) -> None:
    """All traffic goes down and comes up again, with cancelled requests among it."""
    rng = np.random.default_rng(7)
    heads = [prompt_of(300, seed) for seed in range(5)]
    prompts = [[*heads[rng.integers(5)], *rng.integers(1, 500, rng.integers(1, 200)).tolist()] for _ in range(24)]
    config = dataclasses.replace(SMALL, blocks=17)
    with running(model, None, config) as engine:
        alone = [ask(engine, prompt).token_ids for prompt in prompts]
    with running(model, tmp_path, config) as engine:
        for _ in range(2):
            cancelled = [
                engine.submit(prompts[i], SamplingParams(max_tokens=200), sink=lambda pairs: None)
                for i in rng.integers(0, 24, 6)
            ]
            answers: list[Completion] = []
            worker = threading.Thread(
                target=lambda answers=answers: answers.extend(engine.generate(prompts, SamplingParams(max_tokens=12)))
            )
            worker.start()
            for request in cancelled:
                time.sleep(float(rng.uniform(0, 0.05)))
                engine.cancel(request)
            worker.join()
            assert [answer.token_ids for answer in answers] == alone
            settle(engine)
        assert engine.store.cache.stats().tiers["disk"].hit_tokens > 0


def test_a_pool_shared_by_machines(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(400)
    cache = dataclasses.replace(ALWAYS, disk_quota=0, object_store=f"file://{tmp_path / 'pool'}")
    with running(model, tmp_path / "one", cache=cache) as engine:
        first = ask(engine, prompt)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "secret", tmp_path / "two" / "secret")
    both = dataclasses.replace(cache, disk_quota=1 << 26)
    with running(model, tmp_path / "two", cache=both) as engine:
        again = ask(engine, prompt)
        assert again.token_ids == first.token_ids and tiers(again) == {"objects": 384}
    with running(model, tmp_path / "two", cache=both) as engine:
        assert tiers(ask(engine, prompt)) == {"disk": 384}, "what came from far is kept nearby"
    with running(model, tmp_path / "three", cache=cache) as engine:
        assert ask(engine, prompt).usage.cached_tokens == 0, "another secret, another name for everybody"


def test_what_is_deleted_stays_away(model: object, tmp_path: Path) -> None:
    prompt = prompt_of(300)
    with running(model, tmp_path) as engine:
        cache, who = engine.store.cache, engine.store.identity("local")
        answer = ask(engine, prompt, keep="conversation")
        cache.forget(who, [*prompt, *answer.token_ids])  # while its last blocks wait to be copied
        settle(engine)
        assert len(cache.disk.index) == 0
        ask(engine, [*prompt, *answer.token_ids, 5])
        settle(engine)
        assert len(cache.disk.index) == 0, "not at once again, though the pool still has it"


TINY_POOL = dataclasses.replace(SMALL, blocks=17)
HEADS = [prompt_of(400, seed) for seed in range(4)]
Request = st.tuples(
    st.integers(0, 3), st.integers(100, 400), st.integers(0, 60), st.sampled_from(KEEPS),
    st.none() | st.floats(0, 0.05), st.sampled_from(["alice", "bob"]),
)  # fmt: skip


@pytest.fixture(scope="module")
def without_tiers(model: object) -> Iterator[Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Answers of an engine without tiers."""
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}
    with running(model, None, TINY_POOL) as engine:

        def answer(prompt: tuple[int, ...]) -> tuple[int, ...]:
            if prompt not in answers:
                answers[prompt] = ask(engine, list(prompt)).token_ids
            return answers[prompt]

        yield answer


@pytest.fixture(scope="module")
def scarce(model: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine in which every tier has too little room: a block has 26 KiB."""
    cache = dataclasses.replace(ALWAYS, memory=8 * 26 << 10, disk_quota=1 << 20, segment_bytes=128 << 10)
    with running(model, tmp_path_factory.mktemp("scarce"), TINY_POOL, cache) as engine:
        yield engine


@settings(max_examples=12, deadline=None)
@given(requests=st.lists(Request, min_size=1, max_size=8))
def test_any_order_of_requests_gives_the_same_ids(
    scarce: Engine, without_tiers: Callable[[tuple[int, ...]], tuple[int, ...]], requests: list[tuple]
) -> None:
    ids: dict[str, list[int]] = {}
    expected = {}
    for head, shared, own, keep, cancel_after, principal in requests:
        prompt = (*HEADS[head][:shared], *prompt_of(own, 100 * head + own))

        def sink(pairs: Sequence[tuple[str, Emission]]) -> None:
            for request, emission in pairs:
                ids.setdefault(request, []).extend(emission.token_ids)
                assert emission.finish_reason != "error"

        params = SamplingParams(max_tokens=12)
        request = scarce.submit(list(prompt), params, sink=sink, principal=principal, keep=keep)
        expected[request] = (prompt, cancel_after is not None)
        if cancel_after is not None:
            time.sleep(cancel_after)
            scarce.cancel(request)
    settle(scarce)
    for request, (prompt, cancelled) in expected.items():
        want = without_tiers(prompt)
        got = tuple(ids.get(request, ()))
        assert got == (want[: len(got)] if cancelled else want)


def conversation(seed: int) -> list[int]:
    return prompt_of(150 + 37 * seed % 400, seed)


def serve_until_killed(folder: Path) -> None:
    """In a process of its own: conversations that are stored, one after the other, beside other requests."""
    from umbra.kernels.backend import choose
    from umbra.model.load import load_model

    model = load_model("tiny", kernels=choose("cpu", "auto").kernels)
    with running(model, folder, cache=dataclasses.replace(ALWAYS, sync_interval=0.01)) as engine:
        who = engine.store.identity("local")
        for seed in range(10_000):
            engine.submit(prompt_of(300, 1000 + seed), SamplingParams(max_tokens=8), sink=lambda pairs: None)
            prompt = conversation(seed)
            name = engine.store.interactions.begin(who.space, prompt, model="tiny", id=f"{folder.name}-{seed}")
            answer = ask(engine, prompt, keep="conversation")
            engine.store.interactions.finish(name, answer.token_ids)
            print("answered", seed, flush=True)
            settle(engine)  # handed to the writer, beside the steps, and written
            print("committed", seed, flush=True)


def killed_after(folder: Path, seconds: float) -> list[tuple[str, int]]:
    """What such a process said before it was killed."""
    here = Path(__file__)
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; "
        "from umbra.serving import platform; platform.setup(kernels='auto'); "
        "import pathlib, test_engine_tiers; test_engine_tiers.serve_until_killed(pathlib.Path(sys.argv[3]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(here.parent), str(here.parents[1]), str(folder)],
        stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    out, end = b"", None
    try:
        while end is None or time.monotonic() < end:
            if select.select([process.stdout], [], [], 0.005)[0]:
                chunk = os.read(process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                assert chunk, "the process did not start"
                out += chunk
            if end is None and b"committed" in out:
                end = time.monotonic() + seconds
    finally:
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
    lines = (out + rest).decode().split("\n")[:-1]
    return [(what, int(seed)) for what, _, seed in (line.partition(" ") for line in lines) if seed]


def test_killed_at_random_moments(model: object, tmp_path: Path) -> None:
    """More kills: UMBRA_TEST_ENGINE_KILLS."""
    rng = random.Random(1)
    plain = load_model("tiny", kernels=model.kernels)  # the process above has no stand-in for a tokenizer
    wanted = found = 0
    for n in range(int(os.environ.get("UMBRA_TEST_ENGINE_KILLS", "1"))):
        folder = tmp_path / str(n)
        said = killed_after(folder, rng.uniform(0.0, 1.5))
        answered = [seed for what, seed in said if what == "answered"]
        committed = {seed for what, seed in said if what == "committed"}
        for seed in answered[-6:]:
            with running(plain, None) as engine:
                prompt = conversation(seed)
                alone = ask(engine, prompt).token_ids
                next_turn = [*prompt, *alone, 7, 8, 9]
                then = ask(engine, next_turn).token_ids
            with running(plain, folder) as engine:
                turn = engine.store.interactions.get(engine.store.identity("local").space, f"{n}-{seed}")
                assert turn.status == "completed" and turn.token_ids.tolist() == [*prompt, *alone]
                again = ask(engine, next_turn)
                assert again.token_ids == then
                assert sum(engine.store.cache.disk.lost.values()) == 0
            if seed in committed:
                wanted, found = wanted + len(prompt) + len(alone) - 1, found + again.usage.cached_tokens
    assert wanted > 0 and found >= 0.99 * wanted
