"""Our engine with the tiers of the context cache, which can be emptied and restarted one by one."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_options import prepare
from .base import Setup
from .ours import PACKAGES, instructions

if TYPE_CHECKING:
    from ....model.load import Model
    from ....serving.engine import Engine, SamplingParams

IDLE = 120.0
"""Seconds after which an engine that was to become idle is taken as stuck."""


class Tiered:
    """One model; engines are started and stopped on it, as `start` is told."""

    model: Model
    engine: Engine
    upkeep: float
    """Seconds that the engine's thread has spent bringing blocks up and copying them down in steps."""

    def load(self, setup: Setup) -> dict[str, Any]:
        prepare(setup.threads, None, setup.kernels)
        import jax

        from ....kernels.backend import choose
        from ....model.load import load_model

        self.setup = setup
        chosen = choose(jax.default_backend(), setup.kernels).kernels
        self.model = load_model(
            setup.model, quant=setup.quant, kernels=chosen, embedding=setup.embedding,
            shadow="off" if setup.plain else setup.shadow,
        )  # fmt: skip
        config = self.model.config
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "settings": {
                "weights": self.model.quant, "kernels": chosen._asdict(), "instructions": instructions(chosen),
                "threads": setup.threads, "context": config.context_length,
            },
        }  # fmt: skip

    def start(
        self, folder: str | None, cache: dict[str, Any], context: int, contexts: float, slots: int, chunk: int = 128
    ) -> dict[str, Any]:
        """Start an engine whose pool holds `contexts` full contexts, with a store in `folder`, if one is named."""
        from ....configs.cache import CacheConfig
        from ....configs.engine import BLOCK, EngineConfig
        from ....serving.engine import Engine
        from ....serving.storage import open_store

        began = time.perf_counter()
        width = -(-context // BLOCK)
        sizes: dict[str, Any] = {"kv": self.setup.kv, "draft_rows": 0 if self.setup.plain else None}
        config = EngineConfig(
            slots=slots, context_length=min(width * BLOCK, self.model.config.context_length), prefill_chunk=chunk,
            blocks=int(contexts * width) + 2, max_queue=4096, **sizes,
        )  # fmt: skip
        store = open_store(Path(folder), self.model, config, CacheConfig(**cache)) if folder else None
        self.engine = Engine(self.model, config, store=store)
        self.upkeep = 0.0
        for name in ("_copy_down", "_bring_up"):
            setattr(self.engine, name, self._timed(getattr(self.engine, name)))
        self.engine.start()
        layout = store.cache.layout.block_bytes if store is not None else 0
        return {
            "ready_s": time.perf_counter() - began, "block_bytes": layout, "numerics": self.engine.numerics_class,
            "kv": self.engine.device.kv.name, "l1_mode": self.engine.l1_mode, "blocks": config.blocks,
            "context": self.engine.context_length,
        }  # fmt: skip

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, with its seconds added to `upkeep`."""

        def run() -> None:
            began = time.perf_counter()
            work()
            self.upkeep += time.perf_counter() - began

        return run

    def stop(self) -> None:
        self.engine.close()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as the only user message of a conversation."""
        from ....serving.offline import encoder

        encode = encoder(self.model)
        return [encode([{"role": "user", "content": text}]) for text in texts]

    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    # ---- requests

    def ask(self, ids: Sequence[int], max_tokens: int, principal: str, keep: str) -> dict[str, Any]:
        """One request, alone: when its first token came, and where its KV was from."""
        params = self._params(max_tokens)
        answer = self.engine.generate([ids], params, principal=principal, keep=keep)[0]  # type: ignore[arg-type]
        return {
            "ttft": answer.timings.ttft, "cache": answer.timings.cache, "decode": answer.timings.decode,
            "ids": list(answer.token_ids), "cached": dict(answer.usage.cached_by_tier),
        }  # fmt: skip

    def _params(self, max_tokens: int) -> SamplingParams:
        from ....serving.engine import SamplingParams

        draft: Any = self.setup.draft
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, draft=draft)

    def decode_rate(self, prompts: Sequence[Sequence[int]], max_tokens: int, principal: str) -> dict[str, float]:
        """Tokens a second of several streams at once, from the first emission of the last to begin; and seconds per
        token that the engine's thread spends on the tiers."""
        inbox: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        params, upkeep = self._params(max_tokens), self.upkeep
        for ids in prompts:
            sink = lambda pairs: inbox.put((time.perf_counter(), pairs))  # noqa: E731
            self.engine.submit(ids, params, sink=sink, principal=principal)
        began: dict[str, float] = {}
        times: list[tuple[float, int]] = []
        running = len(prompts)
        while running:
            when, pairs = inbox.get()
            for request, emission in pairs:
                began.setdefault(request, when)
                times.append((when, len(emission.token_ids)))
                running -= emission.finish_reason is not None
        start = max(began.values())
        return {
            "tok_s": sum(n for when, n in times if when > start) / (max(when for when, _ in times) - start),
            "upkeep_s": (self.upkeep - upkeep) / sum(n for _, n in times),
        }

    # ---- tiers

    def settle(self) -> None:
        """Wait until nothing runs and all that was sealed is written."""
        deadline = time.monotonic() + IDLE
        while (stats := self.engine.stats()).running or stats.waiting or stats.paused or stats.used_blocks:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not become idle: {stats}")
            time.sleep(0.002)
        if self.engine.store is not None:
            self.engine.store.cache.flush(IDLE)

    def forget(self, device: bool, memory: bool, pages: bool) -> None:
        """Empty the device's pool, host memory, and the system's cache of the disk's pages; nothing may be running."""
        self.settle()
        if device:
            self.engine.forget()
        if self.engine.store is None:
            return
        cache = self.engine.store.cache
        if memory and cache.memory is not None:
            cache.memory.clear()
        if pages and cache.disk is not None:
            drop_pages(cache.disk.folder.path)

    def stats(self) -> dict[str, Any]:
        """Counts of the engine and of its cache, for reports."""
        engine = dataclasses.asdict(self.engine.stats())
        if self.engine.store is None:
            return {"engine": engine}
        stats = self.engine.store.cache.stats()
        tiers = {
            name: {
                "blocks": tier.blocks, "hit_tokens": tier.hit_tokens, "written_bytes": tier.written_bytes,
                "used_bytes": tier.used_bytes, "evictions": tier.evictions, "lost": tier.lost,
                "read_bytes_s": tier.read_bytes_per_second,
            }
            for name, tier in stats.tiers.items()
        }  # fmt: skip
        return {
            "engine": engine, "tiers": tiers, "leases": stats.leases, "leases_expired": stats.leases_expired,
            "loads": stats.loads, "recomputed": stats.recomputed_tokens, "writes": stats.write_outcomes,
            "seal_lag_p95": stats.seal_lag_p95, "write_amplification": stats.write_amplification,
        }  # fmt: skip

    def check(self) -> None:
        """Raise if anything leaked."""
        self.settle()
        self.engine.check()
        if self.engine.store is not None:
            self.engine.store.cache.check()
            stats = self.engine.store.cache.stats()
            if stats.leases or stats.loads or stats.leases_expired:
                raise RuntimeError(f"{stats.leases} leases, {stats.loads} loads, {stats.leases_expired} expired leases")

    def block_reads(self, blocks: int, pages: bool) -> dict[str, list[float]]:
        """Put `blocks` blocks of noise on the disk, then read and verify one after the other, in random order.
        `pages`: from the system's page cache. Gives seconds, and those of the same reads without our code."""
        import numpy as np

        from ....cache.keys import Identity

        store = self.engine.store
        assert store is not None and store.cache.disk is not None
        cache, disk, rng = store.cache, store.cache.disk, np.random.default_rng(blocks)
        who = Identity(rng.bytes(16), cache.model)
        chain = who.chain(rng.integers(0, 1000, blocks * who.block_size))
        contents = [np.frombuffer(rng.bytes(part.nbytes(who.block_size)), part.dtype).reshape(part.shape)
                    for part in cache.layout.parts]  # fmt: skip
        for info in chain:
            while not cache.offer(info, contents):
                time.sleep(0.005)
        cache.flush(IDLE)
        if not pages:
            drop_pages(disk.folder.path)
        ours, plain = [], []
        for i, at in enumerate(rng.permutation(blocks)):
            entry = disk.acquire(chain[at])
            assert entry is not None
            began = time.perf_counter()
            if i % 2:
                disk.read(entry)
                ours.append(time.perf_counter() - began)
            else:
                segment, header = entry.place
                with segment.path.open("rb", buffering=0) as file:
                    began = time.perf_counter()
                    os.pread(file.fileno(), header.record_bytes, header.place.offset)
                    plain.append(time.perf_counter() - began)
            disk.release(entry)
        disk.delete(chain[0].key)
        return {"ours": ours, "pread": plain}

    def store_conversation(self, tokens: int) -> dict[str, Any]:
        """Store an interaction of so many tokens, and their blocks with contents of which every byte is known."""
        store = self.engine.store
        assert store is not None
        disk = store.cache.disk
        if disk is None:
            raise RuntimeError("the folder cannot be used as a tier")
        ids = _ids(tokens, self.vocabulary())
        with _Peak() as peak:
            who = store.identity("alice")
            store.interactions.begin(who.space, ids, model=self.model.name, id="long")
            store.interactions.finish("long", [], status="completed", output={}, usage={})
            for i, info in enumerate(who.chain(ids)):
                while not store.cache.offer(info, _noise(store.cache.layout, i)):
                    time.sleep(0.005)
            written = store.cache.flush(IDLE)
        if not written:
            raise RuntimeError(f"blocks were not written within {IDLE:g} s")
        return {"tokens": tokens, "seconds": peak.seconds, "peak_bytes": peak.bytes, "disk_bytes": disk.used_bytes}

    def recall_conversation(self, tokens: int) -> dict[str, Any]:
        """Find again what `store_conversation` has stored, and read all of it. `same`: it is what was stored."""
        import numpy as np

        store = self.engine.store
        assert store is not None
        with _Peak() as peak:
            who = store.identity("alice")
            began = time.perf_counter()
            ids = store.interactions.get(who.space, "long").token_ids
            listed = time.perf_counter() - began
            same = np.array_equal(ids, _ids(tokens, self.vocabulary()))
            began = time.perf_counter()
            load = store.cache.load(store.cache.match(who, ids))
            matched = time.perf_counter() - began
            places = {each.info.key: i for i, each in enumerate(load.found)}
            blocks = 0
            while not load.done:
                for block in load.poll():
                    expected = _noise(store.cache.layout, places[block.info.key])
                    same = same and all(_same_bytes(*pair) for pair in zip(block.arrays, expected, strict=True))
                    store.cache.promote(load, [block])
                    blocks += 1
                time.sleep(0.0005)
        whole = (tokens - 1) // who.block_size
        return {
            "tokens": load.tokens, "seconds": peak.seconds, "peak_bytes": peak.bytes, "list_ms": listed * 1e3,
            "match_ms": matched * 1e3, "blocks": blocks, "same": same and blocks == whole,
        }  # fmt: skip

    # ---- many requests

    def soak(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int, cancel: Sequence[float]
    ) -> list[list[int]]:
        """Answers to all prompts, `at_once` of them running; those with a `cancel` above 0 are cancelled after so many
        seconds."""
        params = self._params(max_tokens)
        answers: list[list[int]] = [[] for _ in prompts]
        running = threading.Semaphore(at_once)
        done = threading.Semaphore(0)

        def sink_of(i: int) -> Any:
            def sink(pairs: Sequence[tuple[str, Any]]) -> None:
                for _, emission in pairs:
                    answers[i].extend(emission.token_ids)
                    if emission.finish_reason == "error":
                        answers[i].append(-1)
                    if emission.finish_reason is not None:
                        running.release()
                        done.release()

            return sink

        timers = []
        for i, ids in enumerate(prompts):
            running.acquire()
            request = self.engine.submit(ids, params, sink=sink_of(i))
            if cancel[i] > 0:
                timers.append(threading.Timer(cancel[i], self.engine.cancel, [request]))
                timers[-1].start()
        for _ in prompts:
            done.acquire()
        for timer in timers:
            timer.cancel()
        return answers


