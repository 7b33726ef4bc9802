"""The cache as the engine sees it: match, load, offer, forget, pins, leases, epochs; tiers that are missing or fail."""

import dataclasses
import json
import os
import threading
import time

import numpy as np
import pytest
from blocks import ALICE, BOB, LAYOUT, contents, tokens

from umbra.cache.context import ContextCache
from umbra.cache.keys import Extras, Identity
from umbra.cache.lease import Leases
from umbra.cache.record import Damaged
from umbra.cache.traces import read_trace
from umbra.cache.transfer import Rate, worth_loading
from umbra.configs.cache import CacheConfig


def config(tmp_path, **options):
    return CacheConfig(**{"folder": tmp_path / "cache", "disk_quota": 16 << 20, "disk_reserve": 0} | options)


def open_cache(tmp_path, model=ALICE.model, **options):
    return ContextCache(config(tmp_path, **options), LAYOUT, model)


def arrays(info):
    return LAYOUT.unpack(contents(info), info.n_tokens)


def offer(cache, identity, ids, **options):
    """Offer all blocks of a sequence, the tail included; how many were wanted and taken."""
    taken = 0
    for info in identity.chain(ids, tail=True):
        if cache.wanted(info, persist=options.get("persist", True)):
            taken += cache.offer(info, lambda info=info: arrays(info), **options)
    assert cache.flush(20)
    return taken


def bring(cache, match, promote=False):
    """Load what was matched, comparing every byte; the tokens it brought and why it ended early."""
    position = None
    with cache.load(match) as load:
        while not load.done:
            blocks = load.poll()
            for block in blocks:
                assert position in (None, block.info.position), "in chain order"
                position = block.info.position + 128
                for array, want in zip(block.arrays, arrays(block.info), strict=True):
                    np.testing.assert_array_equal(array, want)
            if promote:
                cache.promote(load, blocks)
            time.sleep(0.0005)
    return load.tokens, load.failure


def test_everything_comes_back_after_a_restart(tmp_path):
    ids = tokens(10 * 128 + 50)
    with open_cache(tmp_path) as cache:
        assert cache.match(ALICE, ids).tokens == 0
        assert offer(cache, ALICE, ids) == 11 and offer(cache, ALICE, ids) == 0
        cache.check()
    with open_cache(tmp_path) as cache:
        match = cache.match(ALICE, [*ids, 7])
        assert match.tokens == 10 * 128 + 50 and match.by_tier == {"disk": 10 * 128 + 50}
        assert bring(cache, match) == (10 * 128 + 50, "")
        # The last token is always computed; what the device has is not loaded again.
        assert bring(cache, cache.match(ALICE, ids, known_blocks=4)) == (6 * 128 + 49, "")
        assert bring(cache, cache.match(ALICE, ids[: 3 * 128])) == (3 * 128 - 1, "")
        # Another branch: the common part of the tail, or of a whole block.
        assert bring(cache, cache.match(ALICE, [*ids[: 10 * 128 + 20], 1, 2])) == (10 * 128 + 20, "")
        assert bring(cache, cache.match(ALICE, [*ids[:200], 1, 2])) == (200, "")
        # Somebody else: nothing.
        assert cache.match(BOB, ids).tokens == 0
        assert cache.match(Identity(ALICE.space, b"n" * 32), ids).tokens == 0
        assert cache.match(ALICE, ids, extras=Extras(policy="sparse")).tokens == 0
        assert cache.match(ALICE, [1]).tokens == cache.match(ALICE, []).tokens == 0
        stats = cache.stats()
        assert stats.tiers["disk"].hit_tokens == 1330 + 817 + 383 + 1300 + 200 and stats.device_hit_tokens == 512
        assert stats.leases == 0 and 0 < stats.prefix_hit_ratio < 1 and not stats.recomputed_tokens
        cache.check()


def test_all_tiers_at_once(tmp_path):
    options = dict(memory=5 * LAYOUT.block_bytes, object_store=f"file://{tmp_path}/objects")
    ids = tokens(12 * 128 + 9)
    with open_cache(tmp_path, **options) as cache:
        offer(cache, ALICE, ids)
        assert [len(tier.index) for tier in cache.tiers] == [5, 13, 12]
        match = cache.match(ALICE, [*ids, 1])
        assert match.by_tier == {"memory": 5 * 128, "disk": 7 * 128 + 9}
        assert bring(cache, match) == (12 * 128 + 9, "")
    # Another machine, with nothing but the object store.
    with open_cache(tmp_path / "elsewhere", object_store=f"file://{tmp_path}/objects", memory=0) as cache:
        match = cache.match(ALICE, ids)
        assert match.by_tier == {"objects": 12 * 128}
        assert bring(cache, match, promote=True) == (12 * 128, "")
        assert cache.flush(20) and len(cache.disk.index) == 12
        assert cache.match(ALICE, ids).by_tier["disk"] == 12 * 128
    with open_cache(tmp_path / "elsewhere", model=b"n" * 32, object_store=f"file://{tmp_path}/objects") as cache:
        assert cache.match(Identity(ALICE.space, b"n" * 32), ids).tokens == 0


