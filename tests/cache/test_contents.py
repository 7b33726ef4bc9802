"""Cached contents: until when, for whom, how much; and that their blocks stay."""

import pytest
from blocks import ALICE, BOB, LAYOUT, contents, tokens

from umbra.cache.contents import CachedContents, Expired, QuotaExceeded
from umbra.cache.context import ContextCache
from umbra.cache.database import Database, NotFound, Unreadable
from umbra.configs.cache import CacheConfig


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_all(tmp_path, clock):
    """Opens (or, after a restart, opens again) a cache and its cached contents."""
    opened = []

    def close():
        while opened:
            opened.pop().close()

    def make(model="m", quota=2000):
        close()
        config = CacheConfig(folder=tmp_path / "cache", disk_quota=1 << 20, disk_reserve=0)
        cache = ContextCache(config, LAYOUT, ALICE.model)
        database = Database(tmp_path / "db")
        opened.extend((cache, database))
        return CachedContents(database, cache, model=model, quota_tokens=quota, clock=clock), cache

    yield make
    close()


def store_blocks(cache, ids):
    for info in ALICE.chain(ids):
        cache.offer(info, LAYOUT.unpack(contents(info)))
    assert cache.flush(10)


def test_create_get_list_patch_delete(open_all, clock):
    store, _ = open_all()
    first = store.create(ALICE.space, tokens(300), expires=1100, body={"system": "é"}, display_name="one")
    clock.now += 1
    second = store.create(ALICE.space, tokens(200, 1), expires=1050)
    store, _ = open_all()
    got = store.get(ALICE.space, first.name)
    assert got.name.startswith("cachedContents/") and got.token_ids.tolist() == tokens(300).tolist()
    assert (got.body, got.display_name, got.created, got.expires, got.model) == (
        {"system": "é"}, "one", 1000.0, 1100.0, "m"
    )  # fmt: skip
    assert [c.name for c in store.page(ALICE.space)] == [first.name, second.name]
    assert [c.name for c in store.page(ALICE.space, limit=1)] == [first.name]
    assert [c.name for c in store.page(ALICE.space, after=first.name)] == [second.name]
    clock.now = 1040.0
    assert store.patch(ALICE.space, second.name, expires=1200).updated == 1040.0
    assert store.get(ALICE.space, second.name).expires == 1200.0
    store.delete(ALICE.space, second.name)
    with pytest.raises(NotFound, match="there is no cachedContents/"):
        store.get(ALICE.space, second.name)
    clock.now = 1100.0
    with pytest.raises(Expired, match="expired 0 seconds ago"):
        store.get(ALICE.space, first.name)
    with pytest.raises(Expired):
        store.patch(ALICE.space, first.name, expires=1200)
    assert store.page(ALICE.space) == []
    assert store.expire() == 1 and store.expire() == 0
    assert store.purge(50) == 0 and store.purge(0) == 1
    with pytest.raises(NotFound):
        store.delete(ALICE.space, first.name)


def test_tenants_are_apart(open_all):
    store, _ = open_all()
    name = store.create(ALICE.space, tokens(10), expires=1100).name
    for call in (
        lambda: store.get(BOB.space, name),
        lambda: store.patch(BOB.space, name, expires=2000),
        lambda: store.delete(BOB.space, name),
        lambda: store.page(BOB.space, after=name),
    ):
        with pytest.raises(NotFound):
            call()
    assert store.page(BOB.space) == [] and store.get(ALICE.space, name)


def test_quota(open_all, clock):
    store, _ = open_all(quota=500)
    store.create(ALICE.space, tokens(300), expires=1010)
    with pytest.raises(QuotaExceeded, match="201 tokens beside 300 .* more than the 500"):
        store.create(ALICE.space, tokens(201), expires=1010)
    store.create(BOB.space, tokens(201), expires=1010)
    clock.now = 1010.0
    store.create(ALICE.space, tokens(500), expires=1020)
    with pytest.raises(ValueError, match="in the future"):
        store.create(ALICE.space, tokens(1), expires=1010)
    store, _ = open_all(quota=10**6)
    with pytest.raises(QuotaExceeded, match="no room"):
        store.create(ALICE.space, tokens(150 * 128, 5), expires=1020)
    assert len(store.page(ALICE.space)) == 1, "what was refused is not kept"


def test_blocks_stay_while_it_lasts(open_all, clock):
    store, cache = open_all()
    ids = tokens(10 * 128)
    content = store.create(ALICE.space, ids, expires=1100)
    store_blocks(cache, ids)
    store, cache = open_all()
    for seed in range(1, 10):
        store_blocks(cache, tokens(20 * 128, seed))

    def there():
        match = cache.match(ALICE, [*ids, 1])
        match.release()
        return match.tokens

    assert there() == 1280 and cache.stats().tiers["disk"].evictions
    clock.now = 1100.0
    store.expire()
    for seed in range(20, 30):
        store_blocks(cache, tokens(20 * 128, seed))
    assert there() == 0
    store.delete(ALICE.space, content.name)
    content = store.create(ALICE.space, ids, expires=1200)
    store_blocks(cache, ids)
    store.delete(ALICE.space, content.name)
    assert there() == 0, "deleting takes the blocks away at once"
    cache.check()
    # Another model's contents are known, but not pinned here.
    store.create(ALICE.space, ids, expires=1300)
    _, cache = open_all(model="other")
    assert cache.stats().pinned_bytes == 0


def test_damage_is_noticed(open_all, tmp_path):
    store, _ = open_all()
    name = store.create(ALICE.space, tokens(10), expires=1100).name
    with store._database.transaction() as db:
        db.execute("UPDATE contents SET tokens = x'01000000'")
    with pytest.raises(Unreadable, match="was damaged"):
        store.get(ALICE.space, name)
    assert store.page(ALICE.space) == []
    store, _ = open_all()
    store.delete(ALICE.space, name)
