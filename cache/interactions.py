"""Stored conversations: what was said, as token ids, so that it can be continued from any earlier point.

    store = Interactions(Database(path), owner="0")
    id = store.begin(space, prompt_ids, parent=previous_id, model="smollm2", request={...}, ttl=86400)
    store.append(id, some_ids)                       # now and then, while the answer grows
    store.finish(id, more_ids, status="completed", output={...}, usage={...})    # before the client hears the end

An interaction holds the ids of its prompt and its answer. Of these it stores only what differs from its parent, so a
conversation of n turns takes the room of its text once. Several may continue the same one. What was begun and not
finished when its process died is `incomplete`, with the ids that were appended.

Deleting one takes it away at once, from the file too. Interactions that continue it keep the ids they need.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from .database import Database, NotFound, Unreadable, as_json, packed, row_crc, tokens_of
from .index import common_tokens

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_COLUMNS = (
    "id, space, parent, keep, tokens, prompt, status, model, request, output, usage, created, updated, expires, owner"
)


@dataclass(frozen=True)
class Interaction:
    """A turn of a conversation."""

    id: str
    space: bytes
    parent: str | None
    status: Status
    model: str
    token_ids: np.ndarray
    """int32: everything from the beginning of the conversation to the end of this answer."""
    prompt_tokens: int
    """How many of them are the prompt."""
    request: Any
    output: Any
    usage: Any
    created: float
    updated: float
    expires: float | None


class Interactions:
    """The interactions of all tenants in one database. Methods may be called from any thread and take milliseconds."""

    def __init__(self, database: Database, *, owner: str, clock: Callable[[], float] = time.time) -> None:
        """`owner` names this process among those that use the database, for example the number of its cache folder,
        which only one process has at a time: what an earlier process of that name left unfinished is `incomplete`."""
        self._database, self._owner, self._clock = database, owner, clock
        self._pieces: dict[str, int] = {}  # of interactions in progress: how many pieces they have
        self.recovered = self._recover()

    # ---- writing

    def begin(
        self,
        space: bytes,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        model: str,
        parent: str | None = None,
        request: Any = None,
        ttl: float | None = None,
        id: str | None = None,
    ) -> str:
        """Store a prompt; the answer's ids follow. `ttl`: seconds it is kept, None for good. Returns its id.

        Raises `NotFound` if `space` has no interaction `parent`.
        """
        tokens = packed(prompt_ids)
        name = id or f"int_{uuid.uuid4().hex}"
        now = float(self._clock())
        with self._database.transaction() as db:
            keep = 0
            if parent is not None:
                keep = common_tokens(self._tokens(db, self._row(db, space, parent)), tokens)
            self._insert(
                db, (name, space, parent, keep, tokens[4 * keep :], len(tokens) // 4, "in_progress", model,
                     as_json(request), "null", "null", now, now, None if ttl is None else now + ttl, self._owner),
            )  # fmt: skip
            self._pieces[name] = 0
        return name

    def append(self, id: str, token_ids: Sequence[int] | np.ndarray) -> None:
        """Keep some more ids of an answer in progress. Nothing happens if it was deleted meanwhile."""
        self.append_all({id: token_ids})

    def append_all(self, answers: Mapping[str, Sequence[int] | np.ndarray]) -> None:
        """`append` for several answers, in one commit."""
        known = {id: packed(ids) for id, ids in answers.items() if len(ids) and id in self._pieces}
        rows = [(id, self._pieces[id], tokens) for id, tokens in known.items()]
        with self._database.transaction() as db:
            db.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?)", [(*row, row_crc(*row)) for row in rows])
        for id, number, _ in rows:
            self._pieces[id] = number + 1

    def finish(
        self,
        id: str,
        token_ids: Sequence[int] | np.ndarray = (),
        *,
        status: Status = "completed",
        output: Any = None,
        usage: Any = None,
    ) -> None:
        """The answer has ended; `token_ids` are those that were not appended yet. On the disk when this returns.

        Nothing happens if it was deleted meanwhile.
        """
        with self._database.transaction() as db:
            found = db.execute(f"SELECT {_COLUMNS}, crc FROM interactions WHERE id = ?", (id,)).fetchone()
            if found is not None:
                self._close(db, _checked(found), packed(token_ids), status, as_json(output), as_json(usage))
        self._pieces.pop(id, None)

    def _close(
        self, db: sqlite3.Connection, row: dict[str, Any], tokens: bytes, status: Status, output: str, usage: str
    ) -> None:
        row["tokens"] += self._appended(db, row["id"]) + tokens
        row.update(status=status, output=output, usage=usage, updated=float(self._clock()))
        db.execute("DELETE FROM pieces WHERE id = ?", (row["id"],))
        self._insert(db, tuple(row.values()))

    def _insert(self, db: sqlite3.Connection, values: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * (len(values) + 1))
        columns = f"{_COLUMNS}, crc"
        updates = ", ".join(f"{name} = excluded.{name}" for name in columns.split(", ")[1:])
        db.execute(
            f"INSERT INTO interactions ({columns}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {updates}",
            (*values, row_crc(*values)),
        )

    def _recover(self) -> int:
        """What an earlier process of this name did not finish has ended."""
        with self._database.transaction() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS}, crc FROM interactions WHERE owner = ? AND status = 'in_progress'", (self._owner,)
            ).fetchall()
            recovered = 0
            for row in rows:
                try:
                    self._close(db, _checked(row), b"", "incomplete", "null", "null")
                    recovered += 1
                except Unreadable:
                    continue  # said again to whoever asks for it
        return recovered

    # ---- reading

    def get(self, space: bytes, id: str) -> Interaction:
        """One interaction. Raises `NotFound` if `space` has none of this id or it has expired, `Unreadable` if it, or
        one it continues, was damaged."""
        with self._database.transaction() as db:
            row = self._row(db, space, id)
            return _interaction(row, self._tokens(db, row))

    def recent(self, space: bytes, *, limit: int = 50, before: float | None = None) -> list[Interaction]:
        """The latest interactions of `space`, newest first; `before`: only those created before then."""
        now = self._clock()
        with self._database.transaction() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS}, crc FROM interactions WHERE space = ? AND created < ? "
                "AND (expires IS NULL OR expires > ?) ORDER BY created DESC, id LIMIT ?",
                (space, before if before is not None else float("inf"), now, limit),
            ).fetchall()
            return [_interaction(row, self._tokens(db, row)) for row in map(_checked, rows)]

    def children(self, space: bytes, id: str) -> list[str]:
        """The ids of the interactions that continue this one, oldest first."""
        rows = self._database.query(
            "SELECT id FROM interactions WHERE parent = ? AND space = ? ORDER BY created", (id, space)
        )
        return [row[0] for row in rows]

    def lineage(self, space: bytes, id: str) -> list[tuple[Any, Any]]:
        """Request and output of an interaction and of those it continues, the first one first. One that was deleted is
        missing. Raises like `get`."""
        out: list[tuple[Any, Any]] = []
        with self._database.transaction() as db:
            row = self._row(db, space, id)
            while True:
                out.append((json.loads(row["request"]), json.loads(row["output"])))
                found = db.execute(
                    f"SELECT {_COLUMNS}, crc FROM interactions WHERE id = ?", (row["parent"],)
                ).fetchone()
                if found is None:
                    return out[::-1]
                row = _checked(found)

    def _row(self, db: sqlite3.Connection, space: bytes, id: str) -> dict[str, Any]:
        row = db.execute(f"SELECT {_COLUMNS}, crc FROM interactions WHERE id = ? AND space = ?", (id, space)).fetchone()
        if row is None:
            raise NotFound(f"there is no interaction {id}")
        values = _checked(row)
        if values["expires"] is not None and values["expires"] <= self._clock():
            raise NotFound(f"interaction {id} has expired")
        return values

    def _tokens(self, db: sqlite3.Connection, row: dict[str, Any]) -> bytes:
        """All ids of an interaction, packed: of each ancestor the part that is kept."""
        own = row["tokens"] + self._appended(db, row["id"])
        parts, keep = [own], row["keep"]
        while keep:
            found = db.execute(f"SELECT {_COLUMNS}, crc FROM interactions WHERE id = ?", (row["parent"],)).fetchone()
            if found is None:
                raise Unreadable(f"what interaction {row['id']} continues is gone")
            row = _checked(found)
            if keep > row["keep"]:
                part = (row["tokens"] + self._appended(db, row["id"]))[: 4 * (keep - row["keep"])]
                if len(part) != 4 * (keep - row["keep"]):
                    raise Unreadable(f"interaction {row['id']} is shorter than what continues it")
                parts.append(part)
                keep = row["keep"]
        return b"".join(reversed(parts))

    def _appended(self, db: sqlite3.Connection, id: str) -> bytes:
        pieces = db.execute("SELECT number, tokens, crc FROM pieces WHERE id = ? ORDER BY number", (id,)).fetchall()
        for at, (number, tokens, crc) in enumerate(pieces):
            if at != number or crc != row_crc(id, number, tokens):
                raise Unreadable(f"the answer of interaction {id} was damaged")
        return b"".join(tokens for _, tokens, _ in pieces)

    # ---- deleting

    def delete(self, space: bytes, id: str) -> np.ndarray:
        """Remove an interaction; its token ids, so that the cache can forget what only it used.

        Raises `NotFound` if `space` has none of this id. A damaged one is removed as well; no ids are known then.
        """
        with self._database.transaction() as db:
            if not db.execute("SELECT 1 FROM interactions WHERE id = ? AND space = ?", (id, space)).fetchone():
                raise NotFound(f"there is no interaction {id}")
            tokens = self._remove(db, id)
        self._database.scrub()
        return tokens_of(tokens)

    def purge(self) -> list[tuple[bytes, np.ndarray]]:
        """Remove what has expired: namespace and token ids of each."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT id, space FROM interactions WHERE expires <= ?", (self._clock(),)).fetchall()
            purged = [(space, tokens_of(self._remove(db, id))) for id, space in rows]
        if purged:
            self._database.scrub()
        return purged

    def trim(self, limit: int) -> int:
        """Remove the oldest that have ended until the rest takes at most `limit` bytes, as far as that goes; what it
        takes. Looks at every interaction."""
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT id, status, length(tokens) + length(request) + length(output) FROM interactions "
                "ORDER BY created DESC, id DESC"
            ).fetchall()
            used = sum(size for _, _, size in rows)
            while used > limit and rows:
                id, status, size = rows.pop()
                if status != "in_progress":
                    self._remove(db, id)
                    used -= size
        return used

    def _remove(self, db: sqlite3.Connection, id: str) -> bytes:
        found = db.execute(f"SELECT {_COLUMNS}, crc FROM interactions WHERE id = ?", (id,)).fetchone()
        tokens = b""
        try:
            row = _checked(found)
            tokens = self._tokens(db, row)
            own = row["tokens"] + self._appended(db, id)
            for child in db.execute(f"SELECT {_COLUMNS}, crc FROM interactions WHERE parent = ?", (id,)).fetchall():
                self._rebase(db, _checked(child), row, own)
        except Unreadable:
            pass  # what continues a damaged one is unreadable already
        db.execute("DELETE FROM pieces WHERE id = ?", (id,))
        db.execute("DELETE FROM interactions WHERE id = ?", (id,))
        self._pieces.pop(id, None)
        return tokens

    def _rebase(self, db: sqlite3.Connection, child: dict[str, Any], gone: dict[str, Any], own: bytes) -> None:
        """Let `child` continue what its parent continued."""
        if child["keep"] > gone["keep"]:
            child["tokens"] = own[: 4 * (child["keep"] - gone["keep"])] + child["tokens"]
            child["keep"] = gone["keep"]
        child["parent"] = gone["parent"]
        self._insert(db, tuple(child.values()))


def _checked(row: tuple[Any, ...]) -> dict[str, Any]:
    *values, crc = row
    if crc != row_crc(*values):
        raise Unreadable(f"interaction {row[0]} was damaged")
    return dict(zip(_COLUMNS.split(", "), values, strict=True))


def _interaction(row: dict[str, Any], tokens: bytes) -> Interaction:
    return Interaction(
        row["id"], row["space"], row["parent"], row["status"], row["model"], tokens_of(tokens), row["prompt"],
        json.loads(row["request"]), json.loads(row["output"]), json.loads(row["usage"]), row["created"],
        row["updated"], row["expires"],
    )  # fmt: skip
