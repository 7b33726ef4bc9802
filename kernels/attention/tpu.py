"""Attention on a TPU: one Pallas kernel a layer (`tpu_kernel`), prepared and finished in plain JAX that XLA fuses.

The kernel takes the whole pool and a layer index and updates the pool in place; what it reads of it is what attention
needs. See `api` for the contract. Differences that the hardware makes: products of bfloat16 and int8 pools multiply
bfloat16 numbers (queries and softmax weights are rounded to it) and add up in float32, and exp and tanh are the
chip's own; bits are equal within one shape of a step, not between shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...configs.engine import BLOCK
from . import reference, tpu_hot, tpu_sizes
from .pool import KVPool
from .tpu_kernel import FAR, NEVER, Kernel
from .tpu_sizes import LANES, Sizes

if TYPE_CHECKING:
    from .api import AttentionResult, Norm, Queries, Want
    from .tpu_hot import Hot

NAME = "umbra_attention"
"""Name of the kernel in a compiled program."""


def unsupported(n_heads: int, n_kv_heads: int, head_dim: int, dtype: str) -> str | None:
    if head_dim % 8:
        return f"heads of {head_dim} are not a multiple of 8"
    return None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    layer: jax.Array,
    queries: Queries,
    *,
    angles: jax.Array | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    scale: float,
    window: jax.Array,
    softcap: float | None,
    want: Want,
    hot: Hot | None = None,
    work: Plan | None = None,
) -> AttentionResult:
    """See `api.attention`. The tokens of a sequence must be one run of consecutive tokens and positions.

    Blocks that `hot` (`tpu_hot.stage`) holds are read from there. `work` is `plan` of the same arguments.
    """
    from .api import AttentionResult

    if work is None:
        work = plan(queries, pool, q.shape[1], want=want, hot=hot)
    elif (work.sizes, len(work.tables)) != _sizes(queries, pool, q.shape[1], want, hot):
        raise ValueError("attention was handed a plan that was made for other queries, results or staged blocks")
    sizes, H = work.sizes, q.shape[2]
    q = reference.prepared(q, layer, angles, q_norm, sizes.quantised) * scale
    k = reference.prepared(k, layer, angles, k_norm, sizes.quantised)
    fresh, fresh_scales = _fresh(k, v.astype(jnp.float32), sizes)
    if sizes.joint:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, H)))  # the value's half of a row of the pool
    reach = jnp.where(window > 0, window - 1, FAR)
    info = jnp.concatenate([jnp.stack([layer, reach]).astype(jnp.int32), work.tiling.bounds])
    scalars = [info, work.tiling.tiles, *work.tables]
    vectors = [q, fresh, *([] if fresh_scales is None else [fresh_scales])]
    if hot is not None:
        vectors += [tpu_sizes.hold(x, pltpu.VMEM) for x in hot.contents if x is not None]
    results = _call(sizes, tpu_sizes.chip(), softcap, queries.blocks_at is not None, hot, pool, scalars, vectors)
    out, values, *rest = results
    known = work.tiling.known[:, None]
    out = jnp.where(known[..., None], out[..., sizes.lanes - H :], 0.0)
    new_pool = KVPool(values, rest.pop(0) if sizes.quantised else None)
    if not sizes.lse:
        return AttentionResult(out, new_pool)
    lse = jnp.where(known, rest[0][..., 0], -jnp.inf)
    mass = _mass(rest[1], lse, sizes.width) if want.block_mass else None
    return AttentionResult(out, new_pool, lse if want.lse else None, mass)


def _call(
    sizes: Sizes, on: tpu_sizes.Chip, softcap: float | None, sparse: bool, hot: Hot | None, pool: KVPool,
    scalars: list[jax.Array], vectors: list[jax.Array],
) -> Sequence[jax.Array]:  # fmt: skip
    """The kernel call: `out` `[T, N, lanes]`, the pool's arrays, and if wanted lse `[T, N, 128]` and the log-sum-exp
    of entries `[T, M / 128, N, 128]`."""
    s, T = sizes, sizes.tokens
    # The pool is held to HBM: XLA would copy one that is small enough to VMEM and back for every call.
    held = [tpu_sizes.hold(x, pltpu.HBM) for x in pool if x is not None]
    out_shape = [jax.ShapeDtypeStruct((T, s.n_heads, s.lanes), jnp.float32)]
    out_shape += [tpu_sizes.placed(x.shape, x.dtype, pltpu.HBM) for x in held]
    if s.lse:
        out_shape.append(jax.ShapeDtypeStruct((T, s.n_heads, LANES), jnp.float32))
    if s.block_mass:
        out_shape.append(jax.ShapeDtypeStruct((T, s.mass_chunks, s.n_heads, LANES), jnp.float32))
    anywhere, on_chip, in_hbm = (pl.BlockSpec(memory_space=m) for m in (pl.ANY, pltpu.VMEM, pltpu.HBM))
    first_held = len(scalars) + len(vectors)
    limit = s.vmem_bytes() + 4 * tpu_sizes.MIB

    def kernel(*refs: Any) -> None:
        Kernel(sizes, sparse, hot is not None, softcap, refs).run()

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(on.cores,),
            in_specs=[anywhere, *[on_chip] * (len(vectors) - 1), *[in_hbm] * len(held)],
            out_specs=[anywhere, *[in_hbm] * len(held), *[anywhere] * (len(out_shape) - 1 - len(held))],
            scratch_shapes=_scratch(s),
        ),
        out_shape=out_shape,
        input_output_aliases={first_held + i: 1 + i for i in range(len(held))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=limit),
        cost_estimate=_cost(s, scalars + vectors[: 2 + s.quantised], out_shape[:1] + out_shape[1 + len(held) :]),
        name=NAME,
    )(*scalars, *vectors, *held)


def _scratch(s: Sizes) -> list[Any]:
    """In the order in which `Kernel` takes them."""
    K, R = s.n_kv_heads, s.rows(s.tile)
    shapes: list[Any] = [pltpu.VMEM((s.depth, K, BLOCK, 2 * s.head_dim), jnp.dtype(s.dtype))]
    if s.quantised:
        shapes.append(pltpu.VMEM((s.depth, K, 2, BLOCK), jnp.float32))
    shapes += [pltpu.VMEM((2, s.tile, s.n_heads, s.lanes), jnp.float32)] * 2
    shapes.append(pltpu.VMEM((K, R, s.lanes), jnp.float32))
    shapes += [pltpu.VMEM((K, R, LANES), jnp.float32)] * 2
    shapes.append(pltpu.VMEM((K, R, s.lanes), jnp.float32))
    if s.lse:
        shapes.append(pltpu.VMEM((2, s.tile, s.n_heads, LANES), jnp.float32))
    if s.block_mass:
        shapes.append(pltpu.VMEM((s.mass_chunks, K, R, LANES), jnp.float32))
        shapes.append(pltpu.VMEM((s.tile, s.n_heads, LANES), jnp.float32))
    return [
        *shapes, pltpu.SMEM((8,), jnp.int32), pltpu.SMEM((s.depth,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, s.depth)), pltpu.SemaphoreType.DMA((2, s.depth)),
        pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((3, 2)),
    ]  # fmt: skip


def _cost(s: Sizes, operands: Sequence[Any], results: Sequence[Any]) -> pl.CostEstimate:
    """What can be said without the lengths: activations are moved once; the pool's traffic is `pool_bytes`. Operations
    are those of half-full tables."""
    pairs = s.tokens * max(1, s.width // 2) * BLOCK * s.n_heads
    return pl.CostEstimate(
        flops=4 * pairs * s.head_dim, transcendentals=pairs, bytes_accessed=_bytes(operands) + _bytes(results)
    )


def _bytes(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


# ---- the step's keys and values


def _fresh(k: jax.Array, v: jax.Array, s: Sizes) -> tuple[jax.Array, jax.Array | None]:
    """Keys and values as they are stored, as numbers in float32 `[K, tokens, 2H]` with one slab of padding in front,
    and the scales of an int8 pool `[chunks, K, 2, 128]`, tokens across lanes, with one chunk of padding in front."""
    T = len(k)
    if not s.quantised:
        return _padded_tokens(jnp.concatenate([k, v], axis=-1), s), None
    values, scales = reference.quantised(jnp.stack([k, v], axis=2))  # [T, K, 2, H], [T, K, 2]
    rows = _padded_tokens(values.astype(jnp.float32).reshape(T, k.shape[1], -1), s)
    behind = s.fresh_chunks * LANES - LANES - T
    lanes = jnp.pad(scales.transpose(1, 2, 0), ((0, 0), (0, 0), (LANES, behind)))
    return rows, lanes.reshape(*lanes.shape[:2], s.fresh_chunks, LANES).transpose(2, 0, 1, 3)


def _padded_tokens(x: jax.Array, s: Sizes) -> jax.Array:
    return jnp.pad(x.transpose(1, 0, 2), ((0, 0), (s.slab, s.fresh_tokens - s.slab - len(x)), (0, 0)))


def _mass(entries: jax.Array, lse: jax.Array, width: int) -> jax.Array:
    """Softmax mass per table entry `[T, M]`, from the log-sum-exp of entries `[T, chunks, N, 128]` and of all."""
    T, chunks, N, _ = entries.shape
    own = entries.transpose(0, 2, 1, 3).reshape(T, N, chunks * LANES)[..., :width]
    seen = jnp.isfinite(lse)[..., None] & (own > NEVER)
    return jnp.where(seen, jnp.exp(own - jnp.where(seen, lse[..., None], 0.0)), 0.0).mean(1)


# ---- the plan of a step


class Tiling(NamedTuple):
    """How a step's tokens are cut into tiles."""

    tiles: jax.Array  # int32 [(tiles + 1) * TILE_FIELDS], the last one empty
    bounds: jax.Array  # int32 [cores + 1]: tiles of each core
    known: jax.Array  # bool [T]: tokens that are not padding


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the calls of a pass have in common. XLA leaves it in the loop over the layers if it is made there."""

    sizes: Sizes
    tiling: Tiling
    tables: tuple[jax.Array, ...]
    """int32 `[B * M]` each: the tables, if given their `blocks_at`, and with staged blocks their places."""


def plan(queries: Queries, pool: KVPool, n_heads: int, *, want: Want, hot: Hot | None) -> Plan:
    """See `api.plan`."""
    sizes, _ = _sizes(queries, pool, n_heads, want, hot)
    tables = [queries.tables, queries.blocks_at, None if hot is None else hot.places]
    flat = tuple(table.reshape(-1) for table in tables if table is not None)
    return Plan(sizes, tiles(queries, sizes, tpu_sizes.chip().cores), flat)


def _sizes(queries: Queries, pool: KVPool, n_heads: int, want: Want, hot: Hot | None) -> tuple[Sizes, int]:
    """The kernel's sizes, and how many tables it takes."""
    _, _, K, _, lanes = pool.values.shape
    B, M = queries.tables.shape
    tables = 1 + (queries.blocks_at is not None) + (hot is not None)
    sizes = tpu_sizes.choose(
        n_heads, K, lanes // 2, str(pool.values.dtype),
        tokens=len(queries.slots), rows=B, width=M, lse=want.lse or want.block_mass, block_mass=want.block_mass,
        tables=tables, on=tpu_sizes.chip(),
    )  # fmt: skip
    return sizes, tables


