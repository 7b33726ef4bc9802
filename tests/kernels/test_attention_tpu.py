"""The TPU attention kernel: in interpret mode against the plain reference, and compiled for the chips it is for."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the race detector leaves its verdict
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from umbra.configs.engine import BLOCK
from umbra.configs.models import named
from umbra.kernels.attention import KVFormat, KVPool, Queries, Want, reference, tpu, tpu_hot, tpu_kernel, tpu_sizes
from umbra.kernels.attention.api import AttentionResult
from umbra.scripts.tpu import chips

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 2e-2}
LAYER = 1
CLEAN = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    vector_clock_size=256,  # by default all DMAs share a clock, and no two of them ever race
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences as (first position of their queries, number of queries); what is before is context."""

    sequences: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float | None = None
    padding: int = 0
    want: Want = Want()
    dropped: tuple[int, ...] = ()
    """Blocks of every sequence that its table does not list."""
    narrow: bool = True
    """One block at a time and the shallowest ring: less to compile, and the tightest order of its DMAs."""


@dataclasses.dataclass
class Step:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pool: KVPool
    queries: Queries


def make(case: Case, dtype: str) -> Step:
    """A step over a pool in which everything that belongs to no sequence is NaN (int8: NaN scales)."""
    rng = np.random.default_rng(1)
    K, H = case.kv_heads, case.head_dim
    width = max(-(-(first + n) // BLOCK) for first, n in case.sequences) + 1
    tables = rng.permutation(len(case.sequences) * width).reshape(-1, width).astype(np.int32) + 1
    shapes = KVFormat(dtype, "float32").pool(tables.size + 1, 2, K, H)
    pool = KVPool(
        *(None if s is None else jnp.full(s.shape, 77 if s.dtype == np.int8 else np.nan, s.dtype) for s in shapes)
    )
    past = np.array([(s, p) for s, (first, _) in enumerate(case.sequences) for p in range(first)], np.int32).reshape(
        -1, 2
    )
    kv = rng.standard_normal((2, len(past), K, H), dtype=np.float32)
    pool = _write(pool, *kv, listed(tables, past))
    new = [(s, p) for s, (first, n) in enumerate(case.sequences) for p in range(first, first + n)]
    queries = listed(tables, np.array([*new, *[(0, -1)] * case.padding], np.int32))
    if case.dropped:
        kept = [
            [m for m in range(width) if m not in case.dropped and m * BLOCK < first + n] for first, n in case.sequences
        ]
        pad = [m + [0] * (width - len(m)) for m in kept]
        queries = queries._replace(
            tables=np.take_along_axis(tables, np.array(pad), 1), blocks_at=np.array(pad, np.int32),
            n_blocks=np.array([len(m) for m in kept], np.int32),
        )  # fmt: skip
    T = len(queries.slots)
    q, k, v = (rng.standard_normal((T, heads, H), dtype=np.float32) for heads in (case.heads, K, K))
    return Step(q, k, v, pool, queries)


def listed(tables: np.ndarray, tokens: np.ndarray) -> Queries:
    """Queries of `tokens` `[T, 2]`: slot and position; groups of one token, for the reference."""
    T = len(tokens)
    return Queries(
        slots=tokens[:, 0], positions=tokens[:, 1], n_tokens=np.int32((tokens[:, 1] >= 0).sum()),
        starts=np.arange(T, dtype=np.int32), counts=np.ones(T, np.int32), n_groups=np.int32((tokens[:, 1] >= 0).sum()),
        tables=tables,
    )  # fmt: skip


@jax.jit
def _write(pool: KVPool, k: jax.Array, v: jax.Array, queries: Queries) -> KVPool:
    return reference.write_kv(pool, jnp.int32(LAYER), k, v, queries)


def attend(module: Any, case: Case, step: Step, **more: Any) -> AttentionResult:
    call = functools.partial(
        module.attention,
        angles=None,
        q_norm=None,
        k_norm=None,
        scale=0.25,
        softcap=case.softcap,
        want=case.want,
        **more,
    )
    pool = jax.tree.map(jnp.array, step.pool)
    quickly = {"xla_backend_optimization_level": 0}  # it is run once
    result = jax.jit(call, compiler_options=quickly)(
        step.q, step.k, step.v, pool, jnp.int32(LAYER), step.queries, window=jnp.int32(case.window)
    )
    return jax.tree.map(np.asarray, result)


def interpret(case: Case, step: Step, cores: int = 1) -> AttentionResult:
    """`attend` with the kernel in interpret mode, in which it must leave no race."""
    got, raced = _interpret(case, step, cores)
    assert not raced
    return got


def _interpret(case: Case, step: Step, cores: int = 1) -> tuple[AttentionResult, bool]:
    choose = tpu_sizes.choose

    def narrow(*args: Any, **rest: Any) -> tpu_sizes.Sizes:
        return dataclasses.replace(choose(*args, **rest), spans=1, depth=2)

    try:
        with (
            pltpu.force_tpu_interpret_mode(dataclasses.replace(CLEAN, num_cores_or_threads=cores)),
            pytest.MonkeyPatch.context() as patch,
        ):
            if case.narrow:
                patch.setattr(tpu_sizes, "choose", narrow)
            got = attend(tpu, case, step)
        return got, interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def check(case: Case, dtype: str, got: AttentionResult, step: Step) -> None:
    expected = attend(reference, case, step)
    tolerance = TOLERANCE[dtype]
    for name in ("out", "lse", "block_mass"):
        want, have = getattr(expected, name), getattr(got, name)
        assert (want is None) == (have is None)
        if want is not None:
            np.testing.assert_allclose(have, want, atol=tolerance, rtol=tolerance, err_msg=name)
    may_differ = np.zeros(expected.pool.values.shape[:1] + (BLOCK,), bool)
    may_differ[0] = True
    queries = step.queries
    for slot in range(len(case.sequences)):
        last = sum(case.sequences[slot]) - 1
        row = queries.blocks_at[slot].tolist().index(last // BLOCK) if case.dropped else last // BLOCK
        may_differ[queries.tables[slot, row], last % BLOCK + 1 :] = True  # behind the last token anything may be
    differ = bits(got.pool.values) != bits(expected.pool.values)
    assert not (differ.any((1, 2, 4)) & ~may_differ).any()
    if got.pool.scales is not None:
        differ = bits(got.pool.scales) != bits(expected.pool.scales)
        assert not (differ.any((1, 2, 3)) & ~may_differ).any()


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


DECODE = ((127, 1), (300, 1), (128, 1))


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        ("bfloat16", Case(DECODE, heads=6, kv_heads=2, head_dim=64, padding=1, narrow=False)),
        ("int8", Case(DECODE, heads=2, kv_heads=1, head_dim=128)),
        ("float32", Case(((255, 2), (3, 3), (126, 3)), heads=2, kv_heads=1, head_dim=128, window=100, softcap=5.0)),
        ("int8", Case(((250, 16), (40, 1)), heads=1, kv_heads=1, head_dim=32, want=Want(lse=True, block_mass=True))),
        # Blocks left out of the tables.
        ("bfloat16", Case(((600, 1), (520, 2)), heads=3, kv_heads=1, head_dim=256, dropped=(1, 3))),
        # More tiles than one in a run, whose first tokens the last one no longer sees.
        ("float32", Case(((100, 60), (0, 5)), heads=16, kv_heads=1, head_dim=64, window=10)),
    ],
    ids=["decode", "decode int8", "verify", "prefill int8", "sparse", "narrow window"],
)
def test_matches_the_reference(dtype: str, case: Case) -> None:
    step = make(case, dtype)
    check(case, dtype, interpret(case, step), step)


def test_two_cores_share_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a v5p: each core takes whole runs, and neither waits for the other."""
    monkeypatch.setattr(tpu_sizes, "chip", lambda: tpu_sizes.CHIPS["v5p"])
    case = Case(((100, 20), (300, 1), (7, 3)), heads=2, kv_heads=1, head_dim=64)
    step = make(case, "bfloat16")
    check(case, "bfloat16", interpret(case, step, cores=2), step)


def test_the_race_detector_would_see_an_early_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: were every tile to store the run's tokens, it would write what the next one reads."""
    monkeypatch.setattr(tpu_kernel._Tile, "is_last", property(lambda tile: tile.count > 0))
    case = Case(((100, 60),), heads=16, kv_heads=1, head_dim=64)
    assert _interpret(case, make(case, "float32"))[1]


def test_staged_blocks_are_read_from_the_chip() -> None:
    """The pool's own copy of the staged blocks is destroyed: the result must not depend on it."""
    case = Case(DECODE, heads=2, kv_heads=1, head_dim=64)
    step = make(case, "int8")

    class Staged:
        @staticmethod
        def attention(q: Any, k: Any, v: Any, pool: KVPool, layer: Any, queries: Queries, **rest: Any) -> Any:
            hot = tpu_hot.stage(pool, queries.tables, queries.positions, 3)
            staged = jnp.isin(jnp.arange(len(pool.values)), jnp.where(hot.places >= 0, queries.tables, -1))
            ruined = [jnp.where(staged.reshape(-1, 1, 1, 1, 1), 1, x).astype(x.dtype) for x in pool if x is not None]
            result = tpu.attention(q, k, v, KVPool(*ruined), layer, queries, hot=hot, **rest)
            return result._replace(lse=hot.places)

    with pltpu.force_tpu_interpret_mode(CLEAN):
        got = attend(Staged, case, step)
    raced = interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    assert not raced
    np.testing.assert_array_equal(got.lse, [[-1, -1, -1, -1], [-1, 0, -1, -1], [1, -1, -1, -1]])
    np.testing.assert_allclose(got.out, attend(reference, case, step).out, atol=2e-2)


# ---- plans and sizes


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from([1, 3, 8]), st.integers(1, 2), st.data())
def test_runs_are_cut_into_tiles(lengths: list[int], height: int, cores: int, data: st.DataObject) -> None:
    T, B, M = 160, 5, 4
    firsts = [data.draw(st.integers(0, 300)) for _ in lengths]
    tokens = [(s, first + i) for s, (n, first) in enumerate(zip(lengths, firsts, strict=True)) for i in range(n)]
    tokens += [(0, -1)] * (T - len(tokens))
    queries = jax.tree.map(jnp.asarray, listed(np.zeros((B, M), np.int32), np.array(tokens, np.int32)))
    sizes = tpu_sizes.choose(4, 2, 64, "float32", tokens=T, rows=B, width=M, on=tpu_sizes.UNKNOWN)
    work = jax.jit(tpu.tiles, static_argnums=(1, 2))(queries, dataclasses.replace(sizes, heights=(height,)), cores)
    expected, token, opens = [], 0, []
    for s, (n, first) in enumerate(zip(lengths, firsts, strict=True)):
        opens.append(len(expected))
        for i in range(0, n, height):
            count = min(height, n - i)
            end = (first + i + count - 1) // BLOCK + 1
            expected.append([token + i, count, s * M, first + i, first, token - first, first + n - 1, end])
        token += n
    tiles = np.asarray(work.tiles).reshape(-1, tpu_kernel.TILE_FIELDS)
    np.testing.assert_array_equal(tiles[: len(expected)], expected)
    assert not tiles[len(expected) :].any() and len(tiles) > len(expected)
    bounds = np.asarray(work.bounds).tolist()
    assert bounds[0] == 0 and bounds[-1] == len(expected) and bounds == sorted(bounds)
    assert all(b in [*opens, len(expected)] for b in bounds)
    np.testing.assert_array_equal(work.known, np.array(tokens)[:, 1] >= 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=3, max_size=3), st.integers(1, 12))
