"""Stored conversations: branches, what was cut off, expiry, deletion without a trace, damage; against a model."""

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from blocks import tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbra.cache.database import Database, NotFound, Unavailable, Unreadable, packed
from umbra.cache.interactions import Interactions

A, B = b"a" * 16, b"b" * 16


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "state" / "umbra.sqlite")
    yield database
    database.close()


def finished(store, space, prompt, answer, **options):
    name = store.begin(space, prompt, model="m", **options)
    store.finish(name, answer, output={"text": "é"}, usage={"total": 3})
    return name


def test_a_conversation_and_its_branches(database):
    store = Interactions(database, owner="0")
    ids = tokens(300)
    first = finished(store, A, ids[:100], ids[100:150], request={"input": "hi"})
    second = finished(store, A, ids[:200], ids[200:250], parent=first)
    branch = finished(store, A, [*ids[:150], 1, 2], [3], parent=first)
    other_system = finished(store, A, [5, *ids[:150]], [6], parent=second)
    turn = store.get(A, first)
    assert (turn.status, turn.request, turn.output, turn.usage) == (
        "completed", {"input": "hi"}, {"text": "é"}, {"total": 3}
    )  # fmt: skip
    assert turn.prompt_tokens == 100 and turn.expires is None and turn.model == "m" and turn.parent is None
    for name, want in (
        (first, ids[:150]), (second, ids[:250]), (branch, [*ids[:150], 1, 2, 3]), (other_system, [5, *ids[:150], 6]),
    ):  # fmt: skip
        assert store.get(A, name).token_ids.tolist() == list(want)
    assert store.children(A, first) == [second, branch] and store.children(B, first) == []
    assert [turn.id for turn in store.recent(A)] == [other_system, branch, second, first]
    assert [turn.id for turn in store.recent(A, limit=2)] == [other_system, branch]
    # A turn stores what is new in it.
    rows = dict(database.query("SELECT id, length(tokens) / 4 FROM interactions"))
    assert rows == {first: 150, second: 100, branch: 3, other_system: 152}


def test_tenants_are_apart(database):
    store = Interactions(database, owner="0")
    name = finished(store, A, [1], [2])
    for call in (
        lambda: store.get(B, name),
        lambda: store.delete(B, name),
        lambda: store.begin(B, [1], model="m", parent=name),
        lambda: store.get(A, "int_0"),
    ):
        with pytest.raises(NotFound, match="there is no interaction"):
            call()
    assert store.recent(B) == [] and store.get(A, name).token_ids.tolist() == [1, 2]


def test_what_was_cut_off_is_incomplete(database):
    store = Interactions(database, owner="0")
    name = store.begin(A, [1, 2, 3], model="m")
    assert store.get(A, name).status == "in_progress"
    store.append(name, [4, 5])
    store.append(name, [])
    store.append(name, [6])
    done = store.begin(A, [1], model="m")
    store.append(done, [2])
    store.finish(done, [3], status="cancelled")
    assert store.get(A, done).token_ids.tolist() == [1, 2, 3] and store.get(A, done).status == "cancelled"
    # Another server's interactions are its own business.
    assert Interactions(database, owner="1").recovered == 0
    again = Interactions(database, owner="0")
    assert again.recovered == 1
    turn = again.get(A, name)
    assert turn.status == "incomplete" and turn.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and turn.prompt_tokens == 3
    assert database.query("SELECT count(*) FROM pieces") == [(0,)]
    child = finished(again, A, [1, 2, 3, 4, 5, 6, 9], [10], parent=name)
    assert again.get(A, child).token_ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 10]


def test_continuing_one_that_still_runs(database):
    store = Interactions(database, owner="0")
    name = store.begin(A, [1, 2], model="m")
    store.append(name, [3])
    child = finished(store, A, [1, 2, 3, 4], [5], parent=name)
    store.append(name, [7])
    store.finish(name, [8])
    assert store.get(A, child).token_ids.tolist() == [1, 2, 3, 4, 5]
    assert store.get(A, name).token_ids.tolist() == [1, 2, 3, 7, 8]