def tiles(queries: Queries, sizes: Sizes, cores: int) -> Tiling:
    """Cuts runs into tiles."""
    T, (B, M) = len(queries.slots), queries.tables.shape
    at = jnp.arange(T, dtype=jnp.int32)
    known = (at < queries.n_tokens) & (queries.positions >= 0)
    goes_on = known[1:] & known[:-1] & (queries.slots[1:] == queries.slots[:-1])
    goes_on &= queries.positions[1:] == queries.positions[:-1] + 1
    no = jnp.zeros(1, jnp.bool_)
    starts, ends = known & ~jnp.concatenate([no, goes_on]), known & ~jnp.concatenate([goes_on, no])
    first = lax.cummax(jnp.where(starts, at, -1))  # token its run starts with
    last = lax.cummin(jnp.where(ends, at, T), reverse=True)
    opens = known & ((at - first) % sizes.tile == 0)  # tokens a tile starts with
    n_tiles = min(T, T // sizes.tile + B) + 1  # and an empty one
    order = jnp.cumsum(opens, dtype=jnp.int32) - 1
    chosen = opens & (order == jnp.arange(n_tiles, dtype=jnp.int32)[:, None])  # [tiles, T]

    def of_tile(x: jax.Array) -> jax.Array:
        return jnp.where(chosen, x, 0).sum(1, dtype=jnp.int32)

    token, run_first, run_last = of_tile(at), of_tile(first), of_tile(last)
    position, slot = of_tile(queries.positions), of_tile(queries.slots)
    count = jnp.minimum(run_last - token + 1, sizes.tile)
    shift = token - position  # of the whole run
    end = reference.entries(queries, slot, (position + count - 1) // BLOCK + 1)
    fields = [token, count, slot * M, position, run_first - shift, shift, run_last - shift, end]
    total = opens.sum(dtype=jnp.int32)
    used = jnp.arange(n_tiles) < total
    listed = jnp.where(used[:, None], jnp.stack(fields, axis=1), 0).reshape(-1)
    if cores == 1:
        return Tiling(listed, jnp.stack([jnp.int32(0), total]), known)
    # Whole runs to each core, about the same number of blocks.
    blocks = jnp.cumsum(jnp.where(used, end, 0))
    opens_run = used & (token == run_first)
    share = blocks[-1] * jnp.arange(1, cores, dtype=jnp.int32) // cores
    before = (opens_run & (blocks[None] <= share[:, None])) * jnp.arange(n_tiles, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), before.max(1).astype(jnp.int32), total[None]])
    return Tiling(listed, bounds, known)