def test_contents_may_be_arrays_and_are_let_go(tmp_path):
    ids = tokens(128)
    info = ALICE.chain(ids)[0]
    with open_cache(tmp_path) as cache:
        done = threading.Event()
        assert cache.offer(info, arrays(info), done=done.set)
        assert cache.flush(10) and done.is_set()
        assert bring(cache, cache.match(ALICE, [*ids, 0])) == (128, "")
        # What cannot be packed, or whose function fails, is not kept, and harms nothing.
        other = ALICE.chain(tokens(128, seed=1))[0]
        done.clear()
        cache.offer(other, [np.zeros(3)], done=done.set)
        cache.offer(other, lambda: 1 / 0)
        assert cache.flush(10) and done.is_set() and cache.stats().write_outcomes["failed"] == 2
        assert cache.match(ALICE, tokens(200, seed=1)).tokens == 0
        cache.check()


def test_a_queue_that_is_full_refuses(tmp_path):
    gate = threading.Event()
    chain = ALICE.chain(tokens(9 * 128))

    def slow(info):
        gate.wait(10)
        return arrays(info)

    with open_cache(tmp_path, queue_bytes=4 * LAYOUT.block_bytes) as cache:
        taken = [cache.offer(info, lambda info=info: slow(info)) for info in chain]
        assert taken == [True] * 4 + [False] * 5 and not cache.wanted(chain[1]) and cache.wanted(chain[5])
        assert cache.stats().pending_bytes == 4 * LAYOUT.block_bytes and not cache.flush(0.01)
        gate.set()
        assert cache.flush(10) and cache.stats().pending_bytes == 0
        assert cache.stats().write_outcomes == {"queue_full": 5, "disk_written": 4}
        assert cache.offer(chain[8], arrays(chain[8])) and cache.flush(10)
        assert cache.stats().write_outcomes["disk_headless"] == 1


def test_not_stored_leaves_no_trace_on_the_disk(tmp_path):
    ids = tokens(5 * 128 + 30)
    with open_cache(tmp_path, memory=1 << 20) as cache:
        assert offer(cache, ALICE, ids, persist=False) == 6
        assert cache.match(ALICE, [*ids, 1]).by_tier == {"memory": 670}
        other = tokens(3 * 128, seed=1)
        offer(cache, ALICE, other)
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for info in ALICE.chain(ids, tail=True):
        assert info.key not in raw and info.tokens not in raw and contents(info)[:64] not in raw
    assert ALICE.chain(other)[0].tokens in raw, "a positive control"
    with open_cache(tmp_path, memory=1 << 20) as cache:
        assert cache.match(ALICE, ids).tokens == 0


def test_forget(tmp_path):
    ids = tokens(6 * 128 + 40)
    branch = np.concatenate([ids[: 3 * 128], tokens(300, seed=1)])
    pinned = np.concatenate([ids[: 4 * 128], tokens(200, seed=2)])
    with open_cache(tmp_path, memory=1 << 20) as cache:
        for each in (ids[: 6 * 128 + 10], ids, branch, pinned):
            offer(cache, ALICE, each)
        assert cache.pin(ALICE, ids[: 4 * 128])
        assert cache.forget(ALICE, ids) == 2 * 3, "two whole blocks and the tail, in two tiers"
        assert bring(cache, cache.match(ALICE, [*ids, 1])) == (4 * 128, "")
        assert bring(cache, cache.match(ALICE, [*branch, 1])) == (len(branch), "")
        assert cache.forget(ALICE, pinned) == 2 * 2
        assert cache.forget(ALICE, branch) == 2 * 3
        cache.unpin(ALICE, ids[: 4 * 128])
        assert cache.forget(ALICE, ids[: 4 * 128]) == 2 * 4
        assert all(len(tier.index) == 0 for tier in cache.tiers)
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(info.tokens in raw for info in ALICE.chain(ids, tail=True))


