"""The cold tier: against a model in random order, reopened, damaged in every way, full, read-only, with two owners."""

import errno
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from blocks import ALICE, BOB, LAYOUT, contents, put_chain, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbra.cache import segment as segment_module
from umbra.cache.disk import DiskTier
from umbra.cache.keys import Identity
from umbra.cache.record import HEADER, Damaged, payload_crc, record_bytes
from umbra.cache.segment import Segment
from umbra.cache.tier import Put

RECORD = record_bytes(LAYOUT.block_bytes)
SEGMENT = HEADER + 8 * RECORD


def open_tier(path, quota=64 << 20, **options):
    return DiskTier(
        path,
        LAYOUT.codec,
        **{"quota": quota, "model": ALICE.model, "reserve": 0, "segment_bytes": SEGMENT} | options,
    )


def found(tier, chain):
    """How much of a chain the tier has; everything found is read and compared."""
    entries = tier.acquire_chain(chain)
    try:
        for entry, info in zip(entries, chain, strict=False):
            assert bytes(tier.read(entry)) == contents(info)
    finally:
        if entries:
            tier.release(entries[-1])
    return len(entries)


def test_chains_are_found_again_after_a_restart(tmp_path):
    tier = open_tier(tmp_path)
    chain = ALICE.chain(tokens(20 * 128 + 50), tail=True)
    assert put_chain(tier, chain) == [Put.WRITTEN] * 21
    assert put_chain(tier, chain) == [Put.KNOWN] * 21
    assert put_chain(tier, ALICE.chain(tokens(5 * 128, seed=1))[2:]) == [Put.HEADLESS] * 3
    assert found(tier, chain) == 21 and tier.read_only_reason is None
    assert tier.sync() > 0 and tier.sync() == 0
    tier.close()
    tier = open_tier(tmp_path)
    tier.check()
    assert found(tier, chain) == 21 and not tier.lost
    assert found(tier, BOB.chain(tokens(20 * 128))) == 0, "another tenant"
    assert found(tier, Identity(ALICE.space, b"n" * 32).chain(tokens(20 * 128))) == 0, "other weights"
    assert put_chain(tier, ALICE.chain(tokens(21 * 128), tail=True))[-1] is Put.WRITTEN
    tier.check()
    assert tier.evictions["superseded"] == 1, "the tail that the new block begins with is not kept"
    tier.close()


def test_partial_blocks(tmp_path):
    tier = open_tier(tmp_path)
    ids = tokens(300)
    chain = ALICE.chain(ids, tail=True)
    put_chain(tier, chain)
    packed = chain[2].tokens

    def partial(parent, tokens):
        part = tier.acquire_partial(parent, tokens)
        if part is None:
            return None
        tier.release(part[0])
        return part[0].info.key, part[1]

    assert partial(chain[1].key, packed) == (chain[2].key, 44)
    assert partial(chain[1].key, packed[: 4 * 10] + b"\xff" * 8) == (chain[2].key, 10)
    assert partial(chain[0].key, chain[1].tokens[: 4 * 77]) == (chain[1].key, 77), "the beginning of a whole block"
    assert partial(ALICE.root, chain[0].tokens[:4]) == (chain[0].key, 1)
    assert partial(chain[1].key, b"\xff" * 8) is None and partial(chain[2].key, packed) is None
    tier.check()
    tier.close()


def test_files_are_private_and_deleted_blocks_are_gone_from_them(tmp_path):
    tier = open_tier(tmp_path / "cache")
    chain = ALICE.chain(tokens(6 * 128))
    put_chain(tier, chain)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    used = tier.used_bytes
    assert tier.delete(chain[2].key) == 4 and tier.delete(chain[2].key) == 0
    assert tier.used_bytes <= used - 4 * (RECORD - HEADER)
    raw = b"".join(path.read_bytes() for path in files)
    for info, there in zip(chain, [True, True, False, False, False, False], strict=True):
        assert (info.tokens in raw) == (info.key in raw) == (contents(info)[:256] in raw) == there
    tier.check()
    tier.close()
    tier = open_tier(tmp_path / "cache")
    assert found(tier, chain) == 2 and not tier.lost
    tier.close()


