"""The compiled programs: found again in the cache at the next start, whatever happened to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from umbra.configs.engine import EngineConfig
from umbra.configs.models import named
from umbra.kernels.attention import KVFormat
from umbra.model import rope
from umbra.serving.engine import compile_cache, make_mesh
from umbra.serving.engine.programs import programs

CONFIG = EngineConfig(slots=2, context_length=256, blocks=9, prefill_chunk=32)


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma"])
def test_the_same_programs_are_traced_at_every_start(
    name: str, random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX looks a program up by its text: it must not depend on which thread traced what first."""
    model = random_model(name)
    quick = rope.frequencies
    monkeypatch.setattr(rope, "frequencies", lambda *args: time.sleep(0.05) or quick(*args))  # so that threads meet
    mesh = make_mesh(jax.devices()[:1], named(name))
    texts = set()
    for _ in range(4):
        rope._tables.cache_clear()
        listed = programs(named(name), CONFIG, mesh, params=model.params, kernels=model.kernels, kv=KVFormat("float32"))
        with ThreadPoolExecutor(4) as pool:
            texts.add(tuple(pool.map(lambda program: program.jit().lower(*program.args).as_text(), listed)))
    assert len(texts) == 1


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty compilation cache, for this test alone."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_broken_entries_are_removed_and_written_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def compile_once() -> Callable[..., jax.Array]:
        jax.clear_caches()
        with compile_cache.mended():
            return jax.jit(lambda x: x * 3 + 1).lower(jnp.float32(2)).compile()

    def entries() -> list[Path]:
        return [path for path in cache.glob("*lambda*-cache") if path.stat().st_size]

    assert float(compile_once()(jnp.float32(2))) == 7
    (entry,) = entries()
    whole = entry.stat().st_size
    entry.write_bytes(entry.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert float(compile_once()(jnp.float32(2))) == 7
    assert "could not be read" in caplog.text and not entries()
    compile_once()
    assert [path.stat().st_size for path in entries()] == [pytest.approx(whole, rel=0.2)]
