"""The contract of attention, for every backend: against a float64 oracle that reads the whole stored context."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.configs.engine import BLOCK
from umbra.kernels import native
from umbra.kernels.attention import AttentionResult, KVFormat, KVPool, Queries, Want, attention, key_bounds, merge
from umbra.kernels.attention.reference import GROUP

BACKENDS = ["xla", "cpu"]
DTYPES = ["float32", "bfloat16", "int8"]
TOLERANCE = {
    **{("xla", dtype): 2e-5 for dtype in DTYPES},
    ("cpu", "float32"): 1e-5,
    ("cpu", "bfloat16"): 1e-5,
    ("cpu", "int8"): 4e-4,  # 15 bits of queries and weights: 4e-5 on average
}
"""Absolute and relative, for operands of magnitude 1."""
EXACT_BACKENDS = BACKENDS
"""Whose bits depend on the query and what it sees alone, whatever the shapes of the step."""
SCALE = 0.25
LAYER = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences as (first position of their queries, number of queries); what is before is context."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    softcap: float | None = None
    norm: bool = False
    rotate: bool = True
    group: int = GROUP
    seed: int = 0
    magnitude: float = 1.0


@dataclasses.dataclass
class Step:
    """The arguments of one call, numpy."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pool: KVPool
    queries: Queries
    angles: np.ndarray | None
    q_norm: tuple[np.ndarray, float] | None
    k_norm: tuple[np.ndarray, float] | None


