"""Finished responses that can be asked for, continued and replayed. In memory: they end with the process."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import Any


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """`messages` is the whole conversation, answer included, without instructions; `names` are the functions that were
    called in it, by the ids of the calls; `events` are those of its stream, encoded."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    names: dict[str, str]
    input_items: list[dict[str, Any]]
    events: list[bytes]

    @property
    def id(self) -> str:
        return self.response["id"]


class ResponseStore:
    """Responses by tenant and id, at most `limit` bytes of them as a caller measures them; the least recently used go
    first. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, tenant: str, stored: StoredResponse, size: int) -> None:
        """Store a new response; one that is larger than the limit is not kept."""
        if size > self._limit:
            return
        with self._lock:
            self._entries[tenant, stored.id] = (stored, size)
            self._used += size
            while self._used > self._limit:
                _, (_, oldest) = self._entries.popitem(last=False)
                self._used -= oldest

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None: there is no such response, or it is somebody else's."""
        with self._lock:
            entry = self._entries.get((tenant, response_id))
            if entry is None:
                return None
            self._entries.move_to_end((tenant, response_id))
            return entry[0]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            entry = self._entries.pop((tenant, response_id), None)
            if entry is not None:
                self._used -= entry[1]
            return entry is not None