# ---- what a call moves


def pool_bytes(
    n_kv_heads: int, head_dim: int, dtype: str, lengths: Sequence[int], new_tokens: Sequence[int], *,
    n_heads: int, tokens: int, rows: int, width: int, window: int = 0, staged: int = 0,
    on: tpu_sizes.Chip = tpu_sizes.UNKNOWN,
) -> float:  # fmt: skip
    """Bytes of the pool that one call moves to and from HBM: whole blocks, as often as tiles visit them, and the slabs
    written.

    Sequences have `lengths` tokens after the write, `new_tokens` of which are of this step; the step's arrays hold
    `tokens` tokens in `rows` rows of `width` blocks. `staged` blocks of each sequence are on the chip (`tpu_hot`).
    """
    s = tpu_sizes.choose(n_heads, n_kv_heads, head_dim, dtype, tokens=tokens, rows=rows, width=width, on=on)
    slab_bytes = s.slab * n_kv_heads * 2 * head_dim * s.itemsize
    scale_bytes = n_kv_heads * 2 * BLOCK * 4 if s.quantised else 0
    moved = 0
    for length, new in zip(lengths, new_tokens, strict=True):
        if not new:
            continue
        run = length - new
        on_chip = tpu_hot.staged(run // BLOCK, staged)
        for position in range(run, length, s.tile):
            last = min(position + s.tile, length) - 1
            oldest = max(position - window + 1, 0) if window else 0
            if last == length - 1:
                oldest = min(oldest, run)
            visited = range(oldest // BLOCK, last // BLOCK + 1)
            moved += sum(block not in on_chip for block in visited) * s.block_bytes
        moved += ((length - 1) // s.slab - run // s.slab + 1) * slab_bytes
        moved += ((length - 1) // BLOCK - run // BLOCK + 1) * scale_bytes
    return float(moved)
