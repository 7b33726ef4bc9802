"""The context cache: all tiers behind the device's pool, as one thing that the engine talks to.

    cache = ContextCache(CacheConfig(folder=...), layout, model_fingerprint)
    match = cache.match(cache.identity(space), prompt, known_blocks=3)      # what the tiers have, held
    load = cache.load(match)                                                # starts reading
    for block in load.poll(): ...                                           # once a step, until load.done
    cache.offer(info, lambda: arrays_of(block))                             # a sealed block, or a tail

Invariants: token ids are the truth and a block is a cache of what they lead to, so every failure ends in "recompute";
nothing is handed over that was not verified; the engine's thread never waits for a disk; what was found is held until
it was read, or until a deadline.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..configs.cache import CacheConfig
from ..configs.engine import BLOCK
from .buffers import Buffers
from .disk import DiskTier
from .keys import BlockInfo, Extras, Identity, pack_tokens
from .layout import BlockLayout
from .lease import Lease, Leases
from .load import Found, Load
from .memory import MemoryTier
from .objects import ObjectTier
from .record import record_bytes
from .selftest import measure_folder
from .stats import CacheStats, Histogram, TierStats
from .tier import Tier
from .transfer import Rate, worth_loading
from .writer import Contents, Writer, yield_to_steps

log = logging.getLogger(__name__)

_FIRST_RATES = {"memory": 2e9, "disk": 5e8, "objects": 5e7}  # bytes a second, believed until the first load
_FORGOTTEN = 10.0  # seconds in which what was deleted is refused: a copy of it may be on its way
LEAST_PART = 16
"""Tokens that a block must have in common with a prompt, or all that it has: less is computed as fast as it is read."""
_REFRESH = 30.0  # seconds between looks at what other machines have put into the object store


@dataclass(frozen=True)
class Match:
    """What the tiers have of a prompt beyond what the device has. Its lease ends when it is loaded, or released."""

    known_blocks: int
    found: tuple[Found, ...]
    lease: Lease
    epoch: int

    @property
    def tokens(self) -> int:
        """Tokens that loading it brings."""
        return sum(found.tokens for found in self.found)

    @property
    def by_tier(self) -> dict[str, int]:
        """The same, by the tier that they come from."""
        tokens: Counter[str] = Counter()
        for found in self.found:
            tokens[found.tier.name] += found.tokens
        return dict(tokens)

    def release(self) -> None:
        """Let go of what was found, if it is not to be loaded."""
        self.lease.release()


class ContextCache:
    """Tiers, fastest first, and everything that moves blocks between them. All methods may be called from any thread;
    `match`, `load`, `Load.poll`, `wanted` and `offer` take no longer than a lookup."""

    def __init__(self, config: CacheConfig, layout: BlockLayout, model: bytes) -> None:
        """`model`: the fingerprint of whatever computes the blocks.

        A tier that cannot be opened is left out with a warning: serving goes on without it.
        """
        self.config, self.layout, self.model = config, layout, model
        self.prefill = Rate()
        self._epoch = 0
        self._lock = threading.Lock()
        self._leases = Leases(config.lease)
        self._loads: set[Load] = set()
        self._pins: Counter[bytes] = Counter()
        self._forgotten: dict[bytes, float] = {}  # by key: until when
        self._hits: Counter[str] = Counter()
        self._looked_up = self._stale_loads = 0
        self._recomputed: Counter[str] = Counter()
        self._log: list[str] = []
        self._refreshed = time.monotonic()
        self._rates = {name: Rate(first) for name, first in _FIRST_RATES.items()}
        self._load_seconds = {name: Histogram() for name in _FIRST_RATES}
        self.memory = self._open("host memory", self._open_memory) if config.memory else None
        self.disk = self._open("cache folder", self._open_disk) if config.folder and config.disk_quota else None
        self.objects = self._open("object store", self._open_objects) if config.object_store else None
        self.tiers: tuple[Tier[Any], ...] = tuple(
            tier for tier in (self.memory, self.disk, self.objects) if tier is not None
        )
        self._buffers = Buffers(record_bytes(layout.block_bytes), config.load_bytes if self.tiers else 0)
        self._readers = ThreadPoolExecutor(config.readers, "umbra-cache-reader", initializer=yield_to_steps)
        self._writer = Writer(
            layout, queue_bytes=config.queue_bytes, disk=self.disk, sync_interval=config.sync_interval,
            sync_bytes=config.sync_bytes, upkeep=self._upkeep,
        )  # fmt: skip

    # ---- tiers

    @staticmethod
    def _open(what: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            log.warning("the %s is not used as a tier: %s", what, error)
            return None

    def _open_memory(self) -> MemoryTier:
        return MemoryTier(self.config.memory, self.layout.block_bytes)

    def _open_disk(self) -> DiskTier:
        config = self.config
        assert config.folder is not None
        tier = DiskTier(
            config.folder, self.layout.codec, quota=config.disk_quota, model=self.model,
            segment_bytes=config.segment_bytes, reserve=config.disk_reserve, tenant_share=config.tenant_share,
            watermarks=config.disk_watermarks, retry=config.retry,
        )  # fmt: skip
        if tier.folder.writable:
            rate = measure_folder(tier.folder.path, min(self.layout.block_bytes, 1 << 20))
            self._rates["disk"] = Rate(rate)
        return tier

    def _open_objects(self) -> ObjectTier:
        return ObjectTier(
            self.config.object_store, self.layout.codec, self.layout.block_bytes, self.model,
            quota=self.config.object_quota, retry=self.config.retry, concurrency=self.config.readers,
        )  # fmt: skip

    def identity(self, space: bytes) -> Identity:
        """Whose blocks, of this cache's model; `space` of `Namespaces.of` the authenticated principal."""
        return Identity(space, self.model)

    # ---- looking up

    def match(
        self,
        identity: Identity,
        token_ids: Sequence[int] | np.ndarray,
        *,
        known_blocks: int = 0,
        extras: Extras | None = None,
    ) -> Match:
        """Find the longest beginning of `token_ids` behind the first `known_blocks` blocks, which the device has.

        The last token is not looked for: it has to be computed, since its logits are needed. At most the last block
        found is only part of one, of this prompt's tail or of a block that begins alike.
        """
        epoch = self._epoch  # before looking: what was found earlier than an invalidation is of the old epoch
        prompt = np.asarray(token_ids)[: max(len(token_ids) - 1, 0)]
        chain = identity.chain(prompt, extras) if self.tiers else []
        lease = self._leases.take()
        found = self._find(chain, known_blocks, lease)
        reached = known_blocks + len(found)
        if extras is None and reached <= len(chain):
            part = self._find_partial(identity, chain, reached, prompt, lease)
            if part is not None:
                found.append(part)
        keep = self._worth(found)
        if keep < len(found):
            for name in {each.tier.name for each in found[keep:]}:
                self._rates[name].hope()
            with self._lock:
                self._recomputed["slower"] += sum(each.tokens for each in found[keep:])
            found = found[:keep]
        with self._lock:
            self._looked_up += len(token_ids)
            self._hits["device"] += known_blocks * identity.block_size
        if not found:
            lease.release()
        return Match(known_blocks, tuple(found), lease, epoch)

    def _find(self, chain: list[BlockInfo], known: int, lease: Lease) -> list[Found]:
        """Whole blocks, each from the fastest tier that has it."""
        found: list[Found] = []
        for tier in self.tiers:
            if known + len(found) >= len(chain):
                break
            entries = tier.acquire_chain(chain)
            if entries:
                lease.add(tier, entries[-1])
            for entry in entries[known + len(found) :]:
                found.append(Found(entry.info, tier, entry, entry.info.n_tokens))
        return found

    def _find_partial(
        self, identity: Identity, chain: list[BlockInfo], reached: int, prompt: np.ndarray, lease: Lease
    ) -> Found | None:
        parent = chain[reached - 1].key if reached else identity.root
        rest = pack_tokens(prompt[reached * identity.block_size : (reached + 1) * identity.block_size])
        best: Found | None = None
        for tier in self.tiers:
            part = tier.acquire_partial(parent, rest) if rest else None
            if part is None:
                continue
            lease.add(tier, part[0])
            if part[1] < min(LEAST_PART, part[0].info.n_tokens):
                continue
            if best is None or part[1] > best.tokens:
                best = Found(part[0].info, tier, *part)
        return best

    def _worth(self, found: list[Found]) -> int:
        seconds = [self._rates[each.tier.name].seconds(each.entry.payload_bytes) or 0.0 for each in found]
        return worth_loading(seconds, [each.tokens for each in found], self.prefill, self.config.load_margin)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` of a prompt in `seconds`: what loading is compared with."""
        self.prefill.observe(tokens, seconds)

    # ---- loading

    def expect(self, identity: Identity, token_ids: Sequence[int] | np.ndarray, *, known_blocks: int = 0) -> None:
        """Have the disk read ahead what it has of a prompt that waits for its turn, the most recent first."""
        if self.disk is None:
            return
        with self._leases.take() as lease:
            found = self._find(identity.chain(token_ids), known_blocks, lease)
        self._read_ahead(found[::-1])

    def _read_ahead(self, found: list[Found]) -> None:
        cold = [each.entry for each in found if each.tier is self.disk]
        if self.disk is not None and cold:
            self._readers.submit(self.disk.expect, cold)

    def load(self, match: Match, on_ready: Callable[[], None] | None = None) -> Load:
        """Start reading what was matched; the load owns the lease from here on.

        `on_ready` is called on another thread whenever `Load.poll` has something new.
        """
        with self._lock:
            load = Load(
                list(match.found), match.lease, self.layout, self._readers, self._buffers,
                ahead_bytes=self.config.load_bytes, hot_tokens=self.config.hot_tokens, expect=self._read_ahead,
                current=lambda: self._epoch == match.epoch, on_ready=on_ready, on_end=self._load_ended,
            )  # fmt: skip
            self._loads.add(load)
        if not match.found:
            load.close()
        return load

    def _load_ended(self, load: Load) -> None:
        with self._lock:
            self._loads.discard(load)
            self._stale_loads += load.failure == "stale_epoch"
            if load.failure:
                self._recomputed[load.failure] += sum(found.tokens for found in load.found) - load.tokens
            delivered = load.by_tier
            self._hits.update(delivered)
        for name in delivered:
            self._rates[name].observe(load.read_bytes[name], load.read_seconds(name))
            self._load_seconds[name].observe(load.seconds or 0.0)

    def promote(self, load: Load, loaded: Iterable[Any]) -> None:
        """Keep blocks that `load` handed over, and whose arrays nobody reads any more, in the faster tiers too, beside
        the step."""
        for block in loaded:
            faster = self._faster_than(block.tier)
            if faster and not self._writer.pending(block.info.key):
                self._writer.offer(block.info, block.payload, faster)
            else:
                self._buffers.give(block.buffer)

    def _faster_than(self, name: str) -> tuple[Tier[Any], ...]:
        names = [tier.name for tier in self.tiers]
        return self.tiers[: names.index(name)]

    # ---- writing

    def wanted(self, info: BlockInfo, *, persist: bool = True) -> bool:
        """Whether an offer of this block would be of use: no tier that may keep it has it, and it does not wait."""
        if self._writer.pending(info.key) or info.key in self._forgotten:
            return False
        return any(not tier.has(info) for tier in self._targets(persist))

    def offer(
        self,
        info: BlockInfo,
        contents: Contents,
        *,
        persist: bool = True,
        done: Callable[[], None] | None = None,
    ) -> bool:
        """Keep a sealed block, or the tail of a sequence (an `info` of fewer tokens), in all tiers.

        Args:
            info: of `Identity.chain`. Blocks of a chain are offered from its head on.
            contents: its arrays, which must not change until `done` was called; or a function that returns them,
                called on another thread.
            persist: False: nothing may reach a disk or another machine.
            done: called on another thread once `contents` is not needed any more; only if this returns True.

        Returns:
            Whether it was taken; not while too much waits to be written, nor if it was forgotten a moment ago.
        """
        targets = self._targets(persist)
        if not targets or info.key in self._forgotten:
            return False
        return self._writer.offer(info, contents, targets, done)

    @property
    def room(self) -> int:
        """Bytes of blocks that may be offered now."""
        return max(0, self.config.queue_bytes - self._writer.pending_bytes)

    def _targets(self, persist: bool) -> tuple[Tier[Any], ...]:
        return self.tiers if persist else tuple(tier for tier in self.tiers if tier is self.memory)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was offered is written and durable; False if that took longer."""
        return self._writer.flush(timeout)

    # ---- pins and removal

    def pin(self, identity: Identity, token_ids: Sequence[int] | np.ndarray, extras: Extras | None = None) -> bool:
        """Never evict the whole blocks of these tokens, now or once they come; False if too much is pinned already."""
        chain = identity.chain(token_ids, extras)
        with self._lock:
            new = [info.key for info in chain if info.key not in self._pins]
            room = min((tier.capacity_bytes for tier in self.tiers), default=0) * self.config.pin_share
            if (len(self._pins) + len(new)) * self.layout.block_bytes > room:
                return False
            self._pins.update(info.key for info in chain)
            for tier in self.tiers:
                for info in chain:
                    tier.pin(info.key)
        return True

    def unpin(self, identity: Identity, token_ids: Sequence[int] | np.ndarray, extras: Extras | None = None) -> None:
        """Undo one `pin` of the same tokens."""
        chain = identity.chain(token_ids, extras)
        with self._lock:
            if any(self._pins[info.key] < 1 for info in chain):
                raise ValueError("these tokens were not pinned")
            self._pins -= Counter(info.key for info in chain)
            for tier in self.tiers:
                for info in chain:
                    tier.unpin(info.key)

    def forget(self, identity: Identity, token_ids: Sequence[int] | np.ndarray, extras: Extras | None = None) -> int:
        """Remove the blocks of a sequence from every tier at once, but for those that others continue or pinned; how
        many went. Their bytes are gone from the disk when this returns."""
        chain = identity.chain(token_ids, extras, tail=True)
        until = time.monotonic() + _FORGOTTEN
        with self._lock:
            self._forgotten |= {info.key: until for info in chain if not self._pins[info.key]}
        self._writer.cancel(info.key for info in chain if not self._pins[info.key])
        return sum(self._forget_in(tier, chain) for tier in self.tiers)

    def _forget_in(self, tier: Tier[Any], chain: list[BlockInfo]) -> int:
        removed = 0
        top: BlockInfo | None = None  # the block nearest to the head that only this sequence uses
        with tier.io:
            for info in reversed(chain):
                with tier.lock:  # tails that were kept while the sequence grew
                    siblings = [entry.info for entry in tier.index.siblings(info) if entry.info.n_tokens < BLOCK]
                    behind = [entry.info.key for entry in tier.index.after(info.key)]
                for tail in siblings:
                    if tail.key != info.key and info.tokens.startswith(tail.tokens):
                        removed += tier.delete(tail.key)
                if self._pins[info.key] or any(key != (top.key if top else None) for key in behind):
                    break
                if tier.index.get(info.key) is not None:
                    top = info
            return removed + (tier.delete(top.key) if top is not None else 0)

    def invalidate(self) -> int:
        """Drop what is being loaded and what is in memory (new weights); the new epoch."""
        with self._lock:
            self._epoch += 1
        if self.memory is not None:
            self.memory.clear()
        return self._epoch

    @property
    def epoch(self) -> int:
        return self._epoch

    # ---- upkeep

    def _upkeep(self) -> None:
        """About once a second, on the writer's thread."""
        self._leases.expire()
        now = time.monotonic()
        with self._lock:
            self._forgotten = {key: until for key, until in self._forgotten.items() if until > now}
            lines, self._log = self._log, []
        if lines and self.config.access_log is not None:
            with self.config.access_log.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        if self.objects is not None and time.monotonic() - self._refreshed > _REFRESH:
            self._refreshed = time.monotonic()
            self.objects.refresh()

    def record_access(
        self, identity: Identity, token_ids: Sequence[int] | np.ndarray, output_tokens: int, arrived: float
    ) -> None:
        """Note a finished request in the access log, if there is one: a line of the form of the public traces.

        `arrived`: seconds since 1970. The ids say which blocks are equal, and nothing else.
        """
        if self.config.access_log is None:
            return
        line = {
            "timestamp": int(arrived * 1000), "input_length": len(token_ids), "output_length": output_tokens,
            "hash_ids": [int.from_bytes(info.key[:6], "big") for info in identity.chain(token_ids)],
        }  # fmt: skip
        with self._lock:
            self._log.append(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what waits and let go of everything."""
        with self._lock:
            self._epoch += 1
            loads = list(self._loads)
        for load in loads:
            load.close()
        self._writer.close()
        self._readers.shutdown()
        self._upkeep()
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> ContextCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise `AssertionError` naming what is inconsistent, or a lease that is open while nothing is loaded."""
        for tier in self.tiers:
            tier.check()
        with self._leases.lock, self._lock:
            held = {id(load.lease) for load in self._loads}
            assert all(id(lease) in held for lease in self._leases.open), "a lease was not released"

    # ---- numbers

    def stats(self) -> CacheStats:
        """A snapshot."""
        with self._lock:
            hits, recomputed = self._hits.copy(), self._recomputed.copy()
            device = hits.pop("device", 0)
            lags = sorted(self._writer.lags)
        appended = self.disk.appended_bytes if self.disk is not None else 0
        offered = self.disk.written_bytes if self.disk is not None else 0
        return CacheStats(
            tiers={tier.name: self._tier_stats(tier, hits[tier.name]) for tier in self.tiers},
            looked_up_tokens=self._looked_up,
            hit_tokens=device + hits.total(),
            device_hit_tokens=device,
            recomputed_tokens=dict(recomputed),
            leases=len(self._leases.open),
            leases_expired=self._leases.expired,
            loads=len(self._loads),
            stale_loads=self._stale_loads,
            write_outcomes=dict(self._writer.outcomes),
            pending_bytes=self._writer.pending_bytes,
            write_amplification=appended / offered if offered else None,
            write_seconds=self._writer.seconds,
            seal_lag_p95=lags[int(0.95 * (len(lags) - 1))] if lags else None,
            disk_free_bytes=self.disk.folder.free_bytes() if self.disk is not None else None,
            torn_bytes=self.disk.torn_bytes if self.disk is not None else 0,
            pinned_bytes=len(self._pins) * self.layout.block_bytes,
            prefill_tokens_per_second=self.prefill.per_second,
        )

    def _tier_stats(self, tier: Tier[Any], hit_tokens: int) -> TierStats:
        with tier.lock:
            return TierStats(
                tier.name, len(tier.index), tier.used_bytes, tier.capacity_bytes, dict(tier.index.space_bytes),
                dict(tier.evictions), dict(tier.lost), hit_tokens, tier.written_bytes, self._load_seconds[tier.name],
                self._rates[tier.name].per_second, tier.read_only_reason,
            )  # fmt: skip