def make(case: Case, dtype: str) -> Step:
    """A step over a pool in which everything that belongs to no sequence is NaN (127 with NaN scales)."""
    rng = np.random.default_rng(case.seed)
    K, H = case.kv_heads, case.head_dim
    width = max(-(-(first + n) // BLOCK) for first, n in case.sequences) + 1
    tables = rng.permutation(len(case.sequences) * width).reshape(-1, width).astype(np.int32) + 1
    pool = poisoned(KVFormat(dtype).pool(tables.size + 1, 2, K, H))
    slots, positions, starts, counts = [], [], [], []
    for s, (first, n) in enumerate(case.sequences):
        past = rng.standard_normal((first, K, 2, H), dtype=np.float32) * case.magnitude
        for m in range(-(-first // BLOCK)):
            store(pool, tables[s, m], past[m * BLOCK : (m + 1) * BLOCK])
        for at in range(0, n, case.group):
            starts.append(len(slots) + at)
            counts.append(min(case.group, n - at))
        slots += [s] * n
        positions += range(first, first + n)
    T = G = len(slots) + 3  # some padding; as many groups as `only` may make
    queries = Queries(
        slots=np.pad(slots, (0, T - len(slots))).astype(np.int32),
        positions=np.pad(positions, (0, T - len(positions)), constant_values=-1).astype(np.int32),
        n_tokens=np.int32(len(slots)),
        starts=np.pad(starts, (0, G - len(starts))).astype(np.int32),
        counts=np.pad(counts, (0, G - len(counts))).astype(np.int32),
        n_groups=np.int32(len(starts)),
        tables=tables,
    )
    q = rng.standard_normal((T, case.heads, H), dtype=np.float32) * case.magnitude
    k, v = rng.standard_normal((2, T, K, H), dtype=np.float32) * case.magnitude
    turn = rng.uniform(0, 6, (T, H // 2))
    angles = np.stack([np.cos(turn), np.sin(turn)], 1).astype(np.float32) if case.rotate else None
    norms = [(rng.uniform(0.5, 1.5, (2, H)).astype(np.float32), 1e-6) if case.norm else None for _ in range(2)]
    return Step(case, q, k, v, pool, queries, angles, *norms)


def poisoned(shapes: KVPool) -> KVPool:
    values = np.full(shapes.values.shape, 127 if shapes.scales is not None else np.nan, shapes.values.dtype)
    scales = None if shapes.scales is None else np.full(shapes.scales.shape, np.nan, shapes.scales.dtype)
    return KVPool(values, scales)


def store(pool: KVPool, block: int, kv: np.ndarray, at: int = 0) -> None:
    """Write keys and values `[n, K, 2, H]` from offset `at` of a block on, by the rule of the pool."""
    where = (block, LAYER, slice(None), slice(at, at + len(kv)))
    if pool.scales is None:
        pool.values[where] = kv.reshape(*kv.shape[:2], -1).swapaxes(0, 1).astype(pool.values.dtype)
        return
    scale = (np.abs(kv).max(-1) * np.float32(1 / 127)).clip(0, 65504).astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    stored = np.clip(np.rint(kv * inverse[..., None]), -127, 127).astype(np.int8)
    pool.values[where] = stored.reshape(*kv.shape[:2], -1).swapaxes(0, 1)
    pool.scales[block, LAYER, :, :, at : at + len(kv)] = scale.transpose(1, 2, 0).astype(pool.scales.dtype)


def call(step: Step, backend: str, want: Want = Want()) -> AttentionResult:  # noqa: B008
    """The result, with numpy arrays; of what attention gives for padding, which may be anything, nothing."""
    norms = [None if n is None else n[1] for n in (step.q_norm, step.k_norm)]
    weights = [None if n is None else n[0] for n in (step.q_norm, step.k_norm)]
    result = _call(
        backend, want, step.case.softcap, tuple(norms), step.q, step.k, step.v, jax.tree.map(jnp.array, step.pool),
        step.queries, step.angles, weights, np.int32(LAYER), np.int32(step.case.window),
    )  # fmt: skip
    n = int(step.queries.n_tokens)
    lse = None if result.lse is None else result.lse[:n]
    return jax.tree.map(np.asarray, result._replace(out=result.out[:n], lse=lse))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=7)
def _call(
    backend: str, want: Want, softcap: float | None, eps: tuple[float | None, ...], q: jax.Array, k: jax.Array,
    v: jax.Array, pool: KVPool, queries: Queries, angles: Any, weights: Any, layer: jax.Array, window: jax.Array,
) -> AttentionResult:  # fmt: skip
    norms = [None if w is None or e is None else (w, e) for w, e in zip(weights, eps, strict=True)]
    return attention(
        q, k, v, pool, layer, queries, angles=angles, q_norm=norms[0], k_norm=norms[1], scale=SCALE, window=window,
        softcap=softcap, backend=backend, want=want,
    )  # fmt: skip


def prepared(x: np.ndarray, angles: np.ndarray | None, norm: tuple[np.ndarray, float] | None) -> np.ndarray:
    x = x.astype(np.float64)
    if norm is not None:
        weight, eps = norm
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight[LAYER]
    if angles is None:
        return x
    cos, sin = angles[:, None, 0].astype(np.float64), angles[:, None, 1].astype(np.float64)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def hadamard(size: int) -> np.ndarray:
    """The orthonormal transform that queries and keys of an int8 pool go through."""
    part = size & -size
    matrix = np.ones((1, 1))
    while len(matrix) < part:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(size // part), matrix / np.sqrt(part))


def spread(x: np.ndarray) -> np.ndarray:
    """The same in float32, its sums in the order in which the kernels add."""
    x, size, step = x.copy(), x.shape[-1], 1
    part = size & -size
    while step < part:
        for i in range(0, size, 2 * step):
            a, b = x[..., i : i + step].copy(), x[..., i + step : i + 2 * step].copy()
            x[..., i : i + step], x[..., i + step : i + 2 * step] = a + b, a - b
        step *= 2
    return x * np.float32(part**-0.5)


def stored(pool: KVPool, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[P, K, H]`, float64, of a block as they were stored."""
    kv = np.asarray(pool.values[block, LAYER]).astype(np.float64).swapaxes(0, 1)
    k, v = np.split(kv, 2, axis=-1)
    if pool.scales is None:
        return k, v
    scales = np.asarray(pool.scales[block, LAYER]).astype(np.float64).transpose(1, 2, 0)  # [2, P, K]
    return k * scales[0, ..., None], v * scales[1, ..., None]


def oracle(step: Step, pool: KVPool) -> AttentionResult:
    """Attention over `pool`, which holds the step's keys and values."""
    case, queries = step.case, step.queries
    q = prepared(step.q, step.angles, step.q_norm)
    if pool.scales is not None:
        q = q @ hadamard(q.shape[-1])
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    mass = np.zeros((len(q), queries.tables.shape[1]))
    for t in range(int(queries.n_tokens)):
        p, slot = int(queries.positions[t]), int(queries.slots[t])
        if p < 0:
            continue
        low = max(0, p - case.window + 1) if case.window else 0
        listed = range(queries.tables.shape[1]) if queries.blocks_at is None else range(int(queries.n_blocks[slot]))
        parts = []
        for m in listed:
            j = m if queries.blocks_at is None else int(queries.blocks_at[slot, m])
            inside = np.arange(j * BLOCK, (j + 1) * BLOCK)
            inside = inside[(inside >= low) & (inside <= p)]
            if len(inside):
                k, v = stored(pool, queries.tables[slot, m])
                parts.append((m, k[inside % BLOCK], v[inside % BLOCK]))
        for n in range(case.heads):
            shared = n // (case.heads // case.kv_heads)
            logits = [k[:, shared] @ q[t, n] * SCALE for _, k, _ in parts]
            if case.softcap:
                logits = [case.softcap * np.tanh(x / case.softcap) for x in logits]
            top = max(x.max() for x in logits)
            weights = [np.exp(x - top) for x in logits]
            total = sum(w.sum() for w in weights)
            lse[t, n] = top + np.log(total)
            for (m, _, v), w in zip(parts, weights, strict=True):
                out[t, n] += w @ v[:, shared] / total
                mass[t, m] += w.sum() / total / case.heads
    n = int(queries.n_tokens)
    return AttentionResult(out[:n], pool, lse[:n], mass)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    differ = np.frombuffer(a.tobytes(), f"V{a.itemsize}") != np.frombuffer(b.tobytes(), f"V{b.itemsize}")
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first at {np.argmax(differ)}"


EDGES = ((0, 1), (127, 1), (128, 1), (120, 17), (0, 130), (255, 2), (300, 9), (60, 32))
CASES = [
    Case(EDGES),
    Case(EDGES, window=48, norm=True),
    Case(EDGES, window=128),
    Case(EDGES, window=1),
    Case(EDGES, softcap=5.0, rotate=False),
    Case(EDGES, heads=4, kv_heads=4, group=5),
    Case(EDGES, heads=8, kv_heads=1, head_dim=64),
    Case(((511, 1), (700, 3)), head_dim=128, norm=True),
    Case(((40, 3), (140, 1)), heads=4, kv_heads=1, head_dim=256),
    Case(((200, 40),), heads=9, kv_heads=3, head_dim=64),
]


def every_case() -> Iterator[Any]:
    """The plain JAX version takes a second to compile: not every case of it in every type."""
    for backend in BACKENDS:
        for i, case in enumerate(CASES):
            for dtype in DTYPES if backend != "xla" or i == 1 else (DTYPES[2 * (i % 2)],):
                yield pytest.param(backend, case, dtype, id=f"{backend}-{i}-{dtype}")


@pytest.mark.parametrize(("backend", "case", "dtype"), list(every_case()))
def test_matches_the_oracle(backend: str, case: Case, dtype: str) -> None:
    step = make(case, dtype)
    got = call(step, backend, Want(lse=True, block_mass=True))
    expected = oracle(step, got.pool)
    tolerance = TOLERANCE[backend, dtype]
    np.testing.assert_allclose(got.out, expected.out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got.lse, expected.lse, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got.block_mass, expected.block_mass, atol=tolerance, rtol=tolerance)
    again = call(step, backend, Want(lse=True, block_mass=True))
    jax.tree.map(assert_same_bits, got, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_exactly_the_new_tokens(backend: str, dtype: str) -> None:
    step = make(Case(((120, 17), (3, 1)), rotate=False, magnitude=3.0), dtype)
    expected = jax.tree.map(np.copy, step.pool)
    for t in range(int(step.queries.n_tokens)):
        p = int(step.queries.positions[t])
        block = int(step.queries.tables[int(step.queries.slots[t]), p // BLOCK])
        k = step.k[t] if step.pool.scales is None else spread(step.k[t])
        store(expected, block, np.stack([k, step.v[t]], 1)[None], p % BLOCK)
    got = call(step, backend).pool
    jax.tree.map(lambda a, b: assert_same_bits(a[1:], b[1:]), got, expected)  # the null block takes padding


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_scales_may_be_float32(backend: str) -> None:
    """And hold the same numbers."""
    step = make(Case(((130, 3),)), "int8")
    assert step.pool.scales is not None
    wide = dataclasses.replace(step, pool=KVPool(step.pool.values, step.pool.scales.astype(np.float32)))
    a, b = call(step, backend), call(wide, backend)
    assert_same_bits(a.out, b.out)
    np.testing.assert_array_equal(a.pool.scales.astype(np.float32), b.pool.scales)


def only(step: Step, tokens: list[int], group: int, width: int = 0) -> Step:
    """The step with only some of its tokens, other groups and a wider table; arrays have the sizes they had."""
    queries = step.queries
    starts, counts = [], []
    for i, t in enumerate(tokens):
        if i and queries.slots[t] == queries.slots[tokens[i - 1]] and counts[-1] < group and t == tokens[i - 1] + 1:
            counts[-1] += 1
        else:
            starts.append(i)
            counts.append(1)

    def padded(x: np.ndarray | list[int], value: int = 0) -> np.ndarray:
        return np.concatenate([x, np.full(len(queries.slots) - len(x), value)]).astype(np.int32)

    fewer = Queries(
        slots=padded(queries.slots[tokens]),
        positions=padded(queries.positions[tokens], -1),
        n_tokens=np.int32(len(tokens)),
        starts=padded(starts),
        counts=padded(counts),
        n_groups=np.int32(len(starts)),
        tables=np.pad(queries.tables, ((0, 0), (0, width))),
    )
    order = [*tokens, *(t for t in range(len(step.q)) if t not in tokens)]  # what follows is not used
    angles = None if step.angles is None else step.angles[order]
    return dataclasses.replace(step, q=step.q[order], k=step.k[order], v=step.v[order], queries=fewer, angles=angles)


def after(step: Step, backend: str) -> Step:
    """The step again, over the pool that it left."""
    return dataclasses.replace(step, pool=call(step, backend).pool)


@pytest.mark.parametrize(("window", "dtype"), [(0, "float32"), (48, "int8"), (48, "bfloat16")])
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_bits_do_not_depend_on_groups_neighbours_or_table_width(backend: str, window: int, dtype: str) -> None:
    heads = {"heads": 9, "kv_heads": 3, "head_dim": 64} if backend == "cpu" else {}
    step = after(make(Case(((120, 40), (7, 5), (300, 1)), window=window, **heads), dtype), backend)
    whole = call(step, backend)
    for tokens, group in (([0], 1), ([9], 1), ([44], 1), ([45], 1), (list(range(46)), 7), ([*range(5, 39), 41], 32)):
        part = call(only(step, tokens, group), backend)
        assert_same_bits(part.out[: len(tokens)], whole.out[tokens])
        assert not part.out[len(tokens) :].any()
    wider = call(only(step, list(range(46)), GROUP, width=5), backend)
    assert_same_bits(wider.out, whole.out)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_a_prompt_may_be_cut_anywhere(backend: str, dtype: str) -> None:
    """Chunks written and attended one after the other give the bits of one step."""
    step = make(Case(((100, 60),)), dtype)
    whole = call(step, backend)
    at, pool, parts = 0, step.pool, []
    for n in (1, 31, 2, 26):
        part = dataclasses.replace(only(step, list(range(at, at + n)), GROUP), pool=pool)
        result = call(part, backend)
        parts.append(result.out[:n])
        at, pool = at + n, result.pool
    assert_same_bits(np.concatenate(parts), whole.out[:60])
    jax.tree.map(lambda a, b: assert_same_bits(a[1:], b[1:]), pool, whole.pool)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_table(backend: str, dtype: str) -> None:
    """Blocks that are not listed are not seen; a list of all blocks changes no bit."""
    case = Case(((500, 12), (200, 1)))
    step = make(case, dtype)
    dense = call(step, backend)
    assert step.queries.tables.shape == (2, 5)
    every = np.tile(np.arange(step.queries.tables.shape[1], dtype=np.int32), (2, 1))
    full = step.queries._replace(blocks_at=every, n_blocks=np.asarray([4, 2], np.int32))
    assert_same_bits(call(dataclasses.replace(step, queries=full), backend).out, dense.out)
    chosen = np.asarray([[0, 2, 3, 9], [0, 1, 9, 9]], np.int32)  # what follows is not looked at
    tables = np.take_along_axis(step.queries.tables, np.minimum(chosen, 4), 1)
    tables[0, 3] = tables[1, 2:] = -1
    sparse = step.queries._replace(tables=tables, blocks_at=chosen, n_blocks=np.asarray([3, 2], np.int32))
    fewer = dataclasses.replace(step, queries=sparse)
    got = call(fewer, backend, Want(lse=True, block_mass=True))
    expected = oracle(fewer, got.pool)
    tolerance = TOLERANCE[backend, dtype]
    np.testing.assert_allclose(got.out, expected.out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got.lse, expected.lse, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got.block_mass, expected.block_mass, atol=tolerance, rtol=tolerance)
    jax.tree.map(lambda a, b: assert_same_bits(a[1:], b[1:]), got.pool, dense.pool)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_parts_are_merged(backend: str) -> None:
    """Attention over some blocks and over the others, merged, is attention over all."""
    step = after(make(Case(((500, 5),), rotate=False), "float32"), backend)
    whole = call(step, backend, Want(lse=True))
    parts = []
    for listed in ([0, 2], [1, 3]):
        queries = step.queries._replace(
            tables=step.queries.tables[:, listed],
            blocks_at=np.asarray([listed], np.int32),
            n_blocks=np.asarray([2], np.int32),
        )
        parts.append(call(dataclasses.replace(step, queries=queries), backend, Want(lse=True)))
    out, lse = merge(parts[0].out, parts[0].lse, parts[1].out, parts[1].lse)
    np.testing.assert_allclose(out, whole.out, atol=3e-6, rtol=1e-5)
    np.testing.assert_allclose(lse, whole.lse, atol=3e-6, rtol=1e-5)


def test_merging_with_nothing() -> None:
    out, lse = np.ones((2, 4), np.float32), np.asarray([3.0, -np.inf], np.float32)
    none = np.full(2, -np.inf, np.float32)
    merged = merge(jnp.asarray(out), jnp.asarray(lse), jnp.zeros((2, 4)), jnp.asarray(none))
    np.testing.assert_array_equal(merged[0], [[1] * 4, [0] * 4])
    np.testing.assert_array_equal(merged[1], lse)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_values(backend: str, dtype: str) -> None:
    """Huge logits, vanishing ones, keys and values of zero: finite, and right where the oracle can say."""
    step = make(Case(((200, 10),)), dtype)
    q = step.q
    for factor in (1e4, 1e-30, 0.0):
        step.q = q * np.float32(factor)
        got = call(step, backend, Want(lse=True))
        assert np.isfinite(got.out).all() and np.isfinite(got.lse).all()
    step = make(Case(((0, 10),)), dtype)
    step.k[3:] = 0
    step.v[:] = 0
    assert not call(step, backend).out.any()
    step.v[:] = 1e-3  # near the least that the scale of an int8 pool can say
    np.testing.assert_allclose(call(step, backend).out, 1e-3, rtol=1e-2)
    step.k[:], step.v[:] = 3e5, 5e5
    np.testing.assert_allclose(call(step, backend).out, 5e5, rtol=1e-2)


def test_one_key_takes_all() -> None:
    """The weight of a key that all others are far below is 1, and theirs nothing."""
    for backend in BACKENDS:
        step = make(Case(((256, 1),), heads=1, kv_heads=1, rotate=False), "int8")
        step.q[:], step.k[:] = 30.0, 30.0
        got = call(step, backend)
        _, v = stored(got.pool, int(step.queries.tables[0, 2]))
        np.testing.assert_allclose(got.out[0, 0], v[0, 0], rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_bounds_hold(dtype: str) -> None:
    step = make(Case(((256, 1),)), dtype)
    blocks = step.queries.tables[0, :2]
    bounds = np.asarray(key_bounds(jax.tree.map(jnp.asarray, step.pool), blocks))
    assert bounds.shape == (2, 2, 2, 4, 2, 16)
    for i, block in enumerate(blocks):
        keys = stored(step.pool, block)[0].reshape(4, 32, 2, 16).astype(np.float32)
        least, greatest = bounds[i, LAYER].transpose(2, 1, 0, 3)  # [spans, K, H]
        np.testing.assert_array_equal(least, keys.min(1))
        np.testing.assert_array_equal(greatest, keys.max(1))
        q = np.random.default_rng(i).standard_normal(16)
        at_most = np.maximum(q * least, q * greatest).sum(-1)
        assert ((keys @ q).max(1) <= at_most + 1e-5).all()


def test_impossible_calls_are_refused() -> None:
    step = make(Case(((0, 1),), head_dim=20), "float32")
    with pytest.raises(ValueError, match=r"'cpu'.*heads of 20.*multiples of 8.*'xla' can"):
        call(step, "cpu")
    step = make(Case(((0, 1),)), "float32")
    with pytest.raises(ValueError, match=r"no attention backend 'gpu'; supported: xla, cpu, tpu"):
        call(step, "gpu")
    with pytest.raises(ValueError, match="go together"):
        call(dataclasses.replace(step, queries=step.queries._replace(n_blocks=np.zeros(1, np.int32))), "xla")
    with pytest.raises(ValueError, match="no on-chip memory"):
        attention(
            step.q, step.k, step.v, step.pool, np.int32(0), step.queries,
            angles=None, scale=1.0, window=np.int32(0), backend="cpu", hot=(),
        )  # fmt: skip


def test_native_code_does_not_leave_the_arrays() -> None:
    step = make(Case(((130, 3),)), "float32")
    tables = step.queries.tables.copy()
    tables[0, 0] = 99
    for wrong in (
        {"tables": tables},
        {"positions": np.where(step.queries.positions >= 0, step.queries.positions + 1000, -1)},
        {"n_tokens": np.int32(99)},
        {"counts": step.queries.counts + 90},
        {"slots": step.queries.slots - 1},
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="lies outside of the arrays"):
            call(dataclasses.replace(step, queries=step.queries._replace(**wrong)), "cpu")


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_step_matches_the_oracle(data: st.DataObject) -> None:
    """Ragged mixtures of prompts, verify and decode rows on the native kernels, on every instruction set."""
    per_head = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
    kv_heads = data.draw(st.integers(1, 2))
    case = Case(
        sequences=tuple(
            data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4))
        ),
        heads=per_head * kv_heads,
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([8, 24, 64, 80, 128])),
        window=data.draw(st.sampled_from([0, 0, 1, 5, 100, 128, 129, 200])),
        softcap=data.draw(st.sampled_from([None, None, 2.0, 30.0])),
        norm=data.draw(st.booleans()),
        rotate=data.draw(st.booleans()),
        group=data.draw(st.integers(1, GROUP)),
        seed=data.draw(st.integers(0, 1000)),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    step = make(case, dtype)
    want = Want(lse=True, block_mass=True)
    results = [call_native(step, want, name, data.draw(st.integers(1, 4))) for name in native.isas()]
    for other in results[1:]:
        jax.tree.map(assert_same_bits, results[0], other)
    expected, n = oracle(step, results[0].pool), int(step.queries.n_tokens)
    tolerance = TOLERANCE["cpu", dtype]
    np.testing.assert_allclose(results[0].out, expected.out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(results[0].lse[:n], expected.lse[:n], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(results[0].block_mass.sum(1)[:n], 1.0, atol=1e-5)


def call_native(step: Step, want: Want, isa: str, threads: int) -> AttentionResult:
    native.set_isa(isa)
    native.set_threads(threads)
    try:
        return call(step, "cpu", want)
    finally:
        native.set_isa(None)
        native.set_threads(None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_change_no_bit(dtype: str) -> None:
    """A long sequence is cut into parts for several threads; a prompt's groups are shared out."""
    step = make(Case(((2000, 1), (1000, 3), (0, 100)), heads=9, kv_heads=3, head_dim=64, window=1900), dtype)
    want = Want(lse=True, block_mass=True)
    first = call_native(step, want, native.isas()[-1], 1)
    for isa in native.isas():
        for threads in (1, 2, 3, 4):
            jax.tree.map(assert_same_bits, first, call_native(step, want, isa, threads))


def test_the_pool_is_updated_in_place_in_a_loop() -> None:
    """Layer after layer in a `fori_loop`: no part of the pool is copied."""
    step = make(Case(((5, 1),)), "int8")

    def run(pool: KVPool) -> tuple[KVPool, jax.Array]:
        def layer(i: jax.Array, carry: tuple[KVPool, jax.Array]) -> tuple[KVPool, jax.Array]:
            pool, q = carry
            result = attention(
                q, step.k, step.v, pool, i, step.queries,
                angles=step.angles, scale=SCALE, window=jnp.int32(0), backend="cpu",
            )  # fmt: skip
            return result.pool, result.out

        return jax.lax.fori_loop(0, 2, layer, (pool, jnp.asarray(step.q)))

    compiled = jax.jit(run, donate_argnums=0).lower(step.pool).compile()
    shape = "s8[" + ",".join(map(str, step.pool.values.shape)) + "]"
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and shape in line]
    assert copies == []
