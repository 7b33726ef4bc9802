"""The block pool by hand, and against a simple model in random order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.cache import BlockPool, block_key

ROOT = bytes(32)
SIZE = 2


def chain(tokens, root=ROOT):
    """Keys of the whole blocks of `tokens`."""
    keys, parent = [], root
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = block_key(parent, tokens[start : start + SIZE], block_size=SIZE)
        keys.append(parent)
    return keys


def fill(pool, tokens, root=ROOT):
    """Allocate, compute and publish all blocks of `tokens`, as a request that found nothing does."""
    keys = chain(tokens, root)
    blocks = pool.allocate(len(keys))
    for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        pool.publish(block, key, tokens[i * SIZE : (i + 1) * SIZE], keys[i - 1] if i else None)
    return blocks


def test_counts_and_all_or_nothing():
    pool = BlockPool(6, SIZE)
    assert (pool.total, pool.free, pool.cached, pool.used) == (5, 5, 0, 0)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and 0 not in blocks
    assert pool.allocate(3) is None
    assert (pool.free, pool.used) == (2, 3)
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert (pool.free, pool.used) == (5, 0)
    pool.check(held=())


def test_match_finds_the_longest_prefix_and_leases_it():
    pool = BlockPool(10, SIZE)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.used) == (6, 3, 0)
    assert pool.match(ROOT, [1, 2, 3, 4, 9, 9, 5, 6]) == blocks[:2]
    assert pool.match(ROOT, [1, 2, 3]) == blocks[:1]
    assert pool.match(ROOT, [9, 2, 3, 4]) == []
    assert pool.match(ROOT, []) == []
    assert pool.match(bytes(31) + b"x", [1, 2]) == []  # another tenant or model
    assert (pool.cached, pool.used) == (1, 2)
    pool.check(held=[*blocks[:2], blocks[0]])
    # What was matched cannot be evicted before it is used.
    assert pool.allocate(8) is None
    assert blocks[0] not in (taken := pool.allocate(7)) and blocks[1] not in taken
    pool.release([*taken, *blocks[:2], blocks[0]])
    pool.check(held=())


def test_eviction_takes_exactly_the_shortfall_leaves_first_used_once_first():
    pool = BlockPool(8, SIZE)
    old, new = fill(pool, [1, 2, 3, 4, 5, 6]), fill(pool, [7, 7, 8, 8])
    pool.release(old[::-1])  # order within one release is irrelevant
    pool.release(new)
    assert (pool.free, pool.cached) == (2, 5)
    taken = pool.allocate(3)
    assert old[2] in taken and pool.cached == 4
    found = pool.match(ROOT, [1, 2, 3, 4])
    pool.use(found)  # by a second request
    pool.release(found)
    pool.release(pool.match(ROOT, [7, 7, 8, 8]))  # looked at only
    taken += pool.allocate(2)
    assert set(new) <= set(taken)
    assert pool.match(ROOT, [7, 7, 8, 8]) == [] and pool.match(ROOT, [1, 2, 3, 4]) == old[:2]
    pool.release([*taken, *old[:2]])
    pool.check(held=())
    assert pool.clear() == 2
    assert (pool.free, pool.cached) == (7, 0)


def test_the_same_content_twice():
    pool = BlockPool(10, SIZE)
    first, second = fill(pool, [1, 2, 3, 4]), pool.allocate(2)
    keys = chain([1, 2, 3, 4, 5, 6])
    assert pool.publish(first[0], keys[0], [1, 2], None) == first[0]  # again: no change
    assert pool.publish(second[0], keys[0], [1, 2], None) == first[0]
    assert pool.publish(second[1], keys[1], [3, 4], keys[0]) == first[1]
    # The private twins may go on: their continuation hangs below the published ones, which stay while it is used.
    (third,) = pool.allocate(1)
    assert pool.publish(third, keys[2], [5, 6], keys[1]) == third
    pool.release(first)
    assert pool.used == 5 and pool.cached == 0
    pool.check(held=[*second, third])
    pool.retain(first[:1])
    pool.release([*second, third, first[0]])
    assert (pool.free, pool.cached, pool.used) == (6, 3, 0)
    assert pool.match(ROOT, [1, 2, 3, 4, 5, 6]) == [*first, third]


def test_no_chain_without_its_head():
    pool = BlockPool(4, SIZE)
    keys = chain([1, 2, 3, 4])
    a, b = pool.allocate(2)
    assert pool.publish(b, keys[1], [3, 4], keys[0]) is None
    assert pool.lookup(keys[1], [3, 4]) is None
    pool.release([a, b])
    assert pool.free == 3


def test_tokens_are_compared_on_a_hit():
    pool = BlockPool(5, SIZE)
    (block,) = pool.allocate(1)
    key = chain([1, 2])[0]
    pool.publish(block, key, [8, 9], None)  # as if two contents had the same hash
    assert pool.match(ROOT, [1, 2]) == []
    assert pool.lookup(key, [1, 2]) is None
    (other,) = pool.allocate(1)
    assert pool.publish(other, key, [1, 2], None) is None
    assert pool.lookup(key, [8, 9]) == block
    pool.check(held=[block, block, other])


def test_a_block_under_another_parent_is_not_matched():
    pool = BlockPool(5, SIZE)
    a, b = pool.allocate(2)
    keys = chain([1, 2, 3, 4])
    pool.publish(a, keys[0], [1, 2], None)
    pool.publish(b, keys[1], [3, 4], None)  # claims to be a first block
    assert pool.match(ROOT, [1, 2, 3, 4]) == [a]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.release([2]), "released more often"),
        (lambda pool: pool.release([0]), "released more often"),
        (lambda pool: pool.retain([2]), "neither in use nor published"),
        (lambda pool: pool.publish(2, bytes(32), [1, 2], None), "has no reference"),
        (lambda pool: pool.publish(pool.allocate(1)[0], bytes(32), [1], None), "holds 2 tokens, got 1"),
        (lambda pool: pool.allocate(-1), "cannot allocate"),
        (lambda pool: BlockPool(1), "at least 2 blocks"),
        (lambda pool: BlockPool(5, 0), "must be positive"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(BlockPool(5, SIZE))


def test_a_published_block_keeps_its_key():
    pool = BlockPool(5, SIZE)
    (block,) = fill(pool, [1, 2])
    with pytest.raises(ValueError, match="already published"):
        pool.publish(block, bytes(32), [1, 2], None)


def test_leaks_are_named():
    pool = BlockPool(5, SIZE)
    a, b = pool.allocate(2)
    with pytest.raises(AssertionError, match=f"nobody holds: {{{b}: 1}}"):
        pool.check(held=[a])
    with pytest.raises(AssertionError, match=f"not counted: {{{a}: 1}}"):
        pool.check(held=[a, a, b])


def test_blocks_are_found_in_part_whole_ones_and_tails():
    pool = BlockPool(10, 4)
    first, tail, other = pool.allocate(3)
    key = block_key(ROOT, [1, 2, 3, 4], block_size=4)
    pool.publish(first, key, [1, 2, 3, 4], None, ROOT)
    pool.publish_tail(tail, [5, 6, 7], key, ROOT)
    pool.publish_tail(other, [1, 2, 9], None, ROOT)
    pool.release([first, tail, other])
    assert (pool.cached, pool.used) == (3, 0)
    pool.check(held=())
    assert pool.match_part(ROOT, [1, 2, 3, 9]) == (first, 3)
    assert pool.match_part(ROOT, [1, 2, 9, 9]) == (other, 3)
    assert pool.match_part(key, [5, 6, 8]) == (tail, 2)
    assert pool.match_part(key, [9]) is None and pool.match_part(key, []) is None
    assert pool.match_part(bytes(31) + b"x", [1, 2]) is None  # another tenant or model
    assert pool.match(ROOT, [1, 2, 3, 4, 5, 6, 7, 8]) == [first]  # a tail is no whole block
    pool.check(held=[first, other, tail, first])
    assert set(pool.allocate(6)).isdisjoint({first, tail, other}) and pool.allocate(1) is None  # they are held
    pool.release([first, other, tail, first])
    assert len(pool.allocate(3)) == 3  # and now they go, leaves first
    assert pool.match_part(ROOT, [1, 2, 3]) is None and pool.match_part(key, [5]) is None


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4]])
def test_a_tail_is_neither_empty_nor_whole(tokens):
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="a tail holds 1 to 3 tokens"):
        pool.publish_tail(block, tokens, None, ROOT)


def test_only_the_newest_blocks_are_compared():
    pool = BlockPool(200, 4)
    blocks = pool.allocate(150)
    for i, block in enumerate(blocks):
        pool.publish_tail(block, [1, i, 2], None, ROOT)
    assert pool.match_part(ROOT, [1, 149, 2, 0]) == (blocks[149], 3)
    block, tokens = pool.match_part(ROOT, [1, 0, 2, 0])
    assert block != blocks[0] and tokens == 1


def test_many_blocks_stay_fast():
    """8,000 blocks of 128 tokens (a million tokens) match in well under a second."""
    pool = BlockPool(8001)
    tokens = list(range(8000 * 128))
    blocks, parent = pool.allocate(8000), None
    for i, block in enumerate(blocks):
        part = tokens[i * 128 : (i + 1) * 128]
        key = block_key(parent or ROOT, part)
        pool.publish(block, key, part, parent)
        parent = key
    pool.release(blocks)
    assert pool.match(ROOT, tokens) == blocks
    pool.release(blocks)
    assert len(pool.allocate(8000)) == 8000
    assert pool.cached == 0
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Requests come, compute, share, seal and go; a slow model says what must be cached, free and found."""

    @initialize(n_blocks=st.integers(2, 14))
    def start(self, n_blocks):
        self.pool = BlockPool(n_blocks, SIZE)
        self.requests = []  # [tokens, blocks, sealed]
        self.published = {}  # block -> (key, parent block or None)
        self.uses = {}  # key of a published block -> last use but one, last use
        self.gone = {}  # key of an evicted block -> its last use
        self.time = 0

    def held(self):
        return [block for _, blocks, _ in self.requests for block in blocks]

    def in_use(self):
        """Blocks held, and published ones that an in-use block continues."""
        used = set(self.held())
        while True:
            parents = {self.published[b][1] for b in used if b in self.published} - used - {None}
            if not parents:
                return used
            used |= parents

    def cached(self):
        return set(self.published) - self.in_use()

    def model_evict(self, n):
        for _ in range(n):
            parents = {parent for _, parent in self.published.values()}
            leaves = [b for b in self.cached() if b not in parents]
            key, _ = self.published.pop(min(leaves, key=lambda b: self.uses[self.published[b][0]]))
            self.gone[key] = self.uses.pop(key)[1]
            while len(self.gone) > 4 * (len(self.uses) + 1):
                del self.gone[next(iter(self.gone))]

    def tick(self):
        self.time += 1
        return self.time

    def allocate(self, n):
        in_use, cached = self.in_use(), self.cached()
        free = self.pool.total - len(in_use) - len(cached)
        blocks = self.pool.allocate(n)
        if n > free + len(cached):
            assert blocks is None
            return None
        self.model_evict(max(0, n - free))
        assert len(set(blocks)) == n
        assert not set(blocks) & (in_use | set(self.published) | {0})
        return blocks

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=11))
    def admit(self, tokens):
        matched = self.pool.match(ROOT, tokens[:-1])
        expected, parent = [], None
        by_key = {key: (block, above) for block, (key, above) in self.published.items()}
        for key in chain(tokens[:-1]):
            block, above = by_key.get(key, (None, None))
            if block is None:
                break
            assert above == parent
            expected.append(block)
            parent = block
        assert matched == expected
        self.requests.append([tokens, matched, len(matched)])
        blocks = self.allocate(-(-len(tokens) // SIZE) - len(matched))
        if blocks is None:
            self.finish(len(self.requests) - 1)
        else:
            self.requests[-1][1] = matched + blocks
            self.pool.use(matched)
            for block in reversed(matched):
                key = self.published[block][0]
                self.uses[key] = (self.uses[key][1], self.tick())

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), share=st.booleans())
    def seal(self, data, share):
        request = data.draw(st.sampled_from(self.requests))
        tokens, blocks, sealed = request
        keys = chain(tokens)
        if sealed >= len(keys):
            return
        parent_key = keys[sealed - 1] if sealed else None
        by_key = {key: block for block, (key, _) in self.published.items()}
        part = tokens[sealed * SIZE : (sealed + 1) * SIZE]
        holder = self.pool.publish(blocks[sealed], keys[sealed], part, parent_key)
        if keys[sealed] in by_key:
            assert holder == by_key[keys[sealed]]
            if share and holder != blocks[sealed]:
                self.share(blocks, sealed, holder)
        elif parent_key is not None and parent_key not in by_key:
            assert holder is None
        else:
            assert holder == blocks[sealed]
            self.published[holder] = (keys[sealed], by_key.get(parent_key))
            self.uses[keys[sealed]] = (self.gone.pop(keys[sealed], 0), self.tick())
        request[2] += 1

    def share(self, blocks, i, holder):
        """Swap the private twin for the published block."""
        self.pool.retain([holder])
        self.pool.release([blocks[i]])
        blocks[i] = holder

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def extend(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if len(request[0]) > 20:
            return
        request[0] = request[0] + data.draw(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
        blocks = self.allocate(1)
        if blocks is None:
            request[0] = request[0][:-SIZE]
        else:
            request[1] = request[1] + blocks

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        self.finish(data.draw(st.integers(0, len(self.requests) - 1)))

    def finish(self, index):
        _, blocks, _ = self.requests.pop(index)
        self.pool.release(blocks)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(held=self.held())
        assert self.pool.used == len(self.in_use())
        assert self.pool.cached == len(self.cached())
        assert self.pool.free == self.pool.total - self.pool.used - self.pool.cached

    def teardown(self):
        if hasattr(self, "pool"):
            while self.requests:
                self.finish(0)
            self.pool.check(held=())
            self.pool.clear()
            assert self.pool.free == self.pool.total


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
