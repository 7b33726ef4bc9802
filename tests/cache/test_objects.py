"""The object store: another machine finds blocks by their keys; damage, strangers and failures."""

import shutil

import numpy as np
import pytest
from blocks import ALICE, BOB, LAYOUT, contents, put_chain, tokens

from umbra.cache.keys import Identity
from umbra.cache.objects import ObjectTier
from umbra.cache.record import Damaged, payload_crc
from umbra.cache.tier import Put


def open_tier(path, model=ALICE.model, **options):
    return ObjectTier(f"file://{path}", LAYOUT.codec, LAYOUT.block_bytes, model, **{"quota": 1 << 30} | options)


def found(tier, chain):
    entries = tier.acquire_chain(chain)
    for entry, info in zip(entries, chain, strict=False):
        assert bytes(tier.read(entry)) == contents(info) and entry.crc == payload_crc(contents(info))
    if entries:
        tier.release(entries[-1])
    return len(entries)


def files(path):
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != "zarr.json")


def test_another_machine_finds_what_was_written(tmp_path):
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    chain = ALICE.chain(tokens(6 * 128 + 9), tail=True)
    assert put_chain(first, chain) == [Put.WRITTEN] * 6 + [Put.NOT_KEPT]
    assert found(first, chain) == 6 and found(second, chain) == 0
    assert second.refresh() == 6 and found(second, chain) == 6
    assert put_chain(second, chain)[:6] == [Put.KNOWN] * 6
    assert found(second, BOB.chain(tokens(6 * 128))) == 0
    assert found(open_tier(tmp_path, model=b"n" * 32), Identity(ALICE.space, b"n" * 32).chain(tokens(6 * 128))) == 0
    assert len(files(tmp_path)) == 6 and first.used_bytes == 6 * first._record
    first.check()
    second.check()
    assert first.delete(chain[4].key) == 2 and len(files(tmp_path)) == 4
    entry = second.acquire(chain[4])
    with pytest.raises(Damaged, match="header"):
        second.read(entry)
    assert found(second, chain) == 4


def test_damage_is_noticed(tmp_path):
    tier = open_tier(tmp_path)
    chain = ALICE.chain(tokens(4 * 128))
    put_chain(tier, chain)
    by_size = files(tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(16):
        pristine = {path: path.read_bytes() for path in by_size}
        path = by_size[rng.integers(len(by_size))]
        data = bytearray(pristine[path])
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        tier = open_tier(tmp_path)
        with pytest.raises(Damaged):
            assert found(tier, chain) < 0
        assert tier.lost.total() == 1
        for path, data in pristine.items():
            path.write_bytes(data)
    first, second = by_size[:2]
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    with pytest.raises(Damaged, match="tokens"):
        found(open_tier(tmp_path), chain)


def test_quota_and_failures(tmp_path):
    tier = open_tier(tmp_path / "a", quota=3 * 12288, retry=0.0)
    chain = ALICE.chain(tokens(5 * 128))
    assert put_chain(tier, chain) == [Put.WRITTEN] * 3 + [Put.FULL] * 2
    other = open_tier(tmp_path / "b", retry=1000.0)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").write_text("in the way")
    assert put_chain(other, chain)[0] is Put.READ_ONLY and "writing failed" in other.read_only_reason
    (tmp_path / "b").unlink()
    assert put_chain(other, chain)[0] is Put.READ_ONLY, "not before its time"
    other._retry_at = 0.0
    assert put_chain(other, chain)[0] is Put.WRITTEN and other.read_only_reason is None


def test_another_kind_of_array_is_refused(tmp_path):
    open_tier(tmp_path)
    with pytest.raises((ValueError, RuntimeError)):
        ObjectTier(f"file://{tmp_path}", LAYOUT.codec, 2 * LAYOUT.block_bytes, ALICE.model, quota=1 << 30)