def test_deleted_means_gone(tmp_path):
    database = Database(tmp_path / "umbra.sqlite")
    store = Interactions(database, owner="0")
    first = finished(store, A, tokens(200), tokens(50, 1), request="secret words")
    second = finished(store, A, [*tokens(200), *tokens(50, 1), 7], [8], parent=first)
    third = finished(store, A, [*tokens(200), *tokens(50, 1), 7, 8, 9], [10], parent=second)
    assert store.delete(A, second).tolist() == [*tokens(200), *tokens(50, 1), 7, 8]
    with pytest.raises(NotFound):
        store.get(A, second)
    turn = store.get(A, third)
    assert turn.token_ids.tolist() == [*tokens(200), *tokens(50, 1), 7, 8, 9, 10] and turn.parent == first
    running = store.begin(A, [1], model="m")
    store.delete(A, running)
    store.append(running, [2])
    store.finish(running, [3])
    with pytest.raises(NotFound):
        store.get(A, running)
    assert store.delete(A, third).size == 253 + 1 and store.delete(A, first).size == 250
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret words" not in raw and packed(tokens(200))[:64] not in raw and first.encode() not in raw
    database.close()


def test_expiry(database):
    clock = Clock()
    store = Interactions(database, owner="0", clock=clock)
    short = finished(store, A, [1, 2], [3], ttl=10)
    long = finished(store, A, [1, 2, 3, 4], [5], ttl=100, parent=short)
    assert store.purge() == [] and store.get(A, short).expires == 1010.0
    clock.now += 10
    with pytest.raises(NotFound, match="expired"):
        store.get(A, short)
    with pytest.raises(NotFound):
        store.begin(A, [1], model="m", parent=short)
    assert [turn.id for turn in store.recent(A)] == [long]
    assert [(space, ids.tolist()) for space, ids in store.purge()] == [(A, [1, 2, 3])]
    assert store.get(A, long).token_ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("column", ["tokens", "request", "status", "keep", "space", "parent"])
def test_damaged_rows_are_noticed(database, column):
    store = Interactions(database, owner="0")
    first = finished(store, A, [1, 2, 3], [4], request="x")
    second = finished(store, A, [1, 2, 3, 4, 5], [6], parent=first)
    value = {"tokens": b"\1\0\0\0", "keep": 3, "space": B, "parent": "int_x"}.get(column, '"y"')
    with database.transaction() as db:
        db.execute(f"UPDATE interactions SET {column} = ? WHERE id = ?", (value, first if column != "keep" else second))
    damaged = first if column != "keep" else second
    with pytest.raises(Unreadable, match="was damaged"):
        store.get(B if column == "space" else A, damaged)
    with pytest.raises(Unreadable):
        store.get(A, second)
    fresh = finished(store, A, [1], [2])
    assert store.get(A, fresh).token_ids.tolist() == [1, 2]
    store.delete(B if column == "space" else A, damaged)


def test_damaged_pieces_are_noticed(database):
    store = Interactions(database, owner="0")
    name = store.begin(A, [1], model="m")
    for i in range(3):
        store.append(name, [i])
    with database.transaction() as db:
        db.execute("DELETE FROM pieces WHERE number = 1")
    with pytest.raises(Unreadable, match="answer"):
        store.get(A, name)
    assert Interactions(database, owner="0").recovered == 0


def test_files_are_private_and_a_broken_file_is_put_aside(tmp_path, caplog):
    path = tmp_path / "state" / "umbra.sqlite"
    database = Database(path)
    store = Interactions(database, owner="0")
    finished(store, A, [1], [2])
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in path.parent.iterdir())
    assert len(list(path.parent.iterdir())) == 3
    database.close()
    data = bytearray(path.read_bytes())
    data[:4096] = bytes(4096)
    path.write_bytes(data)
    database = Database(path)
    assert "is damaged" in caplog.text
    assert Interactions(database, owner="0").recent(A) == []
    assert [file for file in path.parent.iterdir() if ".damaged-" in file.name]
    database.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(ValueError, match="has version 9; this program writes version 1"):
        Database(path)


def test_bytes_that_change_in_the_file(tmp_path):
    """Whatever is hit, what is read is right, or is refused."""
    path = tmp_path / "db"
    database = Database(path)
    store = Interactions(database, owner="0")
    turns = {finished(store, A, tokens(100, i), tokens(20, i + 50), request=f"{i}"): i for i in range(12)}
    database.scrub()
    database.close()
    pristine = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(30):
        data = bytearray(pristine)
        for at in rng.integers(0, len(data), 3):
            data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            database = Database(path)
        except (ValueError, Unavailable):
            refused += len(turns)
            continue
        for name, i in turns.items():
            try:
                turn = Interactions(database, owner="1").get(A, name)
            except (Unreadable, NotFound, Unavailable):
                refused += 1
            else:
                assert turn.token_ids.tolist() == [*tokens(100, i), *tokens(20, i + 50)] and turn.request == f"{i}"
        database.close()
    assert 0 < refused < 30 * len(turns)