def test_what_waits_to_be_written_is_forgotten_too(tmp_path):
    ids = tokens(4 * 128)
    gate = threading.Event()
    with open_cache(tmp_path) as cache:
        for info in ALICE.chain(ids):
            cache.offer(info, lambda info=info: gate.wait(10) and arrays(info))
        threading.Timer(0.05, gate.set).start()
        cache.forget(ALICE, ids)
        assert cache.flush(10) and len(cache.disk.index) == 0


def test_pins_have_a_limit_and_outlast_pressure(tmp_path):
    with open_cache(tmp_path, disk_quota=1 << 20, pin_share=0.25) as cache:
        pinned = tokens(10 * 128)
        assert cache.pin(ALICE, pinned)
        assert not cache.pin(ALICE, tokens(100 * 128, seed=9))
        offer(cache, ALICE, pinned)
        for seed in range(1, 12):
            offer(cache, ALICE, tokens(16 * 128, seed=seed))
        assert bring(cache, cache.match(ALICE, [*pinned, 1])) == (1280, "")
        assert cache.stats().tiers["disk"].evictions and cache.stats().pinned_bytes == 10 * LAYOUT.block_bytes
        cache.unpin(ALICE, pinned)
        with pytest.raises(ValueError, match="not pinned"):
            cache.unpin(ALICE, pinned)
        cache.check()


def test_a_damaged_block_means_recompute_from_there(tmp_path):
    ids = tokens(8 * 128)
    with open_cache(tmp_path) as cache:
        offer(cache, ALICE, ids)
        chain = ALICE.chain(ids)
        segment, header = cache.disk.index.get(chain[5].key).place
        with segment.path.open("r+b") as file:
            file.seek(header.place.offset + 4096 + 77)
            file.write(b"\x99\x98")
        assert bring(cache, cache.match(ALICE, [*ids, 1])) == (5 * 128, "checksum")
        assert cache.stats().recomputed_tokens == {"checksum": 3 * 128}
        assert bring(cache, cache.match(ALICE, [*ids, 1])) == (5 * 128, "")
        assert offer(cache, ALICE, ids) == 3
        assert bring(cache, cache.match(ALICE, [*ids, 1])) == (8 * 128, "")
        assert cache.stats().tiers["disk"].lost == {"checksum": 1}
        cache.check()


def test_damage_in_host_memory_is_noticed(tmp_path):
    ids = tokens(4 * 128)
    with ContextCache(CacheConfig(memory=1 << 20), LAYOUT, ALICE.model) as cache:
        offer(cache, ALICE, ids)
        entry = cache.memory.index.get(ALICE.chain(ids)[2].key)
        cache.memory._slab[entry.place, 5] ^= 1
        with pytest.raises(Damaged):
            cache.memory.read(entry)
        assert bring(cache, cache.match(ALICE, [*ids, 1])) == (2 * 128, "")
        cache.check()


def test_new_weights_stop_what_is_being_loaded(tmp_path):
    ids = tokens(20 * 128)
    with open_cache(tmp_path, load_bytes=1, memory=1 << 20) as cache:
        offer(cache, ALICE, ids)
        load = cache.load(cache.match(ALICE, ids))
        while not load.poll():
            time.sleep(0.001)
        epoch = cache.epoch
        assert cache.invalidate() == epoch + 1
        assert load.poll() == [] and load.done and load.failure == "stale_epoch"
        stats = cache.stats()
        assert stats.stale_loads == 1 and stats.leases == 0 and len(cache.memory.index) == 0


def test_leases_end(tmp_path):
    ids = tokens(4 * 128)
    with open_cache(tmp_path, lease=0.05) as cache:
        offer(cache, ALICE, ids)
        match = cache.match(ALICE, ids)
        assert cache.stats().leases == 1 and match.lease.live
        with pytest.raises(AssertionError, match="lease"):
            cache.check()
        deadline = time.monotonic() + 10
        while match.lease.live and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cache.stats().leases_expired == 1 and not match.lease.live
        match.release()
        cache.match(ALICE, ids).release()
        load = cache.load(cache.match(ALICE, ids))
        load.close()
        load.close()
        assert load.poll() == [] and cache.stats().leases == 0
        cache.check()


def test_leases_by_hand():
    now = [0.0]
    leases = Leases(10.0, clock=lambda: now[0])
    first, second = leases.take(), leases.take()
    second.release()
    now[0] = 9.9
    assert leases.expire() == 0
    now[0] = 10.0
    assert leases.expire() == 1 and not first.live and leases.expired == 1 and not leases.open


