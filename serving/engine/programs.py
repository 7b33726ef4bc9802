"""The list of compiled programs: what the engine runs, what it warms up, and what `compile_tpu.py` compiles."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...configs.engine import BLOCK, EngineConfig
from ...configs.trunk import TrunkConfig
from ...kernels.attention import GROUP, KVFormat, KVPool
from ...kernels.backend import Backend, Kernels
from ...kernels.draft import DraftWeights, laid_out
from ...model.params import partitions, split_obstacle, with_shardings
from ...model.trunk import Execution
from . import step
from .drafting import Drafter
from .state import Keep, Kept, StepResult, input_shapes, state_shapes

log = logging.getLogger(__name__)

COPY_BLOCKS = 8
"""Blocks moved by one call of the programs that save and load them."""

_POOL_SPEC = P("data", None, "model")


def cost_entries(rows: int) -> int:
    """Entries of the table of what passes cost: one for every number of rows, and one more."""
    return rows + 2


def drafter_shapes(engine: EngineConfig, rows: int, shadow: DraftWeights | None, backend: Backend) -> Drafter | None:
    """The abstract drafter of an engine, None where nothing is ever drafted."""
    if shadow is None or rows == engine.slots:
        return None
    weights = jax.eval_shape(lambda x: laid_out(x, backend), shadow)
    cost = jax.ShapeDtypeStruct((cost_entries(rows),), np.float32)
    return Drafter(weights, cost, jax.ShapeDtypeStruct((), np.int32))


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: a function to be jitted and the abstract arguments (with shardings) it is compiled for."""

    name: str
    kind: str  # prefill, decode, decode_n, admit, save, load or copy: unique in a list
    sequences: int  # per data shard
    width: int  # tokens of one step per data shard
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    out_shardings: Any
    hot: tuple[jax.ShapeDtypeStruct, ...] = ()
    """Arrays, as one device has them, that are to stay on the chip throughout a loop."""
    fallback: Program | None = None
    """What to run instead where they do not stay there."""

    def jit(self) -> Any:
        return jax.jit(self.fn, donate_argnums=self.donate, out_shardings=self.out_shardings)

    def compile(self) -> Built:
        """Compiled for the devices of the abstract arguments: the program, or its fallback."""
        try:
            compiled = self.jit().lower(*self.args).compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if self.fallback is None:
                raise
            log.info("%s: no room on the chip for a window of KV: %s", self.name, str(error).partition("\n")[0])
            return self.fallback.compile()
        if self.fallback is None:
            return Built(self, compiled, self._l1_mode(compiled))
        mode = self._l1_mode(compiled)
        return Built(self, compiled, mode) if mode != "hbm" else self.fallback.compile()

    def _l1_mode(self, compiled: Any) -> str:
        platform = next(iter(jax.tree.leaves(self.args)[0].sharding.device_set)).platform
        if not self.hot:
            return "hbm" if platform == "tpu" else "cpu_pool"
        from ...kernels.attention.tpu_hot import l1_mode

        return l1_mode(platform, compiled.as_text(), self.hot)


class Built(NamedTuple):
    """A compiled program."""

    program: Program
    compiled: Any
    l1_mode: str
    """Where it reads its most recent KV from: "vmem_resident", "hbm" or "cpu_pool"."""


def check_mesh(config: TrunkConfig, mesh: Mesh) -> None:
    """Raises `ValueError` when heads, F or V do not divide over the mesh's model axis."""
    model = mesh.shape["model"]
    sizes = {"K": config.n_kv_heads, "N": config.n_heads, "F": config.d_ff, "V": config.vocab_size}
    bad = [f"{letter} = {size}" for letter, size in sizes.items() if size % model]
    if bad:
        raise ValueError(f"{config.name} cannot be split over model={model}: {', '.join(bad)} is not a multiple of it")


def make_mesh(devices: list[Any], config: TrunkConfig, data: int | None = None, model: int | None = None) -> Mesh:
    """The (data, model) mesh of `devices`. By default model is the largest divisor of their number that divides K."""
    n = len(devices)
    if data is None and model is None:
        model = max(m for m in range(1, n + 1) if n % m == 0 and config.n_kv_heads % m == 0)
    model = model or n // (data or 1)
    data = data or n // model
    if data * model != n:
        raise ValueError(f"a mesh of data={data}, model={model} needs {data * model} devices; there are {n}")
    mesh = Mesh(np.asarray(devices).reshape(data, model), ("data", "model"))
    check_mesh(config, mesh)
    return mesh