def test_without_hole_punching_deleted_bytes_are_overwritten_and_segments_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_module, "punch", lambda *_: False)
    tier = open_tier(tmp_path)
    chains = [ALICE.chain(tokens(3 * 128, seed=i)) for i in range(16)]
    for chain in chains:
        put_chain(tier, chain)
    for chain in chains[::2] + chains[1:12:2]:
        tier.delete(chain[0].key)
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*.blocks"))
    assert contents(chains[0][1])[:256] not in raw and chains[0][1].tokens not in raw
    before = tier.used_bytes
    while tier.tidy():
        pass
    assert tier.used_bytes < before
    assert [found(tier, chain) for chain in chains] == [0] * 13 + [3, 0, 3]
    tier.check()
    tier.close()
    tier = open_tier(tmp_path)
    assert [found(tier, chain) for chain in chains] == [0] * 13 + [3, 0, 3]
    tier.close()


def test_the_quota_without_hole_punching(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_module, "punch", lambda *_: False)
    quota = 40 * RECORD
    tier = open_tier(tmp_path, quota=quota)
    kept = ALICE.chain(tokens(3 * 128, seed=1000))
    put_chain(tier, kept)
    entries = tier.acquire_chain(kept)
    for seed in range(30):
        assert set(put_chain(tier, ALICE.chain(tokens(4 * 128, seed=seed)))) == {Put.WRITTEN}
        assert tier.used_bytes <= quota
    assert found(tier, kept) == 3 and found(tier, ALICE.chain(tokens(4 * 128, seed=29))) == 4
    assert len(tier.index) > 20
    tier.release(entries[-1])
    tier.check()
    tier.close()


def test_a_block_that_moves_while_it_is_read(tmp_path):
    tier = open_tier(tmp_path)
    chain = ALICE.chain(tokens(9 * 128))
    put_chain(tier, chain)
    entry = tier.acquire(chain[0])
    real, done = entry.place[0].read, []

    def read_late(*where):
        if not done:
            done.append(0)
            done[0] = tier._move_from(entry.place[0], 100)
        return real(*where)

    entry.place[0].read = read_late
    assert bytes(tier.read(entry)) == contents(chain[0]) and done[0] >= 7
    tier.release(entry)
    assert found(tier, chain) == 9
    tier.close()


# ---- quota


def test_the_quota_is_kept_in_physical_bytes(tmp_path):
    quota = 40 * RECORD
    tier = open_tier(tmp_path, quota=quota, segment_bytes=6 * RECORD)
    for seed in range(30):
        assert set(put_chain(tier, ALICE.chain(tokens(4 * 128, seed=seed)))) == {Put.WRITTEN}
        physical = sum(path.stat().st_blocks * 512 for path in (tmp_path / "0").glob("*.blocks"))
        assert physical == tier.used_bytes <= quota
    assert tier.evictions["quota"] > 60 and tier.read_only_reason is None
    assert found(tier, ALICE.chain(tokens(4 * 128, seed=29))) == 4, "the newest are there"
    assert found(tier, ALICE.chain(tokens(4 * 128, seed=0))) == 0
    tier.check()
    assert tier.put(ALICE.chain(tokens(128, seed=99))[0], bytes(quota), 0) is Put.FULL
    while tier.tidy():
        pass
    assert 0.6 * quota < tier.used_bytes <= 0.75 * quota
    tier.close()


def test_leased_and_pinned_blocks_stay(tmp_path):
    tier = open_tier(tmp_path, quota=10 * RECORD, segment_bytes=4 * RECORD)
    leased, pinned = ALICE.chain(tokens(4 * 128)), ALICE.chain(tokens(3 * 128, seed=1))
    put_chain(tier, leased)
    entries = tier.acquire_chain(leased)
    for info in pinned:
        tier.pin(info.key)  # before they come
    put_chain(tier, pinned)
    for seed in range(2, 9):
        put_chain(tier, ALICE.chain(tokens(3 * 128, seed=seed)))
    assert found(tier, leased) == 4 and found(tier, pinned) == 3
    tier.release(entries[-1])
    for info in pinned:
        tier.unpin(info.key)
    for seed in range(10, 14):
        put_chain(tier, ALICE.chain(tokens(3 * 128, seed=seed)))
    assert found(tier, leased) == found(tier, pinned) == 0
    with pytest.raises(ValueError, match="was not pinned"):
        tier.unpin(pinned[0].key)
    tier.check()
    tier.close()


