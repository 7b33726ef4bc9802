"""Helpers of the tests of the engine with tiers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from umbra.configs.cache import CacheConfig
from umbra.configs.engine import EngineConfig
from umbra.serving.engine import Engine, SamplingParams
from umbra.serving.engine.blocking import Completion
from umbra.serving.engine.device import Device
from umbra.serving.metrics import EngineMetrics
from umbra.serving.storage import open_store

SMALL = EngineConfig(slots=4, context_length=1024, blocks=33, prefill_chunk=64, max_queue=64)
ALWAYS = CacheConfig(disk_quota=256 << 20, disk_reserve=0, load_margin=1e-9)
"""Whatever is found is loaded, however fast this machine computes it."""


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """Prompts of the same seed begin alike."""
    return np.random.default_rng(seed).integers(1, 500, n).tolist()


@contextlib.contextmanager
def running(
    model: object, folder: Path | None, config: EngineConfig = SMALL, cache: CacheConfig = ALWAYS,
    metrics: EngineMetrics | None = None,
) -> Iterator[Engine]:  # fmt: skip
    """An engine, with a store unless `folder` is None, that is checked for leaks at its end."""
    store = open_store(folder, model, config, cache) if folder is not None else None  # type: ignore[arg-type]
    with Engine(model, config, store=store, metrics=metrics) as engine:  # type: ignore[arg-type]
        engine.start(warm=False)
        yield engine
        settle(engine)


def settle(engine: Engine, seconds: float = 60) -> None:
    """Wait until nothing runs and everything is written; then nothing may be leaked."""
    deadline = time.monotonic() + seconds
    while engine.stats().running or engine.stats().waiting or engine.stats().paused or engine.stats().used_blocks:
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.005)
    if engine.store is not None:
        assert engine.store.cache.flush(seconds)
        engine.store.cache.check()
        assert engine.store.cache.stats().leases == 0 and engine.store.cache.stats().loads == 0
    engine.check()


def ask(
    engine: Engine, prompt: list[int], n: int = 12, *, principal: str = "local", keep: str = "blocks", **more: object
) -> Completion:
    return engine.generate([prompt], SamplingParams(max_tokens=n, **more), principal=principal, keep=keep)[0]  # type: ignore


def tiers(answer: Completion) -> dict[str, int]:
    """The cached tokens of an answer by tier."""
    return dict(answer.usage.cached_by_tier)


class SharedPrograms:
    """In place of `Device._get`: engines of the same sizes share programs, which a restart would compile again."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], object] = {}

    def __call__(self, device: Device, kind: str) -> object:
        key = (device.config, device.engine, kind)
        if key not in self._compiled:
            self._compiled[key] = device._listed[kind].compile().compiled
        return self._compiled[key]