def test_the_window_holds_first_and_recent_full_blocks(lengths: list[int], blocks: int) -> None:
    tables = 1 + np.arange(18, dtype=np.int32).reshape(3, 6)
    full = np.array(lengths) // BLOCK
    places, sources = map(np.asarray, tpu_hot._chosen(jnp.asarray(tables), jnp.asarray(full, jnp.int32), blocks))
    share = blocks // max(1, (full > 0).sum())
    for b in range(3):
        staged = np.flatnonzero(places[b] >= 0).tolist()
        first = [0] if share > 1 else []
        recent = range(max(len(first), full[b] - share + len(first)), full[b])
        assert staged == ([*first, *recent] if full[b] and share else [])
        assert all(sources[places[b, m]] == tables[b, m] for m in staged)
    assert (sources >= 0).sum() == (places >= 0).sum()


MODELS = ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "smollm2-135m", "gemma3-270m"]


def sizes_of(model: str, dtype: str, chip: str, tokens: int, rows: int = 16) -> tpu_sizes.Sizes:
    c = named(model)
    return tpu_sizes.choose(
        c.n_heads, c.n_kv_heads, c.head_dim, dtype, tokens=tokens, rows=rows, width=64, on=tpu_sizes.CHIPS[chip],
    )  # fmt: skip


