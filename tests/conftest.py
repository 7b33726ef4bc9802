"""Shared fixtures. JAX is set up before anything imports it: a CPU split into four devices, for the mesh tests."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from umbra.serving import platform

platform.setup(devices=4, kernels="xla")  # XLA keeps its threads: the plain path is tested at length


class WordTokenizer:
    """A stand-in for random trunks: ids below 256 are bytes, the others short words."""

    vocab_size = 512
    bos_id = None
    eos_ids = (0,)
    add_bos = False

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f" w{token}".encode()

    def token_str(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")


@pytest.fixture(scope="session")
def random_model() -> Callable[..., object]:
    """Makes `Model`s with random weights by configuration name; by default with this machine's own kernels."""
    from umbra.kernels.backend import choose
    from umbra.model.load import load_model

    def make(
        name: str = "tiny", *, eos_ids: tuple[int, ...] = (), seed: int = 0, kernels: str = "auto", quant: str = "auto"
    ) -> object:
        loaded = load_model(name, quant=quant, kernels=choose("cpu", kernels).kernels, seed=seed)
        return dataclasses.replace(
            loaded, tokenizer=WordTokenizer(), eos_ids=eos_ids, weights_id=f"{loaded.weights_id}-{seed}"
        )

    return make


@pytest.fixture(scope="session")
def random_shadow() -> Callable[..., object]:
    """Makes a `DraftWeights` of random numbers for a vocabulary and a width, whose lookup is always quite sure."""
    import numpy as np

    from umbra.kernels.draft import FEATURES, LONGEST_MATCH, MAX_DRAFTS, SHADOW_PLACES, DraftWeights

    def make(vocab: int, width: int, *, rank: int = 8, mlp: int = 8, draft_vocab: int = 64, seed: int = 0) -> object:
        rng = np.random.default_rng(seed)

        def floats(*shape: int) -> np.ndarray:
            return (0.3 * rng.standard_normal(shape)).astype(np.float32)

        def bytes_(*shape: int) -> np.ndarray:
            return rng.integers(-127, 128, shape).astype(np.int8)

        return DraftWeights(
            read=bytes_(vocab, rank), read_scale=np.full(vocab, 0.01, np.float32), context=floats(width, rank),
            epsilon=np.float32(1e-5), recur=floats(rank, 2 * rank), gate_u=floats(rank), gate_z=floats(rank),
            bias_g=floats(rank), bias_c=floats(rank), start=floats(rank), step=floats(SHADOW_PLACES, rank),
            markov=floats(rank, rank), up=floats(rank, mlp), down=floats(mlp, rank), head=bytes_(draft_vocab, rank),
            head_scale=np.full(draft_vocab, 0.01, np.float32),
            vocab=np.sort(rng.choice(vocab, draft_vocab, replace=False)).astype(np.int32),
            conf=floats(2 * rank + FEATURES), conf_bias=floats(SHADOW_PLACES),
            gate=np.tile(np.array([1.0, 0.0], np.float32), (1, SHADOW_PLACES, 1)),
            gate_temperatures=np.zeros(1, np.float32),
            lookup=np.full((1, LONGEST_MATCH + 1, 3, MAX_DRAFTS), 0.8, np.float32),
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def tiny_engine(random_model: Callable[..., object]) -> Iterator[object]:
    """A running engine on the tiny trunk: 8 slots, chunks of 32 tokens."""
    from umbra.configs.engine import EngineConfig
    from umbra.serving.engine import Engine

    config = EngineConfig(slots=8, context_length=1024, blocks=65, prefill_chunk=32, max_queue=64)
    with Engine(random_model("tiny"), config) as engine:  # type: ignore[arg-type]
        engine.start()
        yield engine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, mounted in memory. Skipped where that is not allowed."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["mount", "-o", "remount,rw", path], capture_output=True)
        subprocess.run(["umount", "-l", path], check=True)
