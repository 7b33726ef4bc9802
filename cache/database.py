"""The SQLite file behind stored conversations and cached contents.

A commit is on the disk when it returns (write-ahead log, full synchronisation). Every row carries a checksum of all of
it: SQLite itself does not notice a flipped bit in a value. Deleted content is overwritten, in the log too. Several
processes may use one file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from .keys import pack_tokens

log = logging.getLogger(__name__)

VERSION = 1

_SCHEMA = """
CREATE TABLE interactions (
    id TEXT PRIMARY KEY, space BLOB NOT NULL, parent TEXT, keep INTEGER NOT NULL, tokens BLOB NOT NULL,
    prompt INTEGER NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL, request TEXT NOT NULL, output TEXT NOT NULL,
    usage TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, expires REAL, owner TEXT NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX interactions_parent ON interactions (parent);
CREATE INDEX interactions_expires ON interactions (expires);
CREATE INDEX interactions_created ON interactions (space, created);
CREATE TABLE pieces (
    id TEXT NOT NULL REFERENCES interactions (id) ON DELETE CASCADE, number INTEGER NOT NULL, tokens BLOB NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (id, number)
) WITHOUT ROWID;
CREATE TABLE contents (
    name TEXT PRIMARY KEY, space BLOB NOT NULL, model TEXT NOT NULL, display_name TEXT NOT NULL, tokens BLOB NOT NULL,
    body TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, expires REAL NOT NULL, crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX contents_space ON contents (space, created);
"""


class NotFound(KeyError):
    """There is nothing of this name, or it belongs to somebody else."""

    def __str__(self) -> str:
        return str(self.args[0])


class Unreadable(Exception):
    """What is stored was damaged."""


class Unavailable(Exception):
    """Nothing can be stored, or looked up, now: the disk is full, cannot be written, or there is no database."""


class Database:
    """One connection, for any thread."""

    def __init__(self, path: Path | None) -> None:
        """Opens `path`, which is made if it is missing; None: everything is in memory and ends with the process. A file
        that is no database any more is put aside, with a warning, and an empty one takes its place."""
        self._lock = threading.RLock()
        if path is None:
            self._connection = self._open(":memory:")
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._connection = self._open_file(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            self._put_aside(path, error)
            self._connection = self._open_file(path)

    def _open_file(self, path: Path) -> sqlite3.Connection:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # the log inherits its mode
        return self._open(path)

    def _open(self, path: Path | str) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise ValueError(f"{path} has version {version}; this program writes version {VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _put_aside(path: Path, error: Exception) -> None:
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        log.error("%s is damaged (%s); it is kept as %s, and an empty one takes its place", path, error, aside)
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything in the block is on the disk when it ends, or nothing of it. Raises `Unavailable` or `Unreadable`
        for what SQLite reports."""
        with self._lock, _reported():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises like `transaction`."""
        with self._lock, _reported():
            return self._connection.execute(sql, values).fetchall()

    def scrub(self) -> None:
        """Empty the write-ahead log, so that deleted content is in no file any more. While another process reads, its
        own next checkpoint does it."""
        with self._lock, _reported():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Nothing may be done afterwards."""
        with self._lock:
            self._connection.close()


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise Unavailable(f"the database cannot be used now: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Unreadable(f"the database is damaged: {error}") from error


def row_crc(*values: Any) -> int:
    """The checksum of a row's values: each by its type and length."""
    crc = 0
    for value in values:
        if isinstance(value, float):
            data = struct.pack("<d", value)
        else:
            data = value if isinstance(value, bytes) else str(value).encode()
        crc = crc32(data, crc32(f"{type(value).__name__} {len(data)};".encode(), crc))
    return crc


def tokens_of(packed: bytes) -> np.ndarray:
    """Token ids, int32, of their packed form."""
    return np.frombuffer(packed, "<u4").astype(np.int32)


def packed(token_ids: Any) -> bytes:
    """Token ids as they are stored."""
    return pack_tokens(np.asarray(token_ids, np.int64)) if len(token_ids) else b""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