def test_a_tenant_pushes_out_its_own_blocks(tmp_path):
    tier = open_tier(tmp_path, quota=30 * RECORD, tenant_share=0.5)
    bob = BOB.chain(tokens(5 * 128))
    put_chain(tier, bob)
    for seed in range(20):
        put_chain(tier, ALICE.chain(tokens(4 * 128, seed=seed)))
        assert tier.index.space_bytes[ALICE.space] <= 15 * RECORD
    assert found(tier, bob) == 5 and tier.evictions["tenant_share"] > 50
    tier.close()


def test_blocks_of_other_weights_go_first(tmp_path):
    tier = open_tier(tmp_path, quota=20 * RECORD)
    old, new = ALICE.chain(tokens(6 * 128)), Identity(ALICE.space, b"n" * 32).chain(tokens(6 * 128))
    put_chain(tier, new)
    put_chain(tier, old)
    tier.close()
    tier = open_tier(tmp_path, quota=20 * RECORD, model=b"n" * 32)
    assert tier.other_models == 6
    put_chain(tier, Identity(ALICE.space, b"n" * 32).chain(tokens(10 * 128, seed=1)))
    assert found(tier, new) == 6 and found(tier, old) < 6
    tier.close()


# ---- damage


def damage(tmp_path, how):
    """A store of two segments, closed, then `how` does something to its files; the chain and the opened tier."""
    tier = open_tier(tmp_path)
    chain = ALICE.chain(tokens(12 * 128))
    put_chain(tier, chain)
    tier.close()
    how(sorted((tmp_path / "0").glob("*.blocks")))
    return chain, open_tier(tmp_path)


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 9, 40, 90, 200, 600, 4000, 4095, 4096, 5000, 4096 + LAYOUT.block_bytes, RECORD - 1])
def test_flipped_bits(tmp_path, at):
    """In every part of a record: the block and what continues it are lost, nothing else, and never a wrong byte."""
    chain, tier = damage(tmp_path, lambda files: flip(files[0], HEADER + 3 * RECORD + at, at % 8))
    entries = tier.acquire_chain(chain)
    good = 0
    for entry, info in zip(entries, chain, strict=False):
        try:
            assert bytes(tier.read(entry)) == contents(info)
        except Damaged:
            break
        good += 1
    assert good == 3 and tier.lost.total() >= 1
    tier.release(entries[-1])
    assert found(tier, chain) == 3
    assert put_chain(tier, chain)[3:] == [Put.WRITTEN] * 9 and found(tier, chain) == 12
    tier.check()
    tier.close()


@pytest.mark.parametrize("at", [0, 8, 12, 26, 4095])
def test_flipped_bits_in_a_segments_first_page(tmp_path, at):
    chain, tier = damage(tmp_path, lambda files: flip(files[1], at))
    assert tier.foreign_files == 1 and found(tier, chain) == 8
    tier.close()


@pytest.mark.parametrize("cut", [1, 100, 4096, RECORD - 1, RECORD, RECORD + 5, 3 * RECORD + 17])
def test_truncation(tmp_path, cut):
    chain, tier = damage(tmp_path, lambda files: os.truncate(files[1], files[1].stat().st_size - cut))
    lost = -(-cut // RECORD)
    assert found(tier, chain) == 12 - lost
    assert (tier.torn_bytes > 0) == (cut % RECORD > 0)
    assert put_chain(tier, chain)[-lost:] == [Put.WRITTEN] * lost and found(tier, chain) == 12
    tier.close()
    tier = open_tier(tmp_path)
    assert found(tier, chain) == 12 and not tier.torn_bytes
    tier.close()


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (lambda files: files[0].unlink(), 0),
        (lambda files: files[1].unlink(), 8),
        (lambda files: os.truncate(files[0], 100), 0),
        (lambda files: os.truncate(files[0], 0), 0),
        (lambda files: files[0].write_bytes(files[1].read_bytes()), 0),
        (lambda files: files[1].write_bytes(os.urandom(100_000)), 8),
        (lambda files: (files[0].parent / "store").write_text("what"), 0),
    ],
)
def test_deleted_cut_and_replaced_files(tmp_path, how, left):
    chain, tier = damage(tmp_path, how)
    assert found(tier, chain) == left
    put_chain(tier, chain)
    assert found(tier, chain) == 12
    tier.check()
    tier.close()


def test_swapped_files(tmp_path):
    def swap(files):
        first, second = files[0].read_bytes(), files[1].read_bytes()
        files[0].write_bytes(second)
        files[1].write_bytes(first)

    chain, tier = damage(tmp_path, swap)
    assert tier.foreign_files == 2 and found(tier, chain) == 0
    tier.close()


