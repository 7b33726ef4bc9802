"""What all tiers have in common: how blocks come, are found, held, read and lost.

A tier keeps its index and, in a place of its own kind, the blocks' bytes. Rules:

* A block comes after the one it continues, and goes before it: no tier has chains without a head.
* What is found is held in the same moment, so that it is not evicted before it is read.
* What is read is a private copy, verified (checksum, token ids, fingerprint), and the block was still the tier's after
  it was copied. Anything else raises `Damaged`; the block and those behind it are lost then, and computed again.
* Losing a block never waits for those who hold it: they find out when they read.

All methods may be called from any thread. Those that find, hold and release blocks take microseconds and never wait for
a device; those that store, read and remove do.
"""

from __future__ import annotations

import abc
import enum
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from ..configs.engine import BLOCK
from .index import Entry, TierIndex
from .keys import BlockInfo
from .policies import Policy
from .record import Damaged

P = TypeVar("P")


class Put(enum.Enum):
    """What became of a block that was offered to a tier."""

    WRITTEN = "written"
    KNOWN = "known"  # it was there already
    HEADLESS = "headless"  # what it continues is not there
    FULL = "full"  # everything there is in use or pinned, or it is larger than the tier
    READ_ONLY = "read_only"  # the tier takes nothing now
    NOT_KEPT = "not_kept"  # the tier has no place for blocks of this kind


