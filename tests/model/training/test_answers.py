"""Gathering answers: which are used does not depend on interruptions; the files on disk."""

from __future__ import annotations

import dataclasses
import random
import zlib

import numpy as np
import pytest

from umbra.configs.prompt_sets import Prompt
from umbra.configs.shadow import TrainingConfig
from umbra.model.training.answers import Sources, gather, load_index, save_index
from umbra.model.training.jobs import Completion, Job, Speaker
from umbra.model.training.store import CompletionStore, StoreError, read_rows

CONFIG = TrainingConfig(prompts=200, tokens=900, max_tokens=12)
IDENTITY = {"weights": "w"}


def answer(job: Job) -> Completion:
    """What depends on the job alone."""
    rng = np.random.default_rng([zlib.crc32(repr(job).encode())])
    n = int(rng.integers(1, job.max_tokens + 1))
    ids = tuple(int(token) for token in rng.integers(0, 50, n))
    return Completion(ids, rng.normal(size=(n, 4)).astype(np.float16), n < job.max_tokens)


class FakeTrunk:
    """Answers in a random order; stops after `limit` answers as if the process were killed."""

    def __init__(self, order: int, limit: int | None = None) -> None:
        self.order, self.limit, self.asked = order, limit, 0

    def generate(self, jobs):
        left = list(enumerate(jobs))
        rng = random.Random(self.order)
        while left:
            self.asked += 1
            if self.limit is not None and self.asked > self.limit:
                raise KeyboardInterrupt
            index, job = left.pop(rng.randrange(min(4, len(left))))
            yield index, answer(job)

    @property
    def speaker(self) -> Speaker:
        def encode(messages):
            return list(messages[0]["content"].encode())

        def decode(ids):
            return " ".join(f"word{i}" for i in ids) + " and so on."

        return Speaker(encode, lambda system: list(system.encode()), decode, self.generate, 2048)


def ids(answered):
    return [(a.store, a.index, a.category, a.row.completion.token_ids) for a in answered]


def run(folder, trunk, config=CONFIG, sources=None):
    return gather(trunk.speaker, folder, config, IDENTITY, sources or Sources(), lambda *progress: None)


def test_answers_are_the_same_after_any_interruption(tmp_path):
    whole, _ = run(tmp_path / "whole", FakeTrunk(1))
    for order, limit in enumerate((1, 20, 33, 40, 60)):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", FakeTrunk(order, limit))
    last = FakeTrunk(9)
    resumed, _ = run(tmp_path / "cut", last)
    assert ids(resumed) == ids(whole)
    rows = read_rows(tmp_path / "whole" / "answers")
    last_used = max(a.index for a in whole if a.store == "answers")
    lengths = [len(rows[i].completion.token_ids) for i in range(last_used + 1)]
    assert sum(lengths[:-1]) < CONFIG.tokens <= sum(lengths)
    again = FakeTrunk(10)
    assert ids(run(tmp_path / "cut", again)[0]) == ids(whole) and again.asked == 0


def test_more_tokens_go_on_from_what_is_there(tmp_path):
    few, _ = run(tmp_path, FakeTrunk(1))
    many, _ = run(tmp_path, FakeTrunk(2), dataclasses.replace(CONFIG, tokens=1000))
    assert len(many) > len(few)
    assert set(ids(few)) <= set(ids(many))


def test_prompts_from_outside(tmp_path):
    extra = [Prompt(str(i), "extra", (f"extra question number {i}",)) for i in range(5)]
    tests = [Prompt("t", "test", ("a question that nobody may be trained on at all",)), extra[0]]
    answered, measured = run(tmp_path, FakeTrunk(1), dataclasses.replace(CONFIG, tokens=10**6), Sources(extra, tests))
    assert sum(a.category == "extra" for a in answered) <= 4, "one is measured on"
    assert {a.category for a in measured} <= {"test", "extra"} and {a.store for a in measured} == {"tests"}
    assert all(a.row.job.temperature == 0 for a in measured)


def test_passages_of_ones_own_are_asked_about(tmp_path):
    own = [f"The passage number {i} that somebody else wrote." for i in range(3)]
    answered, _ = run(tmp_path, FakeTrunk(1), dataclasses.replace(CONFIG, tokens=10**6), Sources(passages=own))
    prompts = [bytes(a.row.job.prompt_ids).decode() for a in answered]
    assert all(any(text in prompt for prompt in prompts) for text in own)


def test_some_answers_are_sampled(tmp_path):
    answered, _ = run(tmp_path, FakeTrunk(1), dataclasses.replace(CONFIG, tokens=10**6, sampled=0.5))
    temperatures = {a.row.job.temperature for a in answered}
    assert temperatures == {0.0, *CONFIG.temperatures}
    seeds = [a.row.job.seed for a in answered if a.row.job.temperature > 0]
    assert len(set(seeds)) == len(seeds) > 5


def test_the_index_brings_the_answers_back(tmp_path):
    answered, tests = run(tmp_path, FakeTrunk(1), sources=Sources((), [Prompt("t", "test", ("what is measured on",))]))
    save_index(tmp_path, answered, tests, {"trunk": "x"})
    found, found_tests, about = load_index(tmp_path)
    assert (ids(found), ids(found_tests), about) == (ids(answered), ids(tests), {"trunk": "x"})
    assert all(
        np.array_equal(a.row.completion.features, b.row.completion.features)
        for a, b in zip(found, answered, strict=True)
    )


# ---- the store


def test_a_store_reads_back_what_was_added(tmp_path):
    jobs = [Job((1, 2, i), 9, 0.5 if i % 2 else 0.0, i) for i in range(7)]
    store = CompletionStore(tmp_path, IDENTITY, shard_tokens=10)
    for i in (3, 0, 6, 2):
        store.add(i, jobs[i], answer(jobs[i]))
    store.add(5, jobs[5], Completion((), None, False))
    store.flush()
    store.flush()
    rows = read_rows(tmp_path)
    assert set(rows) == {0, 2, 3, 5, 6}
    for i in (0, 2, 3, 6):
        expected = answer(jobs[i])
        assert rows[i].job == jobs[i] and rows[i].completion.token_ids == expected.token_ids
        assert np.array_equal(rows[i].completion.features, expected.features)
        assert rows[i].completion.ended == expected.ended
    assert rows[5].completion == Completion((), None, False)
    assert len(list(tmp_path.glob("part-*.npz"))) > 1


def test_a_store_of_other_settings_and_a_damaged_shard_are_refused(tmp_path):
    store = CompletionStore(tmp_path, IDENTITY)
    store.add(0, Job((1,), 3), answer(Job((1,), 3)))
    store.flush()
    with pytest.raises(StoreError, match="made with other settings"):
        CompletionStore(tmp_path, {"weights": "v"})
    shard = next(tmp_path.glob("part-*.npz"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="is damaged; remove it"):
        CompletionStore(tmp_path, IDENTITY)
