"""Eviction policies and the trees they work on: by hand, against simple models in random order, and on a real trace."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbra.cache.chains import Chains
from umbra.cache.policies import LRU, LRU2, S3FIFO
from umbra.cache.replay import POLICIES, TierModel, hit_curves, hit_ratio
from umbra.cache.traces import TracedRequest, conversations, read_trace, reuse_bound
from umbra.configs.files import cache_dir

# The conversation trace of github.com/kvcache-ai/Mooncake (FAST '25 release), gzipped.
TRACE = Path(os.environ.get("UMBRA_TRACES", cache_dir() / "traces")) / "conversation_trace.jsonl.gz"


def drain(policy, choose=lambda key: key):
    order = []
    while (key := policy.victim(choose)) is not None:
        order.append(key)
    return order


def test_lru_order():
    policy = LRU()
    for key in "abcd":
        policy.insert(key)
    policy.use("a")
    policy.remove("c")
    assert "c" not in policy and len(policy) == 3
    assert drain(policy) == ["b", "d", "a"]


def test_lru2_prefers_what_was_used_twice_and_remembers_what_is_gone():
    policy = LRU2(ghost=4)
    for key in "abc":
        policy.insert(key)
    policy.use("a")
    policy.use("a")
    assert policy.victim(lambda key: key) == "b"
    policy.insert("d")
    policy.insert("b")  # back again: its earlier use counts
    assert drain(policy) == ["c", "d", "b", "a"]
    assert len(policy) == 0


def test_s3fifo_lets_one_hit_keys_go_first():
    policy = S3FIFO(small=0.5)
    for key in "abcd":
        policy.insert(key)
    policy.use("a")
    policy.use("c")
    first = policy.victim(lambda key: key)
    assert first == "b"
    policy.insert("b")  # its ghost is known: the main queue
    assert policy.victim(lambda key: key) == "d"


@pytest.mark.parametrize("make", [LRU, LRU2, S3FIFO])
def test_what_may_not_go_stays_and_another_may_go_in_its_place(make):
    policy = make()
    for key in "abc":
        policy.insert(key)
    assert policy.victim(lambda key: None) is None
    assert len(policy) == 3
    for key in "abc":
        policy.release(key)
    assert policy.victim(lambda key: "c" if key in "ab" else key) == "c"
    assert sorted(drain(policy)) == ["a", "b"]


@pytest.mark.parametrize("make", [LRU, LRU2, S3FIFO])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("iurv"), st.integers(0, 8)), max_size=60))
def test_holds_exactly_what_was_inserted_and_did_not_leave(make, operations):
    policy, held = make(), set()
    for what, key in operations:
        if what == "i" and key not in held:
            policy.insert(key)
            held.add(key)
        elif what == "u" and key in held:
            policy.use(key)
        elif what == "r" and key in held:
            policy.remove(key)
            held.discard(key)
        elif what == "v":
            odd = policy.victim(lambda key: key if key % 2 else None)
            assert odd is None or odd % 2
            assert (odd is None) == (not any(key % 2 for key in held)), "an eviction must succeed if it can"
            held.discard(odd)
            for key in held:
                policy.release(key)
        assert len(policy) == len(held) and all(key in policy for key in held)
    assert sorted(drain(policy)) == sorted(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=80), st.integers(1, 6))
def test_lru_like_an_ordered_dict(keys, capacity):
    policy, model = LRU(), OrderedDict()
    for key in keys:
        if key in model:
            policy.use(key)
            model.move_to_end(key)
            continue
        if len(model) == capacity:
            assert policy.victim(lambda key: key) == model.popitem(last=False)[0]
        policy.insert(key)
        model[key] = None


class ChainsMachine(RuleBasedStateMachine):
    """Trees against a dictionary of parents and a list of holds."""

    def __init__(self):
        super().__init__()
        self.chains = Chains()
        self.parents = {}
        self.holds = []

    def behind(self, key):
        return {k for k in self.parents if key in self.ancestry(k)}

    def ancestry(self, key):
        while key is not None:
            yield key
            key = self.parents[key]

    def held(self, key):
        return any(h in self.behind(key) for h in self.holds)

    @rule(data=st.data())
    def add(self, data):
        key = bytes([len(self.parents)]) + data.draw(st.binary(min_size=4, max_size=4))
        if key in self.parents:
            return
        parent = data.draw(st.sampled_from([None, *self.parents]))
        self.chains.add(key, parent)
        self.parents[key] = parent

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def hold(self, data):
        key = data.draw(st.sampled_from(list(self.parents)))
        self.chains.hold(key)
        self.holds.append(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(self.holds))
        before = {k for k in self.parents if self.held(k)}
        self.holds.remove(key)
        freed = self.chains.release(key)
        assert set(freed) == before - {k for k in self.parents if self.held(k)}

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def evict(self, data):
        key = data.draw(st.sampled_from(list(self.parents)))
        goes = self.chains.goes_for(key)
        assert (goes is None) == self.held(key)
        if goes is not None:
            assert key in self.ancestry(goes) and not self.chains.children(goes)
            above = self.chains.remove(goes)
            parent = self.parents.pop(goes)
            leaf = parent is not None and parent not in self.parents.values() and not self.held(parent)
            assert above == (parent if leaf else None)

    @invariant()
    def consistent(self):
        self.chains.check()
        assert set(self.chains) == set(self.parents)
        for key in self.parents:
            assert self.chains.held(key) == self.held(key)


TestChains = ChainsMachine.TestCase
TestChains.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_tier_never_exceeds_its_capacity_and_never_loses_a_head(name, data):
    capacity = data.draw(st.integers(1, 12))
    tier = TierModel(POLICIES[name](), capacity)
    chains = [(100 * i, *(100 * i + j for j in range(1, 1 + n))) for i, n in enumerate((0, 3, 7, 14))]
    for pick in data.draw(st.lists(st.integers(0, 3), max_size=30)):
        cut = data.draw(st.integers(1, len(chains[pick])))
        before = tier.find(chains[pick][:cut])
        present = tier.add(chains[pick][:cut])
        assert before <= present == tier.find(chains[pick][:cut])
        assert present == min(cut, capacity) and len(tier) <= capacity


def test_infinite_tier_finds_the_bound():
    requests = conversations(
        20, turns=4, system_blocks=2, turn_blocks=3, block_tokens=128, output_tokens=10, pause=5, interval=1
    )
    bound = reuse_bound(requests)
    assert 0.4 < bound < 0.9
    for name, ratios in hit_curves(requests, [5, 10_000]).items():
        assert ratios[0] < ratios[1] == pytest.approx(bound), name


def test_traces_are_read_and_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')
    assert read_trace(path) == [TracedRequest(1.5, 600, 5, (1, 2))]
    path.write_text('{"timestamp": 1500}\n')
    with pytest.raises(ValueError, match="trace.jsonl:1 is not a line of a trace"):
        read_trace(path)


@pytest.mark.skipif(not TRACE.exists(), reason="the public trace is not there")
@pytest.mark.parametrize(("policy", "capacity", "least"), [("lru2", 5000, 0.16), ("s3fifo", 20_000, 0.29)])
def test_hit_ratio_on_a_conversation_trace(policy, capacity, least):
    requests = read_trace(TRACE)
    assert reuse_bound(requests) == pytest.approx(0.366, abs=0.001)
    assert least <= hit_ratio(requests, POLICIES[policy](), capacity) <= 0.366
