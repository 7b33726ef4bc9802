"""The contract of attention, against a float64 oracle on the whole context."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from umbra.configs.engine import BLOCK
from umbra.kernels.attention import Queries, attend, write_kv
from umbra.kernels.attention.reference import GROUP


@dataclasses.dataclass
class Case:
    """Sequences as (first position of their queries, number of queries); their context is everything up to there."""

    sequences: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    softcap: float | None = None
    group: int = GROUP
    layers: int = 2


def make(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, Queries, list[tuple[np.ndarray, np.ndarray]]]:
    """Queries, a pool whose unused rest is NaN, and the keys and values of every sequence."""
    rng = np.random.default_rng(seed)
    K, H = case.kv_heads, case.head_dim
    width = max(-(-(first + n) // BLOCK) for first, n in case.sequences) + 1
    tables = rng.permutation(len(case.sequences) * width).reshape(-1, width).astype(np.int32) + 1
    pool = np.full((tables.size + 1, case.layers, 2, K, BLOCK, H), np.nan, np.float32)
    slots, positions, starts, counts, kv = [], [], [], [], []
    for s, (first, n) in enumerate(case.sequences):
        k, v = rng.standard_normal((2, first + n, K, H), dtype=np.float32)
        kv.append((k, v))
        for p in range(first + n):
            pool[tables[s, p // BLOCK], 1, :, :, p % BLOCK] = np.stack([k[p], v[p]])
        for at in range(0, n, case.group):
            starts.append(len(slots) + at)
            counts.append(min(case.group, n - at))
        slots += [s] * n
        positions += range(first, first + n)
    T, G = len(slots) + 3, len(starts) + 2  # some padding
    queries = Queries(
        slots=jnp.asarray(np.pad(slots, (0, T - len(slots))), jnp.int32),
        positions=jnp.asarray(np.pad(positions, (0, T - len(positions)), constant_values=-1), jnp.int32),
        n_tokens=jnp.int32(len(slots)),
        starts=jnp.asarray(np.pad(starts, (0, G - len(starts))), jnp.int32),
        counts=jnp.asarray(np.pad(counts, (0, G - len(counts))), jnp.int32),
        n_groups=jnp.int32(len(starts)),
        tables=jnp.asarray(tables),
    )
    q = rng.standard_normal((T, case.heads, H), dtype=np.float32)
    return jnp.asarray(q), jnp.asarray(pool), queries, kv


def oracle(case: Case, q: np.ndarray, queries: Queries, kv: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    out = np.zeros(q.shape)
    for t in range(int(queries.n_tokens)):
        p, (k, v) = int(queries.positions[t]), kv[int(queries.slots[t])]
        low = max(0, p - case.window + 1) if case.window else 0
        for head in range(case.heads):
            shared = head // (case.heads // case.kv_heads)
            logits = k[low : p + 1, shared].astype(np.float64) @ q[t, head] * 0.25
            if case.softcap:
                logits = case.softcap * np.tanh(logits / case.softcap)
            weights = np.exp(logits - logits.max())
            out[t, head] = weights @ v[low : p + 1, shared] / weights.sum()
    return out


def run(case: Case, q: jax.Array, pool: jax.Array, queries: Queries) -> np.ndarray:
    @jax.jit
    def call(q: jax.Array, pool: jax.Array, queries: Queries, layer: jax.Array, window: jax.Array) -> jax.Array:
        return attend(q, pool, layer, queries, scale=0.25, window=window, softcap=case.softcap)

    return np.asarray(call(q, pool, queries, jnp.int32(1), jnp.int32(case.window)))


EDGES = [(0, 1), (127, 1), (128, 1), (120, 17), (0, 130), (255, 2), (300, 9)]
CASES = [
    Case(EDGES),
    Case(EDGES, window=48),
    Case(EDGES, window=128),
    Case(EDGES, window=1),
    Case(EDGES, softcap=5.0),
    Case(EDGES, heads=4, kv_heads=4),
    Case(EDGES, heads=8, kv_heads=1, head_dim=64),
    Case([(511, 1)], head_dim=128),
    Case([(40, 3)], head_dim=256),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case) -> None:
    q, pool, queries, kv = make(case)
    got = run(case, q, pool, queries)
    n = int(queries.n_tokens)
    np.testing.assert_allclose(got[:n], oracle(case, np.asarray(q), queries, kv)[:n], atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(got[:n], run(case, q, pool, queries)[:n])


@pytest.mark.parametrize("window", [0, 48])
def test_bits_do_not_depend_on_groups_neighbours_or_table_width(window: int) -> None:
    case = Case([(120, 40), (7, 5)], window=window)
    q, pool, queries, _ = make(case)
    whole = run(case, q, pool, queries)
    for t in range(45):
        alone = Queries(
            slots=queries.slots[t : t + 1],
            positions=queries.positions[t : t + 1],
            n_tokens=jnp.int32(1),
            starts=jnp.zeros(1, jnp.int32),
            counts=jnp.ones(1, jnp.int32),
            n_groups=jnp.int32(1),
            tables=jnp.pad(queries.tables, ((0, 0), (0, 5))),
        )
        np.testing.assert_array_equal(run(case, q[t : t + 1], pool, alone)[0], whole[t], err_msg=f"token {t}")


def test_extreme_values_stay_finite() -> None:
    case = Case([(200, 10)])
    q, pool, queries, _ = make(case)
    for factor in (1e4, 1e-30):
        assert np.isfinite(run(case, q * factor, pool, queries)[:10]).all()


def test_write_kv_changes_exactly_the_positions() -> None:
    case = Case([(120, 17), (3, 1)])
    _, pool, queries, _ = make(case)
    k, v = np.random.default_rng(1).standard_normal((2, len(queries.slots), 2, 16), dtype=np.float32)
    written = np.asarray(jax.jit(lambda p: write_kv(p, jnp.int32(1), k, v, queries))(pool))
    expected = np.array(pool)
    for t in range(int(queries.n_tokens)):
        p = int(queries.positions[t])
        block = int(queries.tables[int(queries.slots[t]), p // BLOCK])
        expected[block, 1, :, :, p % BLOCK] = np.stack([k[t], v[t]])
    np.testing.assert_array_equal(written[1:], expected[1:])  # block 0 takes padding