def kv_format(engine: EngineConfig, kernels: Kernels, platform: str) -> KVFormat:
    """How KV is stored: as `engine.kv` says; by default int8 where the native kernels attend, else float32 on a CPU
    and bfloat16 elsewhere."""
    kind = engine.kv
    if kind == "auto":
        kind = "int8" if kernels.attention == "cpu" else "float32" if platform == "cpu" else "bfloat16"
    return KVFormat(kind, "float32" if platform == "tpu" else "float16")


def execution(config: TrunkConfig, engine: EngineConfig, mesh: Mesh, kernels: Kernels, *, prefill: bool) -> Execution:
    """How a step runs on this mesh: the plain path on a CPU in tiles of rows (kernels/tiles.py), others whole."""
    platform = mesh.devices.flat[0].platform
    tiled = platform == "cpu" and kernels.linear == "xla"
    tile = engine.prefill_tile if prefill else engine.tile
    return Execution(
        kernels,
        tile=tile if tiled else None,
        head_tile=engine.tile if tiled else None,
        axis="model" if mesh.shape["model"] > 1 else None,
        context=engine.table_width(config) * BLOCK,
    )


def kv_bytes(config: TrunkConfig, kv: KVFormat) -> int:
    """Bytes of one token's keys and values, all layers."""
    return kv.bytes_per_token(config.n_layers, config.n_kv_heads, config.head_dim)