class _Peak:
    """How long what is within took, and by how much it made the process grow at most: sampled, since what the system
    tells includes the start."""

    seconds = 0.0
    bytes = 0

    def __enter__(self) -> _Peak:
        self._began, self._first = time.perf_counter(), _resident()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def _sample(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(0.05)
            self.bytes = max(self.bytes, _resident() - self._first)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()
        self._sampler.join()


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ids(tokens: int, vocabulary: int) -> Any:
    import numpy as np

    return np.random.default_rng(tokens).integers(1, vocabulary, tokens, dtype=np.int32)


def _same_bytes(one: Any, other: Any) -> bool:
    return bool((one.reshape(-1).view("uint8") == other.reshape(-1).view("uint8")).all())


def _noise(layout: Any, place: int) -> list[Any]:
    """The contents of the block at `place` of the long conversation, from generated bytes of which it has its own."""
    import numpy as np

    from ....configs.engine import BLOCK

    size = layout.block_bytes + _SPREAD
    if not _NOISE or len(_NOISE[0]) < size:
        _NOISE[:] = [np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)]
    at, contents = place * 64 % _SPREAD, []
    for part in layout.parts:
        nbytes = part.nbytes(BLOCK)
        contents.append(_NOISE[0][at : at + nbytes].view(part.dtype).reshape(part.shape))
        at += nbytes
    return contents


_NOISE: list[Any] = []
_SPREAD = 1 << 20
"""Bytes among which blocks begin: 16,384 of them differ."""


def drop_pages(folder: Path) -> None:
    """Have the system forget what it holds in memory of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