def test_swapped_records(tmp_path):
    def swap(files):
        data = bytearray(files[0].read_bytes())
        a, b = slice(HEADER + RECORD, HEADER + 2 * RECORD), slice(HEADER + 4 * RECORD, HEADER + 5 * RECORD)
        data[a], data[b] = data[b], data[a]
        files[0].write_bytes(data)

    chain, tier = damage(tmp_path, swap)
    assert found(tier, chain) == 1 and tier.lost.total() >= 2
    tier.close()


def test_a_file_that_changes_while_it_is_open(tmp_path):
    tier = open_tier(tmp_path)
    chain = ALICE.chain(tokens(6 * 128))
    put_chain(tier, chain)
    path = next((tmp_path / "0").glob("*.blocks"))
    with path.open("r+b") as file:
        file.seek(HEADER + 2 * RECORD)
        header = file.read(HEADER)
        file.seek(HEADER + 3 * RECORD)
        file.write(header)
    entry = tier.acquire(chain[3])
    with pytest.raises(Damaged, match="place"):
        tier.read(entry)
    os.truncate(path, HEADER + 2 * RECORD + 10)
    entry = tier.acquire(chain[2])
    with pytest.raises(Damaged, match="truncated"):
        tier.read(entry)
    assert tier.lost == {"place": 1, "truncated": 1} and found(tier, chain) == 2
    tier.close()


# ---- failures


def test_a_full_disk(small_disk):
    """The quota is larger than the disk: blocks go, service goes on."""
    tier = open_tier(small_disk, retry=0.0)
    results = [put for seed in range(20) for put in put_chain(tier, ALICE.chain(tokens(30 * 128, seed=seed)))]
    assert results.count(Put.WRITTEN) > 500 and tier.evictions["disk_full"] + tier.evictions["disk_free"] > 100
    assert found(tier, ALICE.chain(tokens(30 * 128, seed=19))) > 10
    tier.check()
    tier.close()
    tier = open_tier(small_disk)
    tier.check()
    assert len(tier.index) > 100
    tier.close()


def test_a_disk_that_others_fill(small_disk, caplog):
    tier = open_tier(small_disk, retry=0.0)
    chain = ALICE.chain(tokens(4 * 128))
    put_chain(tier, chain[:2])
    entries = tier.acquire_chain(chain)  # so that nothing may go
    with (small_disk / "other").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)):
            pass
    assert put_chain(tier, chain)[2:] == [Put.READ_ONLY, Put.HEADLESS]
    assert "full" in tier.read_only_reason and "takes no more blocks" in caplog.text
    assert found(tier, chain) == 2, "what is there is still found"
    (small_disk / "other").unlink()
    assert put_chain(tier, chain)[2:] == [Put.WRITTEN] * 2
    assert tier.read_only_reason is None and "takes blocks again" in caplog.text
    tier.release(entries[-1])
    tier.check()
    tier.close()


def test_room_is_left_on_the_file_system(small_disk):
    tier = open_tier(small_disk, reserve=2 << 20, retry=0.0)
    for seed in range(30):
        put_chain(tier, ALICE.chain(tokens(10 * 128, seed=seed)))
        assert tier.folder.free_bytes() >= 2 << 20
    assert tier.evictions["disk_free"] > 0 and tier.read_only_reason is None
    tier.close()


def test_a_folder_that_becomes_read_only(small_disk):
    tier = open_tier(small_disk, retry=0.0)
    chain = ALICE.chain(tokens(4 * 128))
    put_chain(tier, chain[:2])
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    tier = open_tier(small_disk)
    assert tier.read_only and put_chain(tier, chain)[2:] == [Put.READ_ONLY, Put.HEADLESS]
    assert found(tier, chain) == 2
    tier.check()
    tier.close()
    empty = small_disk / "sub"
    with pytest.raises(OSError):
        open_tier(empty)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    tier = open_tier(small_disk)
    assert put_chain(tier, chain)[2:] == [Put.WRITTEN] * 2
    tier.close()


