"""Everything in one folder: principals, restarts, deletion, expiry, and a folder that takes nothing."""

import subprocess

import numpy as np
import pytest
from blocks import LAYOUT, contents, tokens

from umbra.cache.database import NotFound, Unavailable
from umbra.cache.store import Store
from umbra.configs.cache import CacheConfig

FINGERPRINT = b"f" * 32
CONFIG = CacheConfig(disk_quota=1 << 20, disk_reserve=0)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def open_store(folder, **options):
    return Store(folder, LAYOUT, **{"model": "m", "fingerprint": FINGERPRINT, "config": CONFIG} | options)


def turn(store, who, prompt, answer, **options):
    """One request: prompt computed, answer stored, blocks kept."""
    name = store.interactions.begin(who.space, prompt, model="m", **options)
    store.interactions.finish(name, answer)
    for info in who.chain(np.concatenate([prompt, answer]), tail=True):
        if store.cache.wanted(info):
            store.cache.offer(info, LAYOUT.unpack(contents(info), info.n_tokens))
    assert store.cache.flush(10)
    return name


def known(store, who, ids):
    match = store.cache.match(who, ids)
    match.release()
    return match.tokens


def test_a_conversation_goes_on_after_a_restart(tmp_path):
    ids = tokens(700)
    with open_store(tmp_path) as store:
        alice = store.identity("alice")
        first = turn(store, alice, ids[:300], ids[300:400])
        assert alice.space != store.identity("bob").space
    with open_store(tmp_path) as store:
        alice, bob = store.identity("alice"), store.identity("bob")
        history = store.interactions.get(alice.space, first).token_ids
        prompt = np.concatenate([history, ids[400:450]])
        assert known(store, alice, prompt) == 400 and known(store, bob, prompt) == 0
        with pytest.raises(NotFound):
            store.interactions.get(bob.space, first)
        second = turn(store, alice, prompt, ids[450:500], parent=first)
        store.delete_interaction(alice, first)
        assert known(store, alice, ids) == 500, "what the second one uses stays"
        store.delete_interaction(alice, second)
        assert known(store, alice, ids) == 0
        raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert ids[:32].astype("<u4").tobytes() not in raw
    # Another secret, other names.
    (tmp_path / "secret").unlink()
    with open_store(tmp_path) as store:
        assert store.identity("alice").space != alice.space


def test_two_servers_share_conversations(tmp_path):
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        who = one.identity("alice")
        assert who == two.identity("alice")
        running = one.interactions.begin(who.space, [1, 2], model="m")
        assert two.interactions.get(who.space, running).status == "in_progress"
        assert two.cache.disk.folder.path != one.cache.disk.folder.path


def test_expiry(tmp_path):
    clock = Clock()
    with open_store(tmp_path, clock=clock) as store:
        alice = store.identity("alice")
        turn(store, alice, tokens(300), tokens(20, 1), ttl=10)
        store.contents.create(alice.space, tokens(256, 2), expires=1005)
        assert store.upkeep() == 0 and known(store, alice, tokens(300)) == 299
        clock.now = 1010.0
        assert store.upkeep() == 1 and known(store, alice, tokens(300)) == 0
        assert store.cache.stats().pinned_bytes == 0


def test_a_folder_that_takes_nothing(small_disk, caplog):
    with open_store(small_disk) as store:
        alice = store.identity("alice")
        turn(store, alice, tokens(256), tokens(10, 1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with open_store(small_disk) as store:
        assert known(store, alice, tokens(256)) == 255, "blocks are still found"
        with pytest.raises(Unavailable, match="stores no conversations now"):
            store.interactions  # noqa: B018
        with pytest.raises(Unavailable, match="no cached contents now"):
            store.contents  # noqa: B018
        assert "conversations are not stored" in caplog.text and store.upkeep() == 0