class Tier(abc.ABC, Generic[P]):
    """One tier. Subclasses say where bytes go."""

    name: str

    def __init__(self, policy: Callable[[], Policy[bytes]]) -> None:
        self.io = threading.RLock()  # who changes what is stored; taken before `lock`
        self.lock = threading.RLock()  # the index; never held while bytes are moved
        self.index: TierIndex[P] = TierIndex(policy)
        self.evictions: Counter[str] = Counter()  # by reason
        self.lost: Counter[str] = Counter()  # blocks that failed verification, by reason
        self.written_bytes = 0  # payloads, as offered
        self.read_only_reason: str | None = None  # why the tier takes no blocks, if it does not

    # ---- where bytes go

    @abc.abstractmethod
    def _store(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Entry[P]:
        """Store a payload for which there is room. May raise `OSError`. Called with `io`, like the two below."""

    @abc.abstractmethod
    def _load(self, entry: Entry[P], buffer: np.ndarray | None) -> memoryview:
        """A private copy of the payload, verified, in `buffer` or new memory. Raises `Damaged` or `OSError`. Called
        without any lock."""

    @abc.abstractmethod
    def _erase(self, entry: Entry[P]) -> None:
        """Give the place of an entry back that the index no longer has."""

    def _erase_all(self, entries: list[Entry[P]]) -> None:
        for entry in entries:
            self._erase(entry)

    @abc.abstractmethod
    def _room(self, info: BlockInfo, payload_bytes: int) -> Put | None:
        """Make room for a block, evicting no more than that needs; None if there is, else why not."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """What the tier takes where it lies."""

    @property
    @abc.abstractmethod
    def capacity_bytes(self) -> int: ...

    # ---- blocks come

    def put(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Put:
        """Store a block; `crc` of `record.payload_crc`. Moves bytes."""
        with self.io:
            with self.lock:
                if self._covered(info):
                    return Put.KNOWN
                if not self.index.reachable(info):
                    return Put.HEADLESS
            refused = self._room(info, len(payload)) or self._store_and_index(info, payload, crc)
            if refused is None:
                self.written_bytes += len(payload)
                self._drop_superseded(info)
            return refused or Put.WRITTEN

    def _store_and_index(self, info: BlockInfo, payload: bytes | memoryview, crc: int) -> Put | None:
        try:
            entry = self._store(info, payload, crc)
        except OSError as error:
            return self._failed(error)
        with self.lock:
            self.index.add(entry)
        return None

    def _failed(self, error: OSError) -> Put:
        """What storing says when the place failed."""
        raise error

    def _covered(self, info: BlockInfo) -> bool:
        """Whether the block is here, or, for a tail, one that begins with its tokens."""
        if self.index.find(info) is not None:
            return True
        return info.n_tokens < BLOCK and any(
            len(entry.info.tokens) > len(info.tokens)
            and entry.info.tokens.startswith(info.tokens)
            and entry.info.extras == info.extras
            for entry in self.index.siblings(info)
        )

    def _drop_superseded(self, info: BlockInfo) -> None:
        """A longer block is here: tails that it begins with are of no use any more."""
        with self.lock:
            superseded = [
                entry.info.key
                for entry in self.index.siblings(info)
                if len(entry.info.tokens) < len(info.tokens)
                and info.tokens.startswith(entry.info.tokens)
                and entry.info.extras == info.extras
                and self.index.removable(entry.info.key)
            ]
        for key in superseded:
            self._remove(key, "superseded")

    # ---- blocks are found

    def acquire(self, info: BlockInfo) -> Entry[P] | None:
        """Find a block and hold it, and with it those before it; None if it is not here."""
        with self.lock:
            entry = self.index.find(info)
            if entry is not None:
                self.index.hold(entry)
            return entry

    def acquire_chain(self, chain: list[BlockInfo]) -> list[Entry[P]]:
        """The entries of the longest beginning of a chain that is here; the last one of them is held."""
        with self.lock:
            entries: list[Entry[P]] = []
            for info in chain:
                entry = self.index.find(info)
                if entry is None:
                    break
                entries.append(entry)
            if entries:
                self.index.hold(entries[-1])
                self.index.use(entries)
            return entries

    def acquire_partial(self, parent: bytes, tokens: bytes) -> tuple[Entry[P], int] | None:
        """The block behind `parent` that begins with the most of `tokens` (packed), held, and how many they are."""
        with self.lock:
            found = self.index.partial(parent, tokens)
            if found is not None:
                self.index.hold(found[0])
                self.index.use([found[0]])
            return found

    def release(self, entry: Entry[P]) -> None:
        """Undo one acquisition."""
        with self.lock:
            self.index.release(entry)

    def has(self, info: BlockInfo) -> bool:
        """Whether the block is here, or would not be kept. Waits for nobody; the answer may be a moment old."""
        return self.index.find(info) is not None

    def pin(self, key: bytes) -> None:
        """Never evict this block, now or once it comes."""
        with self.lock:
            self.index.pin(key)

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`."""
        with self.lock:
            self.index.unpin(key)

    def read(self, entry: Entry[P], buffer: np.ndarray | None = None) -> memoryview:
        """The verified payload of a block that was acquired, in `buffer` (uint8, room for a whole record) or memory of
        its own. Moves bytes. Raises `Damaged`."""
        failure: Damaged | None = None
        try:
            payload = self._load(entry, buffer)
        except Damaged as error:
            failure = error
        except OSError as error:
            failure = Damaged("io_error", str(error))
        with self.lock:
            if self.index.get(entry.info.key) is not entry:
                raise Damaged("gone", "the block was removed before it was read")
        if failure is not None:
            self.lose(entry, failure.reason)
            raise failure
        return payload

    # ---- blocks go

    def lose(self, entry: Entry[P], reason: str) -> None:
        """A block turned out to be unusable: it goes, and what continues it."""
        with self.io:
            if self.index.get(entry.info.key) is entry:
                self.lost[reason] += 1
                self._remove(entry.info.key, reason)

    def delete(self, key: bytes) -> int:
        """Remove a block and what continues it at once; how many blocks went."""
        with self.io:
            return self._remove(key, "deleted") if self.index.get(key) is not None else 0

    def clear(self) -> int:
        """Remove everything; how many blocks went."""
        with self.io:
            heads = [entry.info.key for entry in self.index if entry.info.first]
            return sum(self._remove(key, "cleared") for key in heads)

    def _remove(self, key: bytes, reason: str) -> int:
        with self.lock:
            removed = self.index.remove(key)
        self._erase_all(removed)
        self.evictions[reason] += len(removed)
        return len(removed)

    def _evict(self, reason: str, info: BlockInfo | None = None, space: bytes | None = None) -> bool:
        """Give up one block, of `space` if that is given, but not what `info` is about to continue; False if none may
        go."""
        with self.lock:
            entry = self.index.victim(space, None if info is None else info.parent)
        if entry is None:
            return False
        self._erase(entry)
        self.evictions[reason] += 1
        return True

    def check(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self.lock:
            self.index.check()

    def close(self) -> None:
        """Nothing is put or read afterwards."""
