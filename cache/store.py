"""Everything that outlives a request, in one folder: blocks, stored conversations, cached contents, and the secret.

    <folder>/secret                 what namespaces are made with
    <folder>/blocks/                segments of the cold tier
    <folder>/conversations.sqlite   interactions and cached contents
    <folder>/servers/               one part for each server that uses the folder now

Several servers may use one folder: conversations are shared, blocks are each one's own.
"""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..configs.cache import CacheConfig
from .contents import CachedContents
from .context import ContextCache
from .database import Database, Unavailable, Unreadable
from .folder import Folder
from .interactions import Interactions
from .keys import Identity, Namespaces
from .layout import BlockLayout

log = logging.getLogger(__name__)

PURGE_CONTENTS = 24 * 3600.0
"""Seconds for which expired cached content is refused as expired, and not as unknown."""


class Store:
    """What the engine and the API use. Methods may be called from any thread; those of the engine's thread are in
    `cache`."""

    def __init__(
        self,
        folder: Path,
        layout: BlockLayout,
        *,
        model: str,
        fingerprint: bytes,
        config: CacheConfig = CacheConfig(),  # noqa: B008 (frozen)
        secret: Path | None = None,
        contents_tokens: int = 1_000_000,
        clock: Callable[[], float] = time.time,
        upkeep_every: float = 60.0,
    ) -> None:
        """Opens what is there; a part that cannot be opened is left out with a warning.

        Args:
            folder: made if it is missing.
            layout: of the device pool's blocks.
            model: by what name conversations and cached contents know the model.
            fingerprint: of whatever computes the blocks, `keys.model_fingerprint`.
            config: of the tiers; its folder is set to `blocks` in `folder` unless it names one.
            secret: a file that machines share which share an object store; by default in `folder`.
            contents_tokens: of cached contents that one tenant may keep.
            clock: seconds since 1970.
            upkeep_every: seconds between removals of what has expired.

        Raises `OSError` or `ValueError` if there is no secret and none can be made.
        """
        self.namespaces = Namespaces.load(secret or folder / "secret")
        if config.folder is None:
            config = dataclasses.replace(config, folder=folder / "blocks")
        self.cache = ContextCache(config, layout, fingerprint)
        self._servers: Folder | None = None
        self._interactions: Interactions | None = None
        self._contents: CachedContents | None = None
        try:
            self._servers = Folder.open(folder / "servers")
            self._database = Database(folder / "conversations.sqlite")
            self._interactions = Interactions(self._database, owner=self._servers.path.name, clock=clock)
            self._contents = CachedContents(
                self._database, self.cache, model=model, quota_tokens=contents_tokens, clock=clock
            )
        except (OSError, ValueError, sqlite3.Error, Unavailable, Unreadable) as error:
            log.warning("conversations are not stored: %s", error)
        self._closed = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep_up, args=(upkeep_every,), name="umbra-store-upkeep", daemon=True
        )
        self._keeper.start()

    def _keep_up(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            try:
                self.upkeep()
            except (OSError, sqlite3.Error, Unavailable, Unreadable) as error:
                log.warning("what has expired was not removed: %s", error)

    def identity(self, principal: str) -> Identity:
        """Whose blocks and conversations: of whom the server has authenticated, never of a request's body."""
        return self.cache.identity(self.namespaces.of(principal))

    @property
    def interactions(self) -> Interactions:
        """Raises `Unavailable`."""
        if self._interactions is None:
            raise Unavailable("this server stores no conversations now")
        return self._interactions

    @property
    def contents(self) -> CachedContents:
        """Raises `Unavailable`."""
        if self._contents is None:
            raise Unavailable("this server keeps no cached contents now")
        return self._contents

    def delete_interaction(self, identity: Identity, id: str) -> None:
        """Remove a stored interaction and the blocks that only it used, at once. Raises `NotFound`."""
        self.cache.forget(identity, self.interactions.delete(identity.space, id))

    def upkeep(self) -> int:
        """Remove what has expired; how many interactions went. Called by itself now and then."""
        if self._interactions is None or self._contents is None:
            return 0
        purged = self._interactions.purge()
        for space, token_ids in purged:
            self.cache.forget(self.cache.identity(space), token_ids)
        self._contents.expire()
        self._contents.purge(PURGE_CONTENTS)
        return len(purged)

    def close(self) -> None:
        """Write what waits, and let go of the folder; further calls do nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._keeper.join()
        self.cache.close()
        if self._interactions is not None:
            self._database.close()
        if self._servers is not None:
            self._servers.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
