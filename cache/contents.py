"""Cached contents: beginnings of prompts that a tenant has asked to keep ready until a given time.

Their token ids are stored, and their blocks are pinned in every tier (those that are not there yet once they come), as
far as the tenant's quota goes. After a change of weights the ids are still there, and the blocks are computed again.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .context import ContextCache
from .database import Database, NotFound, Unreadable, as_json, packed, row_crc, tokens_of

_COLUMNS = "name, space, model, display_name, tokens, body, created, updated, expires"


class Expired(Exception):
    """Cached content whose time is over, but which is still known by name."""


class QuotaExceeded(Exception):
    """A tenant has no room for more cached content."""


@dataclass(frozen=True)
class CachedContent:
    """The beginning of a prompt. Times are seconds since 1970."""

    name: str
    space: bytes
    model: str
    display_name: str
    token_ids: np.ndarray
    """int32"""
    body: Any
    """What it was made from, as the API was given it."""
    created: float
    updated: float
    expires: float


class CachedContents:
    """The cached contents of all tenants. Methods may be called from any thread and take milliseconds."""

    def __init__(
        self,
        database: Database,
        cache: ContextCache,
        *,
        model: str,
        quota_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`model`: whose contents are kept ready by this process; `quota_tokens`: of each tenant, all models
        together."""
        self._database, self._cache, self._clock = database, cache, clock
        self.model, self.quota_tokens = model, quota_tokens
        self._pinned: dict[str, CachedContent] = {}
        for content in self._all("model = ? AND expires > ?", (model, clock())):
            self._pin(content)

    def create(
        self,
        space: bytes,
        token_ids: Sequence[int] | np.ndarray,
        *,
        expires: float,
        body: Any = None,
        display_name: str = "",
    ) -> CachedContent:
        """Keep the beginning of a prompt. Raises `QuotaExceeded`, or `ValueError` for a time that is over."""
        now, expires = float(self._clock()), float(expires)
        _check_expiry(expires, now)
        tokens = packed(token_ids)
        content = CachedContent(
            f"cachedContents/{uuid.uuid4().hex}", space, self.model, display_name, tokens_of(tokens), body, now, now,
            expires,
        )  # fmt: skip
        with self._database.transaction() as db:
            held = db.execute(
                "SELECT coalesce(sum(length(tokens)), 0) / 4 FROM contents WHERE space = ? AND expires > ?",
                (space, now),
            ).fetchone()[0]
            if held + len(content.token_ids) > self.quota_tokens:
                raise QuotaExceeded(
                    f"{len(content.token_ids)} tokens beside {held} of other cached contents are more than the "
                    f"{self.quota_tokens} that a tenant may keep"
                )
            self._write(db, content)
            if not self._pin(content):
                raise QuotaExceeded("the tiers have no room for more pinned content")
        return content

    def get(self, space: bytes, name: str) -> CachedContent:
        """Raises `NotFound`, `Expired`, or `Unreadable` if it was damaged."""
        rows = self._database.query(f"SELECT {_COLUMNS}, crc FROM contents WHERE name = ? AND space = ?", (name, space))
        if not rows:
            raise NotFound(f"there is no {name}")
        content = _checked(rows[0])
        if content.expires <= self._clock():
            raise Expired(f"{name} expired {self._clock() - content.expires:.0f} seconds ago")
        return content

    def page(self, space: bytes, *, limit: int = 50, after: str | None = None) -> list[CachedContent]:
        """What has not expired, oldest first; `after`: the name of the last one of the page before."""
        since: tuple[float, str] = (0.0, "")
        if after is not None:
            rows = self._database.query(
                "SELECT created, name FROM contents WHERE name = ? AND space = ?", (after, space)
            )
            if not rows:
                raise NotFound(f"there is no {after}")
            since = rows[0]
        where = "space = ? AND expires > ? AND (created, name) > (?, ?)"
        return self._all(f"{where} ORDER BY created, name LIMIT ?", (space, self._clock(), *since, limit))

    def patch(self, space: bytes, name: str, *, expires: float) -> CachedContent:
        """Change until when it is kept. Raises like `get`, and `ValueError` for a time that is over."""
        now, expires = float(self._clock()), float(expires)
        _check_expiry(expires, now)
        old = self.get(space, name)
        new = CachedContent(
            old.name, old.space, old.model, old.display_name, old.token_ids, old.body, old.created, now, expires
        )
        with self._database.transaction() as db:
            self._write(db, new)
        if name in self._pinned:
            self._pinned[name] = new
        return new

    def delete(self, space: bytes, name: str) -> None:
        """Remove it at once, expired or not, and its blocks if nothing else uses them. Raises `NotFound`."""
        rows = self._database.query("SELECT tokens FROM contents WHERE name = ? AND space = ?", (name, space))
        if not rows:
            raise NotFound(f"there is no {name}")
        with self._database.transaction() as db:
            db.execute("DELETE FROM contents WHERE name = ?", (name,))
        self._database.scrub()
        self._unpin(name)
        self._cache.forget(self._cache.identity(space), tokens_of(rows[0][0]))

    def expire(self) -> int:
        """Unpin what has expired, to be called now and then; how many. Their blocks stay until room is needed."""
        now = self._clock()
        over = [name for name, content in list(self._pinned.items()) if content.expires <= now]
        for name in over:
            self._unpin(name)
        return len(over)

    def purge(self, older_than: float) -> int:
        """Remove what expired that many seconds ago: until then it is refused as expired, afterwards as unknown."""
        with self._database.transaction() as db:
            purged = db.execute("DELETE FROM contents WHERE expires <= ?", (self._clock() - older_than,)).rowcount
        if purged:
            self._database.scrub()
        return purged

    def _all(self, where: str, values: tuple[Any, ...]) -> list[CachedContent]:
        found = []
        for row in self._database.query(f"SELECT {_COLUMNS}, crc FROM contents WHERE {where}", values):
            try:
                found.append(_checked(row))
            except Unreadable:
                continue  # said to whoever asks for it by name
        return found

    def _pin(self, content: CachedContent) -> bool:
        if self._cache.pin(self._cache.identity(content.space), content.token_ids):
            self._pinned[content.name] = content
            return True
        return False

    def _unpin(self, name: str) -> None:
        content = self._pinned.pop(name, None)
        if content is not None:
            self._cache.unpin(self._cache.identity(content.space), content.token_ids)

    @staticmethod
    def _write(db: sqlite3.Connection, content: CachedContent) -> None:
        values = (
            content.name, content.space, content.model, content.display_name, packed(content.token_ids),
            as_json(content.body), content.created, content.updated, content.expires,
        )  # fmt: skip
        db.execute(f"INSERT OR REPLACE INTO contents VALUES ({', '.join('?' * 10)})", (*values, row_crc(*values)))


def _check_expiry(expires: float, now: float) -> None:
    if not expires > now:
        raise ValueError("the time until which content is kept must be in the future")


def _checked(row: tuple[Any, ...]) -> CachedContent:
    *values, crc = row
    if crc != row_crc(*values):
        raise Unreadable(f"{row[0]} was damaged")
    name, space, model, display_name, tokens, body, created, updated, expires = values
    return CachedContent(
        name, space, model, display_name, tokens_of(tokens), json.loads(body), created, updated, expires
    )
