"""A process that is killed while it writes: the next one starts, finds what was committed, and nothing else."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from blocks import ALICE, LAYOUT, contents, tokens

from umbra.cache.context import ContextCache
from umbra.cache.database import Database
from umbra.cache.interactions import Interactions
from umbra.configs.cache import CacheConfig

CONFIG = dict(disk_quota=4 << 20, disk_reserve=0, segment_bytes=256 << 10, sync_interval=0.01)

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from blocks import ALICE, LAYOUT, contents, tokens
from umbra.cache.context import ContextCache
from umbra.cache.database import Database
from umbra.cache.interactions import Interactions
from umbra.configs.cache import CacheConfig
import test_kill

folder, first = Path(sys.argv[1]), int(sys.argv[3])
cache = ContextCache(CacheConfig(folder=folder, **test_kill.CONFIG), LAYOUT, ALICE.model)
stored = Interactions(Database(folder / "stored"), owner=cache.disk.folder.path.name)
print("ready", flush=True)
for seed in range(first, first + 100_000):
    ids = tokens(400 + seed % 300, seed)
    name = stored.begin(ALICE.space, ids[:200], model="m", id=f"{seed}")
    for info in ALICE.chain(ids, tail=True):
        cache.offer(info, lambda info=info: LAYOUT.unpack(contents(info), info.n_tokens))
    stored.append(name, ids[200:300])
    print("began", seed, flush=True)
    stored.finish(name, ids[300:])
    cache.flush()
    print("committed", seed, flush=True)
    if seed % 7 == 0:
        cache.forget(ALICE, ids)
        stored.delete(ALICE.space, name)
        print("deleted", seed, flush=True)
"""


def run_and_kill(folder, first, seconds):
    """Let a writer run for a while; the lines it wrote."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(here), str(first)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here, *filter(None, sys.path))))},
    )
    out, end = b"", None
    try:
        while end is None or time.monotonic() < end:
            readable, _, _ = select.select([process.stdout], [], [], 0.001)
            if readable:
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                assert chunk, "the writer did not start"
                out += chunk
            if end is None and b"ready" in out:
                end = time.monotonic() + seconds
    finally:
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
    lines = (out + rest).decode().split("\n")[:-1]
    return [(what, int(seed)) for what, _, seed in (line.partition(" ") for line in lines) if seed]


def after(folder, done, killed_in):
    """Open everything again and compare it with what the writer had said."""
    with ContextCache(CacheConfig(folder=folder, **CONFIG), LAYOUT, ALICE.model) as cache:
        cache.check()
        stored = Interactions(Database(folder / "stored"), owner=cache.disk.folder.path.name)
        committed = [seed for what, seed in done if what == "committed"]
        deleted = {seed for what, seed in done if what == "deleted"}
        recent = [seed for seed in committed if seed not in deleted and seed != killed_in][-20:]
        wanted = found = 0
        for seed in recent:
            ids = tokens(400 + seed % 300, seed)
            wanted += len(ids) - 1
            found += read_back(cache, ids)
            turn = stored.get(ALICE.space, str(seed))
            assert turn.status == "completed" and np.array_equal(turn.token_ids, ids)
        for seed in deleted:
            assert read_back(cache, tokens(400 + seed % 300, seed)) == 0
        began = {seed for what, seed in done if what == "began"} - set(committed)
        for seed in began:
            turn = stored.get(ALICE.space, str(seed))
            ids = tokens(400 + seed % 300, seed)
            assert turn.status in ("incomplete", "completed") and len(turn.token_ids) >= 300
            assert np.array_equal(turn.token_ids, ids[: len(turn.token_ids)])
        cache.check()
        lost = cache.stats().tiers["disk"].lost
        assert not {"checksum", "place", "tokens", "key", "model"} & set(lost), lost
        return found, wanted


def read_back(cache, ids):
    """How many tokens of a sequence come back, each block compared."""
    got = 0
    with cache.load(cache.match(ALICE, ids)) as load:
        while not load.done:
            for block in load.poll():
                assert bytes(block.payload) == contents(block.info)
                got += block.tokens
            time.sleep(0.0005)
    assert not load.failure
    return got


def test_killed_at_random_moments(tmp_path):
    kills = int(os.environ.get("UMBRA_TEST_KILLS", "3"))
    rng = random.Random(0)
    found = wanted = 0
    for n in range(kills):
        first = 1000 * n
        done = run_and_kill(tmp_path / "cache", first, rng.uniform(0.0, 0.5))
        killed_in = max((seed for _, seed in done), default=None) if done and done[-1][0] == "committed" else None
        one, all_ = after(tmp_path / "cache", done, killed_in)
        found, wanted = found + one, wanted + all_
    assert wanted > 0 and found >= 0.99 * wanted


def test_the_writer_of_this_test_works(tmp_path):
    done = run_and_kill(tmp_path / "cache", 1, 1.0)
    assert [what for what, _ in done[:2]] == ["began", "committed"]