def step_sizes(engine: EngineConfig, prefill: bool) -> tuple[int, int]:
    """Prompt tokens and their query groups in a step, per data shard."""
    if not prefill:
        return 0, 0
    return engine.prefill_chunk, engine.slots + -(-engine.prefill_chunk // GROUP)


def step_rows(engine: EngineConfig, platform: str) -> int:
    """Rows of a pass that choose, per data shard: one of every slot, and the drafted ones."""
    return engine.slots + engine.drafted_rows(platform)


def programs(
    config: TrunkConfig, engine: EngineConfig, mesh: Mesh, *, params: Mapping[str, Any], kernels: Kernels, kv: KVFormat,
    shadow: DraftWeights | None = None,
) -> list[Program]:  # fmt: skip
    """Every program an engine of this configuration runs, in the order it needs them. `params` and `shadow` may be
    abstract; without a shadow nothing is drafted."""
    check_mesh(config, mesh)
    if obstacle := split_obstacle(config, params, mesh.shape["model"]):
        raise ValueError(obstacle)
    build = _Builder(config, engine, mesh, params, kernels, kv, shadow)
    listed = [build.passes("prefill", 1, prefill=True), build.passes("decode", 1, prefill=False)]
    passes = engine.passes(mesh.devices.flat[0].platform)
    if passes > 1:
        listed.append(build.decode_n(passes))
    return [*listed, build.admit(), build.save(), build.load(), build.copy()]


class _Builder:
    def __init__(
        self, config: TrunkConfig, engine: EngineConfig, mesh: Mesh, params: Mapping[str, Any], kernels: Kernels,
        kv: KVFormat, shadow: DraftWeights | None,
    ) -> None:  # fmt: skip
        self.config, self.engine, self.mesh, self.kernels = config, engine, mesh, kernels
        self.data = mesh.shape["data"]
        self.rows = step_rows(engine, mesh.devices.flat[0].platform)
        drafter = drafter_shapes(engine, self.rows, shadow, kernels.draft)
        self.fixed_specs = step.Fixed(partitions(config, params), None if drafter is None else P())
        self.fixed = step.Fixed(with_shardings(config, params, mesh), self._abstract(drafter, P()))
        self.state_spec = P("data")
        self.kv = kv
        self.pool = self._blocks(kv, engine.pool_blocks(config, kv_bytes(config, kv)))
        self.contents = (self._blocks(kv, 1),) * COPY_BLOCKS
        self.pool_spec = jax.tree.map(lambda _: _POOL_SPEC, self.pool)
        context = engine.context(config)
        self.state = self._abstract(state_shapes(self.data * engine.slots, context, config.vocab_size), self.state_spec)
        self.row = self._abstract(state_shapes(self.data, context, config.vocab_size), self.state_spec)

    def _blocks(self, kv: KVFormat, blocks: int) -> KVPool:
        c = self.config
        return self._abstract(kv.pool(self.data * blocks, c.n_layers, c.n_kv_heads, c.head_dim), _POOL_SPEC)

    def _abstract(self, tree: Any, spec: P) -> Any:
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)

    def _ints(self, n: int) -> jax.ShapeDtypeStruct:
        return self._abstract(jax.ShapeDtypeStruct((self.data * n,), np.int32), self.state_spec)

    def _program(
        self, name: str, kind: str, width: int, fn: Callable[..., Any], args: tuple[Any, ...],
        in_specs: tuple[Any, ...], out_specs: Any, donate: tuple[int, ...],
    ) -> Program:  # fmt: skip
        sharded = jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        named = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), out_specs, is_leaf=lambda leaf: isinstance(leaf, P)
        )
        return Program(name, kind, self.engine.slots, width, sharded, args, donate, named)

    def decode_n(self, passes: int) -> Program:
        """Several decode passes; with KV on the chip where there is a place for it: for a window as large as can be, or
        else for half of that."""
        program = self.passes("decode_n", passes, prefill=False)
        c, most = self.config, self._hot_blocks()
        for blocks in (most // 2, most):
            if blocks < self.engine.slots:  # not one for each of them: at full load nothing would be staged
                continue
            hot = self.kv.pool(blocks, c.n_layers, c.n_kv_heads // self.mesh.shape["model"], c.head_dim)
            staged = self.passes("decode_n", passes, prefill=False, hot_blocks=blocks)
            program = dataclasses.replace(staged, hot=tuple(x for x in hot if x is not None), fallback=program)
        return program

    def _hot_blocks(self) -> int:
        """Most blocks that stay on the chip."""
        if self.engine.hot_window == "off" or self.kernels.attention != "tpu":
            return 0
        from ...kernels.attention import tpu_hot, tpu_sizes

        c, chip = self.config, tpu_sizes.chip_of(self.mesh)
        shadow = 0 if self.fixed.drafter is None else self.fixed.drafter.weights.chain_bytes  # whole on every chip
        heads = c.n_kv_heads // self.mesh.shape["model"]
        most = tpu_hot.capacity(self.kv, c.n_layers, heads, c.head_dim, chip, taken=shadow)
        return min(most, self.engine.slots * self.engine.table_width(c))

    def passes(self, kind: str, passes: int, *, prefill: bool, hot_blocks: int = 0) -> Program:
        """(fixed, pool, state, inputs, layers) -> pool, state, result, kept."""
        tokens, groups = step_sizes(self.engine, prefill)
        inputs = input_shapes(
            self.data, self.engine.slots, tokens, groups, self.engine.table_width(self.config), self.rows,
            self.config.vocab_size,
        )  # fmt: skip
        layers = jax.ShapeDtypeStruct((self.config.n_layers + 1,), np.int32, sharding=NamedSharding(self.mesh, P()))
        spec = self.state_spec
        result = StepResult(*[P(None, "data")] * len(StepResult._fields))
        width = tokens + self.rows
        name = f"{kind}_b{self.engine.slots}_t{width}" + (f"_n{passes}" if passes > 1 else "")
        run = execution(self.config, self.engine, self.mesh, self.kernels, prefill=prefill)
        keep = Keep(self.engine.logits, self.engine.features, self.engine.embeddings and prefill)
        fn = (
            functools.partial(step.run_pass, self.config, run, keep, self.rows)
            if passes == 1
            else functools.partial(step.run_passes, self.config, run, keep, self.rows, passes, hot_blocks)
        )
        return self._program(
            name, kind, width, fn,
            (self.fixed, self.pool, self.state, self._abstract(inputs, spec), layers),
            (self.fixed_specs, self.pool_spec, spec, spec, P()),
            (self.pool_spec, spec, result, Kept(spec, spec, spec, spec)), (1, 2),
        )  # fmt: skip

    def admit(self) -> Program:
        spec = self.state_spec
        return self._program(
            "admit", "admit", 0, step.admit, (self.state, self._ints(1), self.row), (spec, spec, spec), spec, (0,)
        )

    def save(self) -> Program:
        return self._program(
            f"save_blocks_{COPY_BLOCKS}", "save", 0, step.save_blocks, (self.pool, self._ints(COPY_BLOCKS)),
            (self.pool_spec, self.state_spec), self.pool_spec, (),
        )  # fmt: skip

    def load(self) -> Program:
        return self._program(
            f"load_blocks_{COPY_BLOCKS}", "load", 0, step.load_blocks,
            (self.pool, self._ints(COPY_BLOCKS), self.contents),
            (self.pool_spec, self.state_spec, (self.pool_spec,) * COPY_BLOCKS), (self.pool_spec, self.state_spec), (0,),
        )  # fmt: skip

    def copy(self) -> Program:
        return self._program(
            "copy_block", "copy", 0, step.copy_block, (self.pool, self._ints(2)), (self.pool_spec, self.state_spec),
            self.pool_spec, (0,),
        )  # fmt: skip
