"""Block sizes of the TPU attention kernel, and what the chips it is compiled for can hold.

Letters: H head size, K key/value heads, N query heads, P block length (128).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...configs.engine import BLOCK

MIB = 2**20
LANES = 128
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the kernel needs to know of a chip (jax/_src/pallas/mosaic/tpu_info.py, JAX 0.10.2; per core)."""

    vmem_bytes: int
    smem_bytes: int
    cores: int
    """Tensor cores that share one device (v5p: a kernel runs on both if its grid is parallel)."""
    in_flight_bytes: int
    """KV bytes to keep under way, per core: two microseconds at the chip's memory bandwidth."""


CHIPS = {
    "v5e": Chip(128 * MIB, MIB, 1, 2 * MIB),
    "v5p": Chip(64 * MIB, MIB, 2, 3 * MIB),
    "v6e": Chip(128 * MIB, MIB, 1, 4 * MIB),
}
UNKNOWN = Chip(16 * MIB, MIB, 1, 2 * MIB)
"""Any other TPU, and interpret mode: what every generation since v4 has."""

VMEM_SHARE = 0.5
"""Part of a chip's VMEM the kernel may take; XLA keeps other arrays there."""

SMEM_SHARE = 0.9
"""Part of its SMEM for the scalars; the compiler spills some of its own there."""


def chip() -> Chip:
    """The chip that is being compiled for; `UNKNOWN` where there is none."""
    name = _tpu()
    return UNKNOWN if name is None else CHIPS.get(name, UNKNOWN)


