"""The device side of the engine: compiled programs and the buffers they carry. The only module that runs them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...configs.engine import NULL_BLOCK, EngineConfig
from ...configs.machine import cores
from ...configs.trunk import TrunkConfig
from ...kernels.attention import KVPool
from ...kernels.backend import Kernels
from . import compile_cache
from .programs import COPY_BLOCKS, Built, kv_bytes, kv_format, programs, step_sizes
from .state import Kept, SlotState, StepInput, StepResult, empty_rows, input_shapes

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class Device:
    """Parameters, KV pool and slot state on a mesh, and the programs that work on them."""

    def __init__(
        self, config: TrunkConfig, engine: EngineConfig, mesh: Mesh, params: Mapping[str, Any], kernels: Kernels
    ) -> None:
        self.config, self.mesh, self.kernels = config, mesh, kernels
        self.params = dict(params)
        self.data = mesh.shape["data"]
        platform = mesh.devices.flat[0].platform
        self.passes = engine.passes(platform)
        self.kv = kv_format(engine, self.kernels, platform)
        self.blocks = engine.pool_blocks(config, kv_bytes(config, self.kv))
        self._choose_programs(engine)
        pool = self._listed["save"].args[0]
        self._new_pool = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pool),
            out_shardings=jax.tree.map(lambda s: s.sharding, pool),
        )
        self.layers = jax.device_put(
            np.concatenate([[config.n_layers], np.arange(config.n_layers)]).astype(np.int32), NamedSharding(mesh, P())
        )
        self._pool: KVPool | None
        self._state: SlotState | None
        self.reset()

    def _choose_programs(self, engine: EngineConfig) -> None:
        self.engine = engine
        self.programs = programs(self.config, engine, self.mesh, params=self.params, kernels=self.kernels, kv=self.kv)
        self._listed = {program.kind: program for program in self.programs}
        self._compiled: dict[str, Built] = {}

    @property
    def compiled(self) -> set[str]:
        """Kinds of the programs that are compiled by now."""
        return set(self._compiled)

    @property
    def l1_mode(self) -> str | None:
        """Where the loop of decode passes, or a single pass, reads its most recent KV from (`Built.l1_mode`); None
        while it is not compiled."""
        built = self._compiled.get("decode_n" if "decode_n" in self._listed else "decode")
        return None if built is None else built.l1_mode

    def reset(self) -> None:
        """Empty pool and slots, for the start and after a failed step (which may have lost its donated buffers)."""
        self._pool = self._state = None  # before the new ones are made: there may not be room for both
        self._pool = self._new_pool()
        self._clear_slots()

    def _clear_slots(self) -> None:
        rows = empty_rows(self.data * self.engine.slots, self.config.vocab_size)
        self._state = jax.device_put(rows, NamedSharding(self.mesh, P("data")))

    def compile(self, progress: Progress | None = None) -> None:
        """Compile every program, as many at a time as there are cores, and run each once."""
        with compile_cache.mended():
            self._compile_all(progress)
        self.check_rounding()
        for kind in ("prefill", "decode", "decode_n"):
            if kind in self._listed:
                jax.block_until_ready(self.run(kind, self.new_input(kind == "prefill")))
        self.admit(self._no_slot(), empty_rows(self.data, self.config.vocab_size))
        self.load([(0, NULL_BLOCK, self.save([(0, NULL_BLOCK)])[0])])
        self._clear_slots()

    def check_rounding(self) -> None:
        """Make sure that prefill and decode steps of the plain path give a token the same bits: the one property of
        the compiler that exactness rests on (kernels/tiles.py). Where it does not hold, a CPU runs prompts in the
        tiles of decode steps.

        Raises `RuntimeError` if that does not help either. Native kernels round alike by construction; on other
        platforms the steps are different families of shapes, and nothing is claimed between them.
        """
        plain_cpu = self.mesh.devices.flat[0].platform == "cpu" and self.kernels.linear == "xla"
        if not plain_cpu or self._rounds_alike():
            return
        log.warning("prefill and decode round differently on this machine: prompts run in smaller tiles, slower")
        self.use_one_tile()
        self._compile_all(None)
        if not self._rounds_alike():
            raise RuntimeError("prefill and decode steps round differently on this machine: answers would not be exact")

    def use_one_tile(self) -> None:
        """Run prompts in the tiles of decode steps. Before anything is compiled, or to compile anew."""
        self._choose_programs(dataclasses.replace(self.engine, prefill_tile=self.engine.tile))

    def _rounds_alike(self) -> bool:
        written = []  # keys and values of all layers, of the same token
        for kind in ("prefill", "decode"):
            inputs = self.new_input(kind == "prefill")
            inputs.ids[0], inputs.positions[0], inputs.counts[0], inputs.sample_at[0] = 1, 0, 1, 0
            inputs.tables[0, 0] = 1
            inputs.sizes[0] = 1, 1, 1
            self.run(kind, inputs)
            written.append(self.save([(0, 1)])[0].values[:, :, 0])
        self._clear_slots()
        return bool(np.array_equal(*written))

    def _compile_all(self, progress: Progress | None) -> None:
        done = 0
        workers = min(len(self.programs), cores())
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            futures = {pool.submit(self._get, kind): kind for kind in self._listed}
            for future in concurrent.futures.as_completed(futures):
                future.result()
                done += 1
                if progress:
                    progress("compiling", done, len(futures))

    def _get(self, kind: str) -> Any:
        built = self._compiled.get(kind)
        if built is None:
            built = self._compiled[kind] = self._listed[kind].compile()
        return built.compiled

    # ---- steps

    def new_input(self, prefill: bool) -> StepInput:
        """A host input that does nothing. Always fresh: JAX may still read the last one."""
        tokens, groups = step_sizes(self.engine, prefill)
        shapes = input_shapes(self.data, self.engine.slots, tokens, groups, self.engine.table_width(self.config))
        blank = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        return blank._replace(positions=np.full_like(blank.positions, -1), sample_at=np.full_like(blank.sample_at, -1))

    def run(self, kind: str, inputs: StepInput) -> tuple[StepResult, Kept]:
        """Dispatch a step; what it chose and from what, not yet ready."""
        self._pool, self._state, result, kept = self._get(kind)(
            self.params, self._pool, self._state, inputs, self.layers
        )
        return result, kept

    def _no_slot(self) -> np.ndarray:
        return np.full(self.data, -1, np.int32)

    def admit(self, slots: np.ndarray, rows: SlotState) -> None:
        """Replace slot `slots[d]` of every data shard d by row d; -1 leaves a shard alone."""
        self._state = self._get("admit")(self._state, slots, rows)

    # ---- blocks

    def save(self, blocks: list[tuple[int, int]]) -> list[KVPool]:
        """Host copies of the contents of (shard, block) pairs. Waits for the steps before it."""
        contents: list[KVPool] = []
        for start in range(0, len(blocks), COPY_BLOCKS):
            part = blocks[start : start + COPY_BLOCKS]
            saved = jax.tree.map(np.asarray, self._get("save")(self._pool, self._block_ids(part)))
            for i, (shard, _) in enumerate(part):
                at = shard * COPY_BLOCKS + i
                contents.append(jax.tree.map(lambda x, at=at: x[at].copy(), saved))
        return contents

    def load(self, blocks: list[tuple[int, int, KVPool]]) -> None:
        """Write contents into (shard, block, contents) triples."""
        for start in range(0, len(blocks), COPY_BLOCKS):
            part = blocks[start : start + COPY_BLOCKS]
            contents = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._listed["load"].args[2])
            for i, (shard, _, content) in enumerate(part):
                for all_, one in zip(jax.tree.leaves(contents), jax.tree.leaves(content), strict=True):
                    all_[shard * COPY_BLOCKS + i] = one
            ids = self._block_ids([(shard, block) for shard, block, _ in part])
            self._pool = self._get("load")(self._pool, ids, contents)

    def _block_ids(self, part: list[tuple[int, int]]) -> np.ndarray:
        ids = np.full(self.data * COPY_BLOCKS, NULL_BLOCK, np.int32)
        for i, (shard, block) in enumerate(part):
            ids[shard * COPY_BLOCKS + i] = block
        return ids