def test_write_errors_are_tried_again_later(tmp_path, monkeypatch):
    tier = open_tier(tmp_path, retry=1000.0)
    chain = ALICE.chain(tokens(6 * 128))
    put_chain(tier, chain[:2])
    real = segment_module._write_all

    def fail(fd, parts, offset):
        real(fd, [bytes(parts[0])[:100]], offset)  # torn
        raise OSError(errno.EIO, "made up")

    monkeypatch.setattr(segment_module, "_write_all", fail)
    assert put_chain(tier, chain)[2:] == [Put.READ_ONLY] + [Put.HEADLESS] * 3 and "made up" in tier.read_only_reason
    monkeypatch.setattr(segment_module, "_write_all", real)
    assert put_chain(tier, chain)[2] is Put.READ_ONLY, "not before its time"
    tier._retry_at = 0.0
    assert put_chain(tier, chain)[2:] == [Put.WRITTEN] * 4 and tier.read_only_reason is None
    tier.close()
    tier = open_tier(tmp_path)
    assert found(tier, chain) == 6 and not tier.torn_bytes
    tier.close()


def test_two_owners_of_one_folder(tmp_path):
    quota = 40 * RECORD
    first, second = open_tier(tmp_path, quota=quota), open_tier(tmp_path, quota=quota)
    assert first.folder.path != second.folder.path
    chain = ALICE.chain(tokens(20 * 128))
    put_chain(first, chain)
    second.folder._others = (0, -100.0)
    for seed in range(10):
        put_chain(second, ALICE.chain(tokens(4 * 128, seed=seed)))
    assert first.used_bytes + second.used_bytes <= quota
    assert found(first, chain) == 20 and found(second, chain) == 0
    first.close()
    third = open_tier(tmp_path, quota=quota)  # a restart finds its own blocks
    assert third.folder.path == first.folder.path and found(third, chain) == 20
    second.close()
    third.close()


# ---- in random order


class DiskMachine(RuleBasedStateMachine):
    """A tier against a model: whatever happens, what is found is right, chains have heads, and the quota is kept."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.quota = 24 * RECORD
        self.tier = self.open()
        self.leases = []

    def open(self):
        return open_tier(Path(self.folder.name), quota=self.quota, segment_bytes=5 * RECORD)

    def teardown(self):
        self.tier.close()
        self.folder.cleanup()

    def chain(self, who, seed, n):
        # Seeds share their first blocks two by two.
        ids = np.concatenate([tokens(256, seed // 2), tokens(1000, seed)])[:n]
        return who.chain(ids, tail=True)

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 5), n=st.integers(1, 1200))
    def put(self, who, seed, n):
        chain = self.chain(who, seed, n)
        results = put_chain(self.tier, chain)
        if not self.leases:
            assert set(results) <= {Put.WRITTEN, Put.KNOWN}, results
            assert found(self.tier, [info for info in chain if info.n_tokens == 128]) == n // 128

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 5), n=st.integers(1, 1200))
    def look(self, who, seed, n):
        found(self.tier, self.chain(who, seed, n))

    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 5), at=st.integers(0, 8))
    def delete(self, who, seed, at):
        chain = self.chain(who, seed, 1200)
        self.tier.delete(chain[at].key)
        assert found(self.tier, chain) <= at

    @precondition(lambda self: len(self.leases) < 2)
    @rule(who=st.sampled_from([ALICE, BOB]), seed=st.integers(0, 5))
    def lease(self, who, seed):
        entries = self.tier.acquire_chain(self.chain(who, seed, 1000))
        if entries:
            self.leases.append(entries)

    @precondition(lambda self: self.leases)
    @rule(check=st.booleans())
    def release(self, check):
        entries = self.leases.pop()
        if check and all(self.tier.index.get(entry.info.key) is entry for entry in entries):
            for entry in entries:
                assert bytes(self.tier.read(entry)) == contents(entry.info)
        self.tier.release(entries[-1])

    @rule()
    def tidy(self):
        self.tier.tidy(5)

    @rule(torn=st.integers(0, 5000))
    def restart(self, torn):
        self.leases.clear()
        before = {entry.info.key for entry in self.tier.index}
        last = self.tier._active
        self.tier.close()
        if last is not None and last.path.exists():
            with last.path.open("ab") as file:
                file.write(os.urandom(torn))
        self.tier = self.open()
        assert {entry.info.key for entry in self.tier.index} == before

    @invariant()
    def consistent(self):
        self.tier.check()
        assert self.tier.used_bytes <= self.quota
        files = {path.name for path in Path(self.folder.name).rglob("*.blocks")}
        assert files == {Segment.file_name(number) for number in self.tier._segments}


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_crc_of_a_payload_covers_its_padding():
    assert payload_crc(b"abc") == payload_crc(b"abc" + bytes(4093)) != payload_crc(b"abcd")
