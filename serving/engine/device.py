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

from ...configs.engine import BLOCK, NULL_BLOCK, EngineConfig
from ...configs.machine import cores
from ...configs.trunk import TrunkConfig
from ...kernels.attention import KVPool
from ...kernels.backend import Kernels
from ...kernels.draft import DraftWeights, laid_out
from ...kernels.host_memory import aligned_empty, move_to_huge_pages
from . import compile_cache, profile
from .drafting import Drafter
from .programs import COPY_BLOCKS, Built, kv_bytes, kv_format, programs, step_rows, step_sizes
from .state import Guided, Kept, SlotState, StepInput, StepResult, empty_rows, input_shapes
from .step import Fixed

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class Device:
    """Parameters, KV pool and slot state on a mesh, and the programs that work on them."""

    def __init__(
        self, config: TrunkConfig, engine: EngineConfig, mesh: Mesh, params: Mapping[str, Any], kernels: Kernels,
        shadow: DraftWeights | None = None,
    ) -> None:  # fmt: skip
        self.config, self.mesh, self.kernels = config, mesh, kernels
        self._params, self._shadow = dict(params), shadow
        self.context = engine.context(config)
        self.data = mesh.shape["data"]
        platform = mesh.devices.flat[0].platform
        self.passes = engine.passes(platform)
        self.kv = kv_format(engine, self.kernels, platform)
        self.blocks = engine.pool_blocks(config, kv_bytes(config, self.kv))
        self.rows = step_rows(engine, platform)
        self._choose_programs(engine)
        self.fixed = Fixed(self._params, self._drafter(profile.assumed(self.rows)))
        pool = self._listed["save"].args[0]
        self._new_pool = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pool),
            out_shardings=jax.tree.map(lambda s: s.sharding, pool),
        )
        self._layers: dict[tuple[int, ...], jax.Array] = {}
        self._unguided = jax.device_put(self.new_guided(), NamedSharding(mesh, P("data")))
        self._blank = {prefill: self._blank_input(prefill) for prefill in (False, True)}
        self._pool: KVPool | None
        self._state: SlotState | None
        self.reset()

    def _choose_programs(self, engine: EngineConfig) -> None:
        self.engine = engine
        self.programs = programs(
            self.config, engine, self.mesh, params=self._params, kernels=self.kernels, kv=self.kv,
            shadow=self._shadow,
        )  # fmt: skip
        self._listed = {program.kind: program for program in self.programs}
        self._compiled: dict[str, Built] = {}

    def set_cost(self, cost: np.ndarray) -> None:
        """Weigh drafts against other costs of a pass, by its number of rows (`profile.measured`)."""
        self.fixed = self.fixed._replace(drafter=self._drafter(cost))

    @property
    def drafts(self) -> bool:
        """Whether tokens can be drafted."""
        return self.fixed.drafter is not None

    def _drafter(self, cost: np.ndarray) -> Drafter | None:
        """`cost` is the time of a pass by its number of rows, in whatever unit."""
        if self._listed["decode"].args[0].drafter is None:
            return None
        assert self._shadow is not None
        weights = laid_out(self._shadow, self.kernels.draft)
        drafter = Drafter(weights, cost.astype(np.float32), np.int32(self.engine.draft_length or 0))
        return jax.device_put(drafter, NamedSharding(self.mesh, P()))

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
        self._empty_block = jax.tree.map(_zeros, self.block_shapes)
        self._pool = self._new_pool()
        if self.mesh.devices.flat[0].platform == "cpu":
            jax.tree.map(move_to_huge_pages, jax.block_until_ready(self._pool))
        self._clear_slots()

    def _clear_slots(self) -> None:
        self.put_slots(self.empty_rows(self.data * self.engine.slots))

    def empty_rows(self, rows: int) -> SlotState:
        """Host rows of this engine's sizes that choose nothing."""
        return empty_rows(rows, self.context, self.config.vocab_size)

    def placed(self, rows: SlotState) -> SlotState:
        """Host rows for all slots in the device's own memory, ready: those that are put as they are may still be the
        host's, and the step that takes them over copies them first."""
        placed = jax.device_put(rows, NamedSharding(self.mesh, P("data")))
        return jax.block_until_ready(self._get("admit")(placed, self._no_slot(), self.empty_rows(self.data)))

    def put_slots(self, rows: SlotState) -> None:
        """Replace all slots by host rows."""
        self.take_slots(jax.device_put(rows, NamedSharding(self.mesh, P("data"))))

    def take_slots(self, placed: SlotState) -> None:
        """Replace all slots by rows that are on the device; the next step uses them up."""
        self._state = placed

    def compile(self, progress: Progress | None = None) -> None:
        """Compile every program, as many at a time as there are cores, and run each once."""
        with compile_cache.mended():
            self._compile_all(progress)
        self.check_rounding()
        for kind in ("prefill", "decode", "decode_n"):
            if kind in self._listed:
                jax.block_until_ready(self.run(kind, self.new_input(kind == "prefill")))
        self.admit(self._no_slot(), self.empty_rows(self.data))
        self.load([(0, NULL_BLOCK, self.save([(0, NULL_BLOCK)])[0])])
        self.copy(0, NULL_BLOCK, NULL_BLOCK)
        if self.drafts:
            self.set_cost(profile.measured(self))
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
            inputs.tables[0, 0], inputs.capacity[0] = 1, BLOCK
            if kind == "prefill":
                inputs.ids[0], inputs.positions[0], inputs.counts[0], inputs.last[0] = 1, 0, 1, 0
                inputs.sizes[0] = 1, 1
            else:
                rows = self.empty_rows(self.data * self.engine.slots)
                rows.token[0], rows.limit[0], rows.active[0] = 1, 1, True
                self.put_slots(rows)
                inputs.decodes[0] = True
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
        """A host input that does nothing. Its arrays are fresh, since JAX may still read the last ones; only `guided`
        is always the same, on the device, and not to be written to (`new_guided`)."""
        blank = self._blank[prefill]
        return blank._replace(**{name: part.copy() for name, part in blank._asdict().items() if name != "guided"})

    def _blank_input(self, prefill: bool) -> StepInput:
        tokens, groups = step_sizes(self.engine, prefill)
        shapes = input_shapes(
            self.data, self.engine.slots, tokens, groups, self.engine.table_width(self.config), self.rows,
            self.config.vocab_size,
        )  # fmt: skip
        blank = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes._replace(guided=None))
        return blank._replace(
            positions=np.full_like(blank.positions, -1), last=np.full_like(blank.last, -1), guided=self._unguided
        )

    def new_guided(self) -> Guided:
        """Host arrays that guide no slot, to be filled in."""
        return Guided.nothing(self.data, self.engine.slots, self.rows, self.config.vocab_size)

    def run(self, kind: str, inputs: StepInput, layers: tuple[int, ...] | None = None) -> tuple[StepResult, Kept]:
        """Dispatch a step over `layers` (None: all of them); what it chose and from what, not yet ready."""
        self._pool, self._state, result, kept = self._get(kind)(
            self.fixed, self._pool, self._state, inputs, self._layer_list(layers)
        )
        return result, kept

    def _layer_list(self, layers: tuple[int, ...] | None) -> jax.Array:
        """How many layers run and which, on the device."""
        chosen = tuple(range(self.config.n_layers)) if layers is None else layers
        if chosen not in self._layers:
            listed = np.zeros(1 + self.config.n_layers, np.int32)
            listed[0], listed[1 : 1 + len(chosen)] = len(chosen), chosen
            self._layers[chosen] = jax.device_put(listed, NamedSharding(self.mesh, P()))
        return self._layers[chosen]

    def conclude_at(self, shard: int, slot: int) -> int:
        """Where the conclusion of the slot's thoughts begins. Waits for the steps before it."""
        assert self._state is not None
        return int(np.asarray(self._state.conclude_at)[shard * self.engine.slots + slot])

    def _no_slot(self) -> np.ndarray:
        return np.full(self.data, -1, np.int32)

    def admit(self, slots: np.ndarray, rows: SlotState) -> None:
        """Replace slot `slots[d]` of every data shard d by row d; -1 leaves a shard alone."""
        self._state = self._get("admit")(self._state, slots, rows)

    # ---- blocks

    @property
    def block_shapes(self) -> KVPool:
        """Shapes of one block of every data shard."""
        return self._listed["load"].args[2][0]

    def copy_out(self, blocks: list[tuple[int, int]]) -> KVPool:
        """Start to copy at most `COPY_BLOCKS` blocks, (shard, block) pairs, behind the steps before it; the i-th, of
        shard d, is row `d * COPY_BLOCKS + i` of the result, whatever becomes of the pool."""
        return self._get("save")(self._pool, self._block_ids(blocks))

    def save(self, blocks: list[tuple[int, int]]) -> list[KVPool]:
        """Host copies of the contents of (shard, block) pairs. Waits for the steps before it."""
        contents: list[KVPool] = []
        for start in range(0, len(blocks), COPY_BLOCKS):
            part = blocks[start : start + COPY_BLOCKS]
            saved = jax.tree.map(np.asarray, self.copy_out(part))
            for i, (shard, _) in enumerate(part):
                at = shard * COPY_BLOCKS + i
                contents.append(jax.tree.map(lambda x, at=at: x[at].copy(), saved))
        return contents

    def load(self, blocks: list[tuple[int, int, KVPool]]) -> list[jax.Array]:
        """Write contents, host arrays, into (shard, block, contents) triples.

        The device reads them where they are, if it can: they must stay as they are until the results are ready.
        """
        read = []
        for start in range(0, len(blocks), COPY_BLOCKS):
            part = blocks[start : start + COPY_BLOCKS]
            ids = self._block_ids([(shard, block) for shard, block, _ in part])
            contents = [self._among_empty(shard, content) for shard, _, content in part]
            contents += [self._empty_block] * (COPY_BLOCKS - len(part))
            self._pool, done = self._get("load")(self._pool, ids, tuple(contents))
            read.append(done)
        return read

    def _among_empty(self, shard: int, content: KVPool) -> KVPool:
        """A block of one data shard as those of all, `[D, ...]` each."""
        if self.data == 1:
            return jax.tree.map(lambda array: array[None], content)
        all_ = jax.tree.map(np.copy, self._empty_block)
        for array, own in zip(jax.tree.leaves(all_), jax.tree.leaves(content), strict=True):
            array[shard] = own
        return all_

    def copy(self, shard: int, source: int, target: int) -> None:
        """Copy a block to another one of its shard, on the device."""
        pairs = np.full(self.data * 2, NULL_BLOCK, np.int32)
        pairs[2 * shard : 2 * shard + 2] = source, target
        self._pool = self._get("copy")(self._pool, pairs)

    def _block_ids(self, part: list[tuple[int, int]]) -> np.ndarray:
        ids = np.full(self.data * COPY_BLOCKS, NULL_BLOCK, np.int32)
        for i, (shard, block) in enumerate(part):
            ids[shard * COPY_BLOCKS + i] = block
        return ids


def _zeros(like: jax.ShapeDtypeStruct) -> np.ndarray:
    array = aligned_empty(like.shape, like.dtype)
    array.fill(0)
    return array
