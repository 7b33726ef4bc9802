"""Host memory: the cap is kept, chains keep their heads, and what is found is right."""

import pytest
from blocks import ALICE, BOB, LAYOUT, contents, put_chain, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from umbra.cache.memory import MemoryTier
from umbra.cache.tier import Put

SLOTS = 9


def found(tier, chain):
    entries = tier.acquire_chain(chain)
    for entry, info in zip(entries, chain, strict=False):
        assert bytes(tier.read(entry)) == contents(info)
    if entries:
        tier.release(entries[-1])
    return len(entries)


def test_capacity():
    tier = MemoryTier(3 * LAYOUT.block_bytes + 1, LAYOUT.block_bytes)
    chain = ALICE.chain(tokens(4 * 128))
    assert put_chain(tier, chain) == [Put.WRITTEN] * 3 + [Put.FULL], "a chain does not push out its own head"
    assert put_chain(tier, BOB.chain(tokens(2 * 128, 1))) == [Put.WRITTEN] * 2
    assert found(tier, chain) == 1 and found(tier, BOB.chain(tokens(2 * 128, 1))) == 2
    assert tier.used_bytes == tier.capacity_bytes == 3 * LAYOUT.block_bytes
    assert tier.put(ALICE.chain(tokens(128, 5))[0], bytes(LAYOUT.block_bytes + 1), 0) is Put.FULL
    with pytest.raises(ValueError, match="cannot hold a block"):
        MemoryTier(LAYOUT.block_bytes - 1, LAYOUT.block_bytes)


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tier = MemoryTier(SLOTS * LAYOUT.block_bytes, LAYOUT.block_bytes)

    def chain(self, who, seed, n):
        return who.chain(tokens(900, seed)[:n], tail=True)

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 3), n=st.integers(1, 900))
    def put(self, who, seed, n):
        chain = self.chain(who, seed, n)
        put_chain(self.tier, chain)
        assert found(self.tier, chain[: n // 128]) == n // 128

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 3))
    def look(self, who, seed):
        found(self.tier, self.chain(who, seed, 900))

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 3), at=st.integers(0, 6))
    def delete(self, who, seed, at):
        chain = self.chain(who, seed, 900)
        self.tier.delete(chain[at].key)
        assert found(self.tier, chain) <= at

    @rule()
    def clear(self):
        self.tier.clear()
        assert not len(self.tier.index)

    @invariant()
    def consistent(self):
        self.tier.check()
        assert len(self.tier._free) + len(self.tier.index) == SLOTS
        assert not set(self.tier._free) & {entry.place for entry in self.tier.index}


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
