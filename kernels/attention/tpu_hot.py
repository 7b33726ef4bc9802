"""The hot window: blocks that are read in every pass of a device loop, staged in on-chip memory once for all passes.

No array stays on a TPU's chip between programs, but one that a kernel writes to VMEM before a loop, and that only
kernels read in it, stays there as part of the loop's carry. So `decode_n` stages the first block and the most recent
full blocks of its sequences, and attention reads them from there, N times for one read of HBM. Whether the compiler
keeps to it is a question for the compiled program: `l1_mode` answers it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...configs.engine import BLOCK
from .pool import KVFormat, KVPool
from .tpu_sizes import Chip, hold, placed

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "umbra_stage"

WINDOW_SHARE = 3 / 8
"""Part of a chip's VMEM for the window. On chips of 128 MiB, 64 MiB stay resident and 96 MiB do not."""


class Hot(NamedTuple):
    """Staged blocks."""

    contents: KVPool  # [W, L, K, P, 2H] and, for int8, [W, L, K, 2, P], in VMEM; places nobody uses hold anything
    places: jax.Array  # int32 [B, M]: where each entry of a block table is staged, -1: nowhere


def capacity(form: KVFormat, n_layers: int, n_kv_heads: int, head_dim: int, on: Chip, taken: int = 0) -> int:
    """Blocks (of all layers, this device's heads) that the window holds beside `taken` bytes that stay on the chip too;
    0: not even one fits."""
    room = max(0, int(on.vmem_bytes * WINDOW_SHARE) - taken)
    return room // (BLOCK * form.bytes_per_token(n_layers, n_kv_heads, head_dim))


def stage(pool: KVPool, tables: jax.Array, lengths: jax.Array, blocks: int) -> Hot:
    """Copy up to `blocks` blocks of the sequences in `tables` `[B, M]` to VMEM.

    `lengths` int32 `[B]` are the tokens each sequence has in the pool; only blocks that are full, and so never written
    again, are staged. Sequences share the window evenly: each gets its first block and its most recent ones.
    """
    if blocks < 1:
        raise ValueError(f"a window needs at least one block, got {blocks}")
    places, sources = _chosen(tables, lengths // BLOCK, blocks)
    held = [hold(x, pltpu.HBM) for x in pool if x is not None]
    shapes = [(blocks, *x.shape[1:]) for x in held]
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    moved = [blocks * x.size // len(x) * x.dtype.itemsize for x in held]
    contents = pl.pallas_call(
        _copy_blocks,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(), in_specs=[in_hbm] * len(held), out_specs=[in_vmem] * len(held),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=[placed(shape, x.dtype, pltpu.VMEM) for shape, x in zip(shapes, held, strict=True)],
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=sum(moved)),
        metadata={  # for scripts/tpu/traffic.py: the sources cost nothing; on the chip nothing is written to HBM
            "reads": ",".join(map(str, [0, *moved])),
            "writes": ",".join(map(str, moved)),
        },
        name=NAME,
    )(sources, *held)  # fmt: skip
    return Hot(KVPool(*contents), places)


def _chosen(tables: jax.Array, full: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """Where each table entry is staged `[B, M]`, and the block for each place `[W]`; -1: none. `full` `[B]` are the
    full blocks of each sequence."""
    B, M = tables.shape
    running = full > 0
    share = blocks // jnp.maximum(running.sum(dtype=jnp.int32), 1)  # places of one sequence
    rank = jnp.cumsum(running, dtype=jnp.int32) - 1
    entry = jnp.arange(M, dtype=jnp.int32)[None]
    keeps_first = (share > 1) & (entry == 0)
    skipped = jnp.maximum(full - share, 0)[:, None]  # blocks between the first and the recent ones
    recent = (entry < full[:, None]) & (entry - skipped >= jnp.where(share > 1, 1, 0))
    inside = running[:, None] & (share > 0) & (keeps_first | recent)
    places = jnp.where(inside, rank[:, None] * share + jnp.where(keeps_first, 0, entry - skipped), -1)
    at = jnp.arange(blocks, dtype=jnp.int32)[:, None, None]
    sources = jnp.where(places == at, tables + 1, 0).sum((1, 2), dtype=jnp.int32) - 1
    return places, sources


def staged(full: int, share: int) -> set[int]:
    """Which blocks of a sequence of `full` full ones are staged if `share` places are its own."""
    if full <= share:
        return set(range(full))
    return {0, *range(full - share + 1, full)} if share > 1 else set(range(full - share, full))


def _copy_blocks(sources: Any, *refs: Any) -> None:
    pools, (*outs, sem) = refs[: len(refs) // 2], refs[len(refs) // 2 :]

    def each(act: str) -> None:
        def body(w: jax.Array, carry: jax.Array) -> jax.Array:
            @pl.when(sources[w] >= 0)
            def _() -> None:
                for pool, out in zip(pools, outs, strict=True):
                    getattr(pltpu.make_async_copy(pool.at[sources[w]], out.at[w], sem), act)()

            return carry

        lax.fori_loop(0, len(sources), body, 0)

    each("start")
    each("wait")


def l1_mode(platform: str, compiled_text: str, hot: Sequence[Any]) -> str:
    """Where a compiled program reads its most recent KV from: "vmem_resident", "hbm", or on a CPU "cpu_pool".

    `hot` are the arrays of `Hot.contents` (abstract ones do). It is resident when a loop carries each of them, every
    loop that does keeps it in VMEM, which XLA writes as memory space S(1), and nothing copies it: short of room XLA
    moves a window out to HBM and back in every pass.
    """
    if platform != "tpu":
        return "cpu_pool"
    names = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
    lines = compiled_text.splitlines()
    loops = [line for line in lines if re.search(r"=.*\bwhile\(", line)]
    moves = [line for line in lines if re.search(r"=.*\b(copy|slice)(-start)?\(", line)]
    for array in hot:
        shape = re.escape(f"{names[str(array.dtype)]}[{','.join(map(str, array.shape))}]")
        carried = [layout for line in loops for layout in re.findall(shape + r"(\{[^}]*\})", line.split(" while(")[0])]
        if not carried or not all("S(1)" in layout for layout in carried):
            return "hbm"
        if any(re.search(shape, line) for line in moves):
            return "hbm"
    return "vmem_resident" if hot else "hbm"