@pytest.mark.parametrize("chip", tpu_sizes.CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_sizes_keep_to_the_limits_of_the_chip(model: str, dtype: str, chip: str) -> None:
    on = tpu_sizes.CHIPS[chip]
    for tokens, rows in ((16, 16), (160, 16), (1152, 128), (640, 128)):
        s = sizes_of(model, dtype, chip, tokens, rows)
        assert s.vmem_bytes() <= on.vmem_bytes / 2
        assert s.smem_bytes(rows, 3) <= on.smem_bytes
        assert s.depth >= 2 * s.spans and s.depth & (s.depth - 1) == 0
        assert s.depth * s.block_bytes >= min(on.in_flight_bytes, 24 * s.block_bytes)
        assert s.n_kv_heads % s.heads == 0
        assert all(h < 8 or h % 8 == 0 for h in s.heights) and list(s.heights) == sorted(s.heights)
    assert s.slab == {"bfloat16": 16, "int8": 32}[dtype]


def test_sizes_shrink_to_what_fits() -> None:
    small = dataclasses.replace(tpu_sizes.CHIPS["v5e"], vmem_bytes=8 * tpu_sizes.MIB)
    arguments = dict(tokens=160, rows=16, width=64, lse=True, block_mass=True)
    s = tpu_sizes.choose(32, 8, 128, "bfloat16", on=small, **arguments)
    assert s.vmem_bytes() <= 4 * tpu_sizes.MIB
    assert s.depth == 2 and s.tile < sizes_of("llama-3.1-8b", "bfloat16", "v5e", 160).tile
    with pytest.raises(ValueError, match="needs at least .* MiB"):
        tpu_sizes.choose(32, 8, 128, "bfloat16", on=dataclasses.replace(small, vmem_bytes=tpu_sizes.MIB), **arguments)


def test_tables_have_to_fit_the_scalar_memory() -> None:
    c = named("llama-3.1-8b")
    arguments = dict(tokens=128, rows=128, on=tpu_sizes.CHIPS["v5e"])
    tpu_sizes.choose(c.n_heads, c.n_kv_heads, c.head_dim, "bfloat16", width=344, tables=3, **arguments)  # 44,000 tokens
    with pytest.raises(ValueError, match="do not fit"):
        tpu_sizes.choose(c.n_heads, c.n_kv_heads, c.head_dim, "bfloat16", width=8192, **arguments)


def test_pool_bytes() -> None:
    step = dict(n_heads=32, tokens=16, rows=16, width=64, on=tpu_sizes.CHIPS["v5e"])
    block = 8 * 128 * 256 * 2
    slab = block // 8  # 16 of 128 tokens
    assert tpu.pool_bytes(8, 128, "bfloat16", [1000], [1], **step) == 8 * block + slab
    assert tpu.pool_bytes(8, 128, "bfloat16", [1000, 50], [1, 0], window=200, **step) == 2 * block + slab
    prefill = {**step, "tokens": 160}
    assert tpu.pool_bytes(8, 128, "bfloat16", [64], [64], **prefill) == 2 * block + 4 * slab
    int8 = 8 * 128 * (256 + 8)
    assert tpu.pool_bytes(8, 128, "int8", [1000], [1], **step) == 8 * int8 + 8 * (32 * 256 + 128 * 8)


# ---- compiled for TPUs


def compiled(fn: Any, args: Any, topology: str) -> str:
    """The text of `fn` compiled for one chip of `topology`; its first argument is donated."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    mesh = Mesh(np.asarray(chips.devices(topology)[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), args)
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(sharded, donate_argnums=0).lower(*args).compile().as_text()


@dataclasses.dataclass
class Program:
    """A loop over the layers of a model, `passes` times, with nothing but attention in it."""

    model: str
    dtype: str
    tokens: int
    layers: int = 4
    blocks: int = 500
    rows: int = 16
    passes: int = 1
    hot: int = 0
    want: Want = Want()

    @property
    def pool(self) -> KVPool:
        c = named(self.model)
        return KVFormat(self.dtype, "float32").pool(self.blocks, self.layers, c.n_kv_heads, c.head_dim)

    def compile(self, topology: str) -> str:
        c, T, B = named(self.model), self.tokens, self.rows
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
        queries = Queries(shape((T,)), shape((T,)), shape(()), shape((T,)), shape((T,)), shape(()), shape((B, 64)))
        kv = jax.ShapeDtypeStruct((2, T, c.n_kv_heads, c.head_dim), np.float32)
        x = jax.ShapeDtypeStruct((T, c.n_heads, c.head_dim), np.float32)
        return compiled(self.run, (self.pool, x, kv, queries, shape(())), topology)

    def run(self, pool: KVPool, x: jax.Array, kv: jax.Array, queries: Queries, window: jax.Array) -> Any:
        hot = tpu_hot.stage(pool, queries.tables, queries.positions[: self.rows], self.hot) if self.hot else None

        def layer(index: jax.Array, carry: Any) -> Any:
            pool, x, queries = carry
            result = tpu.attention(
                x, kv[0], kv[1], pool, index, queries, angles=None, q_norm=None, k_norm=None, scale=0.1, window=window,
                softcap=None, want=self.want, hot=hot,
            )  # fmt: skip
            extra = sum(x.sum() for x in (result.lse, result.block_mass) if x is not None)
            return result.pool, result.out + extra, queries

        def token(_: jax.Array, carry: Any) -> Any:
            pool, x, queries = lax.fori_loop(0, self.layers, layer, carry)
            return pool, x, queries._replace(positions=queries.positions + 1)

        return lax.fori_loop(0, self.passes, token, (pool, x, queries))[:2]


def copies(text: str, array: Any) -> list[str]:
    """Instructions that copy an array of the shape of `array`."""
    shape = "[" + ",".join(map(str, array.shape)) + "]"
    return [line for line in text.splitlines() if shape in line and re.search(r"= .*\bcopy(-start)?\(", line)]


@pytest.mark.parametrize(
    ("topology", "program"),
    [
        ("v5e:2x2", Program("llama-3.1-8b", "bfloat16", 16)),
        ("v5e:2x2", Program("smollm2-135m", "int8", 160)),
        ("v5p:2x2x1", Program("llama-3.2-1b", "bfloat16", 160)),
        ("v5p:2x2x1", Program("gemma3-270m", "int8", 16)),
        ("v6e:2x2", Program("qwen3-8b", "int8", 16)),
        ("v6e:2x2", Program("gemma3-270m", "bfloat16", 80, want=Want(lse=True, block_mass=True))),
    ],
    ids=str,
)
def test_compiles_without_copying_the_pool(topology: str, program: Program) -> None:
    text = program.compile(topology)
    assert len(re.findall(rf"%{tpu.NAME}\S* = .*tpu_custom_call", text)) == 1
    for array in program.pool:
        assert array is None or not copies(text, array)


def test_the_hot_window_stays_on_the_chip() -> None:
    program = Program("smollm2-135m", "bfloat16", 4, layers=30, rows=4, passes=8)
    c = named(program.model)
    form = KVFormat(program.dtype, "float32")
    program.hot = tpu_hot.capacity(form, 30, c.n_kv_heads, c.head_dim, tpu_sizes.CHIPS["v5e"])
    staged = [jax.ShapeDtypeStruct((program.hot, *x.shape[1:]), x.dtype) for x in program.pool if x is not None]
    text = program.compile("v5e:2x2")
    assert 40 * tpu_sizes.MIB < staged[0].size * 2 <= 48 * tpu_sizes.MIB
    assert tpu_hot.l1_mode("tpu", text, staged) == "vmem_resident"
    assert not copies(text, staged[0]) and not copies(text, program.pool.values)
    assert len(re.findall(rf"%{tpu_hot.NAME}\S* = .*tpu_custom_call", text)) == 1


def test_l1_mode_is_what_the_program_says() -> None:
    array = jax.ShapeDtypeStruct((4, 2, 1, 128, 128), jnp.bfloat16)
    loop = "  %%while.1 = (s32[], bf16[4,2,1,128,128]{4,3,2,1,0:T(8,128)(2,1)%s}) while(%%tuple), body=%%b"
    assert tpu_hot.l1_mode("tpu", loop % "S(1)", [array]) == "vmem_resident"
    assert tpu_hot.l1_mode("tpu", loop % "", [array]) == "hbm"
    assert tpu_hot.l1_mode("tpu", loop % "S(1)" + "\n" + loop % "", [array]) == "hbm"
    assert tpu_hot.l1_mode("tpu", "no loop", [array]) == "hbm"
    for move in ("copy-start", "slice-start"):  # out of the loop's own memory and back, in every pass
        moved = "  %moved = (bf16[4,2,1,128,128]{4,3,2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) " + move + "(%kv)"
        assert tpu_hot.l1_mode("tpu", loop % "S(1)" + "\n" + moved, [array]) == "hbm"
    assert tpu_hot.l1_mode("cpu", loop % "S(1)", [array]) == "cpu_pool"