def test_load_or_recompute():
    prefill = Rate()
    assert worth_loading([9.0] * 3, [128] * 3, prefill, 1.3) == 3, "nothing is known yet"
    prefill.observe(1280, 1.0)  # 0.1 s a block
    assert worth_loading([0.01] * 3, [128] * 3, prefill, 1.3) == 3
    assert worth_loading([0.09] * 3, [128] * 3, prefill, 1.3) == 0
    assert worth_loading([0.01, 0.01, 0.09], [128] * 3, prefill, 1.3) == 2
    assert worth_loading([0.09, 0.01, 0.01], [128] * 3, prefill, 1.3) == 3, "the beginning pays for what follows"
    assert worth_loading([], [], prefill, 1.3) == 0
    for _ in range(50):
        prefill.observe(128, 1.0)
    assert prefill.per_second == pytest.approx(128, rel=0.01) and prefill.seconds(256) == pytest.approx(2, rel=0.01)


def test_a_slow_tier_is_not_loaded_from(tmp_path):
    ids = tokens(10 * 128)
    with open_cache(tmp_path) as cache:
        offer(cache, ALICE, ids)
        cache.prefilled(10**9, 1.0)
        assert cache.match(ALICE, ids).tokens == 0
        assert cache.stats().recomputed_tokens == {"slower": 10 * 128 - 1} and cache.stats().leases == 0
        for _ in range(2000):
            match = cache.match(ALICE, ids)
            if match.tokens:
                break
        got, failure = bring(cache, match)
        # The last block, of which 127 tokens are of use, may just not pay yet.
        assert got >= 9 * 128 and not failure, "it is tried again some time"


def test_tiers_that_cannot_be_opened_are_left_out(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    broken = CacheConfig(folder=tmp_path / "file", memory=1, object_store="nonsense://x")
    with ContextCache(broken, LAYOUT, ALICE.model) as cache:
        assert cache.tiers == () and "not used as a tier" in caplog.text
        info = ALICE.chain(tokens(128))[0]
        assert not cache.wanted(info) and not cache.offer(info, arrays(info))
        assert cache.match(ALICE, tokens(300)).tokens == 0 and cache.flush(1)
        load = cache.load(cache.match(ALICE, tokens(300)))
        assert load.done and load.poll() == []


def test_access_log(tmp_path):
    path = tmp_path / "log.jsonl"
    with open_cache(tmp_path, access_log=path) as cache:
        ids = tokens(400)
        cache.record_access(ALICE, ids, 20, 1.5)
        cache.record_access(ALICE, ids[:300], 10, 2.0)
    first, second = read_trace(path)
    assert (first.arrived, first.input_length, first.output_length) == (1.5, 400, 20)
    assert len(first.blocks) == 3 and second.blocks == first.blocks[:2]
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }


def test_configuration_is_checked():
    for bad in ({"readers": 0}, {"lease": 0}, {"tenant_share": 1.5}, {"disk_watermarks": (0.5, 0.9)}, {"memory": -1}):
        with pytest.raises(ValueError):
            dataclasses.replace(CacheConfig(), **bad)


def test_many_threads_at_once(tmp_path):
    """Several requests match, load, offer and forget at once, on a tier that is too small for all of them."""
    errors = []
    with open_cache(tmp_path, disk_quota=1 << 20, memory=20 * LAYOUT.block_bytes, segment_bytes=200_000) as cache:

        def work(seed):
            rng = np.random.default_rng(seed)
            try:
                for _ in range(25):
                    which = int(rng.integers(0, 8))
                    ids = np.concatenate([tokens(300, which % 2), tokens(int(rng.integers(1, 900)), which)])
                    identity = ALICE if which % 3 else BOB
                    match = cache.match(identity, ids)
                    if rng.random() < 0.2:
                        match.release()
                    else:
                        brought, failure = bring(cache, match, promote=True)
                        assert brought == match.tokens or failure == "gone"
                    for info in identity.chain(ids, tail=True):
                        if cache.wanted(info):
                            cache.offer(info, lambda info=info: arrays(info))
                    if rng.random() < 0.2:
                        cache.forget(identity, ids)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and cache.flush(20)
        cache.check()
        stats = cache.stats()
        assert not stats.tiers["disk"].lost and not stats.tiers["memory"].lost and stats.leases == 0
        assert cache.disk.used_bytes <= 1 << 20
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert os.listdir(tmp_path / "cache") == ["0"]