def chip_of(mesh: jax.sharding.Mesh) -> Chip:
    """The chip that programs for `mesh` are compiled for."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return chip()


def placed(shape: tuple[int, ...], dtype: Any, space: Any) -> Any:
    """The abstract result of a kernel, in the memory `space` (pltpu.HBM or pltpu.VMEM). XLA would choose one itself.
    Interpret mode knows no memories outside kernels."""
    return jax.ShapeDtypeStruct(shape, dtype) if _tpu() is None else space(shape, dtype)


def hold(x: jax.Array, space: Any) -> jax.Array:
    """An operand of a kernel, held to a memory space."""
    return x if _tpu() is None else pltpu.with_memory_space_constraint(x, space)


def _tpu() -> str | None:
    try:
        return str(pltpu.get_tpu_info().chip_version)
    except (ValueError, NotImplementedError):  # not a TPU
        return None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one kernel."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    """Type of the pool."""
    heights: tuple[int, ...]
    """Tokens of a tile, ascending: a tile is worked on at the least height that holds it."""
    depth: int
    """Blocks that the ring holds, a power of two."""
    spans: int
    """Blocks worked on side by side in a tile of the least height."""
    heads: int
    """Key/value heads worked on side by side."""
    tokens: int
    width: int
    """Entries of a block table."""
    lse: bool = False
    block_mass: bool = False

    @property
    def tile(self) -> int:
        return self.heights[-1]

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def joint(self) -> bool:
        """Whether a key and its value share vector lanes: then both products run over whole rows of the pool, the
        query padded with zeros, and the upper part of the result is the output. It costs nothing up to 128 lanes."""
        return self.head_dim % LANES != 0

    @property
    def lanes(self) -> int:
        """Last axis of queries and outputs in the kernel."""
        return 2 * self.head_dim if self.joint else self.head_dim

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def quantised(self) -> bool:
        return self.dtype == "int8"

    @property
    def slab(self) -> int:
        """Tokens of the least piece of a block that can be written: a tile of the memory layout."""
        return SUBLANES * (4 // self.itemsize)

    @property
    def mass_chunks(self) -> int:
        return -(-self.width // LANES)

    def rows(self, height: int) -> int:
        """Query rows of one key/value head, whole sublanes."""
        return _up(height * self.group, SUBLANES)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, scales included."""
        scales = 2 * BLOCK * 4 if self.quantised else 0
        return self.n_kv_heads * (BLOCK * 2 * self.head_dim * self.itemsize + scales)

    @property
    def fresh_tokens(self) -> int:
        """Rows of the step's keys and values as the kernel takes them: padded so that every window of a slab, from
        any token, lies inside."""
        return _up(self.tokens, self.slab) + 3 * self.slab

    @property
    def fresh_chunks(self) -> int:
        return -(-self.tokens // LANES) + 2

    def vmem_bytes(self) -> int:
        """VMEM the kernel's buffers take, padded to whole tiles."""
        K, R, lanes = self.n_kv_heads, self.rows(self.tile), _up(self.lanes, LANES)
        kv_lanes = _up(2 * self.head_dim, LANES)
        ring = self.depth * K * BLOCK * kv_lanes * self.itemsize
        fresh = K * self.fresh_tokens * kv_lanes * 4
        if self.quantised:
            ring += self.depth * K * SUBLANES * LANES * 4
            fresh += self.fresh_chunks * K * SUBLANES * LANES * 4
        tokens = 2 * self.tile * _up(self.n_heads, SUBLANES) * lanes * 4
        state = K * R * (2 * LANES + 2 * lanes) * 4
        extra = 2 * self.tile * _up(self.n_heads, SUBLANES) * LANES * 4 if self.lse else 0
        if self.block_mass:
            extra += (self.mass_chunks * K * R + self.tile * _up(self.n_heads, SUBLANES)) * LANES * 4
        return ring + fresh + 2 * tokens + state + extra

    def smem_bytes(self, rows: int, tables: int) -> int:
        """SMEM of the scalars: `tables` tables of `rows` rows, and the tiles."""
        return 4 * (tables * _up(rows * self.width, 1024) + 8 * (self.tokens + 1) + 2048)


def choose(
    n_heads: int, n_kv_heads: int, head_dim: int, dtype: str, *,
    tokens: int, rows: int, width: int, lse: bool = False, block_mass: bool = False, tables: int = 1, on: Chip,
) -> Sizes:  # fmt: skip
    """The sizes for a step of `tokens` tokens in `rows` table rows of `width` blocks: those of the table, made smaller
    until they fit the chip. A `ValueError` when nothing does. `tables` counts the arrays of that shape that the kernel
    takes."""
    group = n_heads // n_kv_heads
    per_row = -(-tokens // rows)
    heights = (per_row,) if per_row <= SUBLANES else (SUBLANES, _prefill_height(group))
    heads = max(h for h in range(1, min(n_kv_heads, 8) + 1) if n_kv_heads % h == 0)
    spans = max(1, min(4, 16 // heads))
    sizes = Sizes(
        n_heads, n_kv_heads, head_dim, dtype, heights=tuple(dict.fromkeys(heights)), depth=2, spans=spans, heads=heads,
        tokens=tokens, width=width, lse=lse, block_mass=block_mass,
    )  # fmt: skip
    depth = spans + max(spans, min(24, math.ceil(on.in_flight_bytes / sizes.block_bytes)))
    sizes = dataclasses.replace(sizes, depth=1 << (depth - 1).bit_length())
    if sizes.smem_bytes(rows, tables) > on.smem_bytes * SMEM_SHARE:
        raise ValueError(f"block tables of {rows} rows and {width} blocks do not fit the {on.smem_bytes} bytes of SMEM")
    budget = int(on.vmem_bytes * VMEM_SHARE)
    while sizes.vmem_bytes() > budget:
        smaller = _smaller(sizes)
        if smaller is None:
            raise ValueError(
                f"attention of {tokens} tokens, {n_heads} heads over {n_kv_heads} of size {head_dim} needs at least "
                f"{sizes.vmem_bytes() / MIB:.1f} MiB of on-chip memory; {budget / MIB:.0f} MiB may be used"
            )
        sizes = smaller
    return sizes


def _prefill_height(group: int) -> int:
    """Tokens of a prefill tile: about 128 rows a head, enough to be bound by arithmetic; whole tiles of eight."""
    return max(SUBLANES, min(LANES, LANES // group // SUBLANES * SUBLANES))


def _smaller(sizes: Sizes) -> Sizes | None:
    """The next smaller sizes: a shallower ring, then one block at a time, then lower tiles."""
    if sizes.depth > 2 * sizes.spans:
        return dataclasses.replace(sizes, depth=sizes.depth // 2)
    if sizes.spans > 1:
        return dataclasses.replace(sizes, spans=sizes.spans // 2, depth=sizes.spans)
    if len(sizes.heights) > 1:
        return dataclasses.replace(sizes, heights=sizes.heights[:-1])
    height = sizes.heights[0]
    if height > SUBLANES:
        return dataclasses.replace(sizes, heights=(height // 2 // SUBLANES * SUBLANES or SUBLANES,))
    return dataclasses.replace(sizes, heights=(height // 2,)) if height > 1 else None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