def test_a_full_disk_refuses_and_recovers(small_disk):
    database = Database(small_disk / "db")
    store = Interactions(database, owner="0")
    first = finished(store, A, [1], [2])
    with (small_disk / "other").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(Unavailable, match="full"):
        for i in range(100):
            finished(store, A, tokens(2000, i), [2])
    assert store.get(A, first).token_ids.tolist() == [1, 2]
    (small_disk / "other").unlink()
    again = finished(store, A, tokens(2000), [2])
    assert store.get(A, again).token_ids.size == 2001
    database.close()


WRITER = """
import sys
from pathlib import Path
from umbra.cache.database import Database
from umbra.cache.interactions import Interactions

database = Database(Path(sys.argv[1]))
store = Interactions(database, owner=sys.argv[2])
for i in range(15):
    store.finish(store.begin(b"a" * 16, [i], model="m"), [i + 1])
database.close()
"""


def test_two_servers_share_a_database(tmp_path):
    path = tmp_path / "umbra.sqlite"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, owner], env=env) for owner in "012"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    database = Database(path)
    turns = Interactions(database, owner="3").recent(A)
    assert len(turns) == 45 and {turn.status for turn in turns} == {"completed"}
    database.close()


class InteractionsMachine(RuleBasedStateMachine):
    """Against dictionaries: whatever is deleted, expired or restarted, the others keep their ids."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.model = {}  # id -> (ids, status, expires)
        self.open()

    def open(self):
        self.database = Database(Path(self.folder.name) / "db")
        self.store = Interactions(self.database, owner="0", clock=self.clock)

    def teardown(self):
        self.database.close()
        self.folder.cleanup()

    def alive(self):
        return [id for id, (_, _, expires) in self.model.items() if expires is None or expires > self.clock.now]

    @rule(data=st.data(), new=st.lists(st.integers(0, 3), min_size=1, max_size=5), ttl=st.sampled_from([None, 5, 50]))
    def begin(self, data, new, ttl):
        parent = data.draw(st.sampled_from([None, *self.alive()]))
        keep = data.draw(st.integers(0, len(self.model[parent][0]))) if parent else 0
        prompt = (self.model[parent][0][:keep] if parent else []) + new
        id = self.store.begin(A, prompt, model="m", parent=parent, ttl=ttl)
        self.model[id] = (prompt, "in_progress", None if ttl is None else self.clock.now + ttl)

    @precondition(lambda self: any(status == "in_progress" for _, status, _ in self.model.values()))
    @rule(data=st.data(), new=st.lists(st.integers(0, 3), max_size=4), end=st.booleans())
    def append(self, data, new, end):
        running = [id for id, (_, status, _) in self.model.items() if status == "in_progress"]
        id = data.draw(st.sampled_from(running))
        ids, status, expires = self.model[id]
        if end:
            self.store.finish(id, new)
        else:
            self.store.append(id, new)
        self.model[id] = (ids + new, "completed" if end else status, expires)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        id = data.draw(st.sampled_from(list(self.model)))
        assert self.store.delete(A, id).tolist() == self.model.pop(id)[0]

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds):
        self.clock.now += seconds
        alive = set(self.alive())
        purged = sorted(ids.tolist() for _, ids in self.store.purge())
        assert purged == sorted(ids for id, (ids, _, _) in self.model.items() if id not in alive)
        self.model = {id: values for id, values in self.model.items() if id in alive}

    @rule()
    def restart(self):
        self.database.close()
        self.open()
        for id, (ids, status, expires) in self.model.items():
            if status == "in_progress":
                self.model[id] = (ids, "incomplete", expires)

    @invariant()
    def all_there(self):
        for id, (ids, status, expires) in self.model.items():
            turn = self.store.get(A, id)
            assert (turn.token_ids.tolist(), turn.status, turn.expires) == (ids, status, expires)


TestInteractions = InteractionsMachine.TestCase
TestInteractions.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)


def test_a_million_tokens(database):
    store = Interactions(database, owner="0")
    ids = tokens(1_000_000)
    first = finished(store, A, ids[:-1000], ids[-1000:])
    second = finished(store, A, np.append(ids, [1, 2]), [3], parent=first)
    assert np.array_equal(store.get(A, second).token_ids[:-3], ids)
    assert dict(database.query("SELECT id, length(tokens) FROM interactions"))[second] == 12
