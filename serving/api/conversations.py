"""Where conversations are kept: in the engine's store, or, if the server has none, in memory, until it ends.

A stored turn has, beside its token ids, what is needed to show it and to go on from it:

    request   {"api", "resource", "messages", "system", "tools", "names", "number", ...}   written when it begins
    output    {"resource", "messages", "names", "numbers", "events"}                       written when it ends
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import from_json, to_json

from ...cache.contents import CachedContents
from ...cache.database import Database
from ...cache.interactions import Interaction, Interactions, Status

if TYPE_CHECKING:
    from ...cache.store import Store

MEMORY_CONTENTS = 1_000_000
"""Tokens of cached contents that one tenant may keep in memory."""


class _NoTiers:
    """In place of the context cache where there is none: nothing can be pinned, and nothing has to be."""

    def identity(self, space: bytes) -> bytes:
        return space

    def pin(self, identity: bytes, token_ids: Any) -> bool:
        return True

    def unpin(self, identity: bytes, token_ids: Any) -> None:
        pass

    def forget(self, identity: bytes, token_ids: Any) -> None:
        pass


class Conversations:
    """Turns and cached contents by tenant. Methods take milliseconds, on the disk too: for a worker."""

    def __init__(self, store: Store | None, model: str, memory: int) -> None:
        """`memory`: bytes of conversations kept if there is no `store`; then the oldest go."""
        self._store, self._memory = store, memory
        self._used = 0  # bytes in memory, at most: what was deleted is not subtracted
        if store is None:
            database = Database(None)
            self._interactions = Interactions(database, owner="memory")
            self._contents = CachedContents(database, _NoTiers(), model=model, quota_tokens=MEMORY_CONTENTS)  # type: ignore[arg-type]

    @property
    def durable(self) -> bool:
        """Whether what is kept outlives the process."""
        return self._store is not None

    @property
    def contents(self) -> CachedContents:
        """Raises `Unavailable`."""
        return self._store.contents if self._store is not None else self._contents

    @property
    def _turns(self) -> Interactions:
        return self._store.interactions if self._store is not None else self._interactions

    def space(self, tenant: str) -> bytes:
        """The namespace of a tenant."""
        if self._store is not None:
            return self._store.identity(tenant).space
        return hashlib.sha256(tenant.encode()).digest()

    def begin(
        self,
        tenant: str,
        id: str,
        prompt: Sequence[int],
        *,
        model: str,
        parent: str | None,
        request: dict[str, Any],
        ttl: float | None = None,
    ) -> None:
        """`ttl`: seconds it is kept; None: for good. Raises `NotFound` if there is no `parent`, and `Unavailable` if
        nothing can be stored now."""
        if self._store is None:
            self._make_room(4 * len(prompt) + len(to_json(request)))
        self._turns.begin(self.space(tenant), prompt, model=model, parent=parent, request=request, id=id, ttl=ttl)

    def append(self, answers: Mapping[str, Sequence[int]]) -> None:
        self._turns.append_all(answers)

    def finish(self, id: str, rest: Sequence[int], *, status: Status, output: Any, usage: Any) -> None:
        if self._store is None:
            self._make_room(8 * len(rest) + len(to_json(output)))
        self._turns.finish(id, rest, status=status, output=output, usage=usage)

    def _make_room(self, size: int) -> None:
        """Before something of this size is kept in memory: the oldest go, some more than needed at a time."""
        self._used += size
        if self._used > self._memory:
            self._used = self._interactions.trim(max(0, self._memory * 3 // 4 - size)) + size

    def get(self, tenant: str, id: str) -> Interaction:
        """Raises `NotFound`, `Unreadable`, `Unavailable`."""
        return self._turns.get(self.space(tenant), id)

    def lineage(self, tenant: str, id: str) -> list[tuple[Any, Any]]:
        return self._turns.lineage(self.space(tenant), id)

    def delete(self, tenant: str, id: str) -> None:
        """Raises `NotFound`."""
        if self._store is not None:
            self._store.delete_interaction(self._store.identity(tenant), id)
        else:
            self._interactions.delete(self.space(tenant), id)


def pack_events(events: Sequence[bytes]) -> str:
    """Events as a column of the database keeps them."""
    return base64.b64encode(zlib.compress(to_json([one.decode() for one in events]), 1)).decode()


def unpack_events(text: str) -> list[bytes]:
    return [one.encode() for one in from_json(zlib.decompress(base64.b64decode(text)))]


def answer_ids(turn: Interaction) -> list[int]:
    """The ids of a stored turn's answer."""
    return np.asarray(turn.token_ids[turn.prompt_tokens :]).tolist()
