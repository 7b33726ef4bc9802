"""Linear layers on a TPU: products in Pallas kernels that read every byte of a weight once.

Letters: G groups of 32 inputs, L layers, R rows, V vocabulary; `in` and `out` as in api.py.

A kernel walks the output channels of one or several weights in blocks. Weights stay in HBM as whole stacks: the layer
is prefetched as a scalar and picks the blocks, so that no slice is copied; the pipeline of `pallas_call` fetches one
block ahead. The rows of the step are in on-chip memory; the first block's turn puts them through their prologue (gate,
norm) into the type of the products, which accumulate in float32 on the matrix unit.

Stacks of floats are left to XLA: it fuses the slice of the stack into the product, reads it once, and prefetches the
next weights beside other work (`scripts/compile_tpu.py` counts the bytes of both). A single matrix, that is the head,
runs in a kernel in every form, so that `greedy_head` sees the very logits that `linear` gives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import reference
from .weight import GROUP, Quantised

Norm = tuple[jax.Array, float]
Matrix = jax.Array | Quantised

VMEM = {"v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20}
"""Bytes of on-chip vector memory of a core (`jax/_src/pallas/mosaic/tpu_info.py`, JAX 0.10.2)."""

BUDGET = 24 << 20
"""Bytes of it that a kernel may use; XLA keeps activations and prefetched weights in the rest."""

BLOCK_BYTES = 2 << 20
"""Bytes of one block of a weight: 2.6 us at the 820 GB/s of a v5e, many times what a turn of the pipeline costs."""

LEAST_BLOCK_BYTES = 256 << 10
"""A weight of less than eight blocks is cut into smaller ones down to this: nothing overlaps with the first fetch and
the last product."""

CHANNELS = 2048
"""Most output channels of a block; half as many of 4 bits, which take more room as floats."""

BLOCKS: dict[tuple[str, int, int], int] = {}
"""Output channels of a block by (form, in, out), where they shall not be what `_channels` works out."""

LANES = 128
ROWS = 256
"""Most rows that a kernel multiplies at once."""

_CHUNK = 1024
"""Inputs of a 4-bit weight that are turned into floats at once."""

_SUBLANES = 8
_BYTE_SUBLANES = 32
"""Rows of a tile in HBM: eight, but of bytes 32."""

_NEG_INF = np.float32(-np.inf)
_LARGEST = np.float32(np.finfo(np.float32).max)


def unsupported(weight: Any) -> str | None:
    """Why a weight cannot be multiplied with here, in one phrase; None when it can."""
    if isinstance(weight, Quantised) and weight.layout != "tpu":
        return f"its layout is {weight.layout!r}"
    return None


def linear(
    x: jax.Array,
    weights: Sequence[Matrix],
    layer: jax.Array | None,
    *,
    n_rows: jax.Array,
    norm: Norm | None,
    up: jax.Array | None,
    activation: str | None,
    bias: Sequence[jax.Array | None] | None,
    post_norm: Norm | None,
    residual: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """See api.py."""
    rows = Rows(x, up, activation, _norm_at(norm, layer))
    if layer is not None and not any(isinstance(weight, Quantised) for weight in weights):
        ready = rows.ready()
        products = [reference.product(ready, reference.weight_at(weight, layer)) for weight in weights]
    else:
        stacks = [Stack.of(weight, x.shape[-1], layer is not None) for weight in weights]
        fused = residual if post_norm is None and bias is None else None
        products = list(_products(rows, stacks, layer, fused))
        residual = residual if fused is None else None
    after = _norm_at(post_norm, layer)
    for i, y in enumerate(products):
        if bias is not None and (values := bias[i]) is not None:
            y = y + reference.at_layer(values, layer, 1).astype(jnp.float32)
        if after is not None:
            y = rms_norm(y, *after)
        products[i] = y if residual is None else residual + y
    return tuple(products)


def embed(ids: jax.Array, table: Matrix, *, n_rows: jax.Array) -> jax.Array:
    """See api.py. A kernel fetches the tile of rows around each: XLA's own gather first brings a table that is small
    enough whole onto the chip."""
    q, scale = (table.parts["q"], table.parts.get("scale")) if isinstance(table, Quantised) else (table, None)
    slab = _BYTE_SUBLANES if q.dtype.itemsize == 1 else _SUBLANES
    if q.shape[0] % slab or (isinstance(table, Quantised) and table.form != "c8"):
        return reference.embed(ids, table, n_rows=n_rows)
    rows = _table_rows(ids, q, slab)
    return rows if scale is None else rows * scale[ids][:, None]


def greedy_head(
    x: jax.Array, table: Matrix, *, norm: Norm | None, n_rows: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py. Logits exist only as one block of the vocabulary in on-chip memory; maximum, its lowest id and the
    sum of exponentials are carried from block to block."""
    stack = Stack.of(table, x.shape[-1], False)
    parts = [
        _greedy(Rows(x[start : start + ROWS], None, None, norm), stack, softcap) for start in range(0, len(x), ROWS)
    ]
    token, highest, total = (jnp.concatenate(column)[:, 0] for column in zip(*parts, strict=True))
    return token, highest, total


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, float32; in kernels and beside them."""
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)


def _activate(x: jax.Array, kind: str) -> jax.Array:
    if kind == "silu":
        return x / (1.0 + jnp.exp(-x))
    if kind != "gelu_tanh":
        raise ValueError(f"activation {kind!r} is not supported; supported: silu, gelu_tanh")
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def _norm_at(norm: Norm | None, layer: jax.Array | None) -> Norm | None:
    return None if norm is None else (reference.at_layer(norm[0], layer, 1), norm[1])


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a product and what happens to them before it."""

    x: jax.Array  # [R, in]
    up: jax.Array | None
    activation: str | None
    norm: Norm | None

    def prepared(self, x: jax.Array, up: jax.Array | None, weight: jax.Array | None) -> jax.Array:
        """The prologue, on arrays or on values inside a kernel."""
        if self.activation is not None:
            assert up is not None
            x = _activate(x, self.activation) * up
        if self.norm is not None:
            assert weight is not None
            x = rms_norm(x, weight, self.norm[1])
        return x

    def ready(self) -> jax.Array:
        return self.prepared(self.x, self.up, None if self.norm is None else self.norm[0])


@dataclasses.dataclass(frozen=True)
class Stack:
    """One weight as a kernel takes it, with the axis L in front (1 for a single matrix)."""

    form: str  # c8, s4, bfloat16 or float32
    q: jax.Array  # [L, out, in]; s4: [L, in, out]
    scale: jax.Array | None  # c8: [L, out]; s4: [L, G, out]

    @staticmethod
    def of(weight: Matrix, inputs: int, stacked: bool) -> Stack:
        if not isinstance(weight, Quantised):
            layers = weight.shape[0] if stacked else 1
            return Stack(str(weight.dtype), weight.reshape(layers, -1, inputs), None)
        if (why := unsupported(weight)) is not None:
            raise ValueError(f"a weight cannot be multiplied with on a TPU: {why}; load it with the layout 'tpu'")
        parts = weight.parts if stacked else {name: part[None] for name, part in weight.parts.items()}
        scale = parts["scale"]
        return Stack(weight.form, parts["q"], scale)

    @property
    def quantised(self) -> bool:
        return self.scale is not None

    @property
    def inputs(self) -> int:
        return self.q.shape[1] if self.form == "s4" else self.q.shape[2]

    @property
    def out(self) -> int:
        return self.q.shape[2] if self.form == "s4" else self.q.shape[1]

    @property
    def rows_dtype(self) -> Any:
        return jnp.float32 if self.form == "float32" else jnp.bfloat16

    @property
    def weight_bytes(self) -> float:
        """Bytes of one output channel, filled up to whole lanes."""
        return self.inputs / 2 if self.form == "s4" else _up(self.inputs, LANES) * self.q.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that are read for it: per channel those of eight layers, which share a tile."""
        if self.scale is None:
            return 0
        values = self.scale.shape[1] if self.form == "s4" else self.scale_rows
        return values * self.scale.dtype.itemsize

    @property
    def scale_rows(self) -> int:
        """Layers whose scales per channel are read at once."""
        return min(_SUBLANES, self.q.shape[0])

    @property
    def channel_bytes(self) -> float:
        return self.weight_bytes + self.scale_bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """The blocks of one weight on the kernel's walk."""

    form: str
    inputs: int
    out: int
    channels: int  # of a block
    first: int  # block of the walk

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.out, self.channels)

    def block(self, b: jax.Array) -> jax.Array:
        """This weight's block at turn `b`; outside of its turns the nearest one, so that nothing is fetched twice."""
        return jnp.clip(b - self.first, 0, self.blocks - 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a kernel that its operands do not say."""

    parts: tuple[Part, ...]
    rows: int  # R
    row_block: int
    prologue: bool  # in the kernel; else its rows come ready
    dtype: Any  # of the rows that are multiplied
    vmem: int
    """Bytes of on-chip memory it is expected to use at most."""

    @property
    def turns(self) -> int:
        return sum(part.blocks for part in self.parts)

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.row_block)


def plan(stacks: Sequence[Stack], rows: int, row_operands: int, residual: bool) -> Plan:
    """How a product of `rows` rows is walked. The prologue runs in the kernel unless its operands (`row_operands` of
    `[R, in]`) would not fit; `VMEM` and `BUDGET` bound everything together."""
    parts: list[Part] = []
    for stack in stacks:
        first = sum(part.blocks for part in parts)
        parts.append(Part(stack.form, stack.inputs, stack.out, _channels(stack), first))
    inputs = parts[0].inputs
    dtype = stacks[0].rows_dtype
    itemsize = jnp.dtype(dtype).itemsize
    blocks = sum(_block_bytes(stack, part.channels) for stack, part in zip(stacks, parts, strict=True))

    def needed(row_block: int, prologue: bool) -> int:
        padded = _up(row_block, 16)
        widths = sum(_up(part.channels, LANES) for part in parts)
        outputs = padded * widths * 4 * (2 + 2 * residual + 1)
        held = _up(inputs, LANES) * padded * (4 * row_operands + itemsize if prologue else 2 * itemsize)
        return blocks + outputs + held

    row_block = rows if rows <= ROWS else _up(pl.cdiv(rows, pl.cdiv(rows, ROWS)), 16)
    prologue = row_block == rows and needed(rows, True) <= BUDGET
    while not prologue and needed(row_block, False) > BUDGET and row_block > 16:
        row_block = _up(row_block // 2, 16)
    return Plan(tuple(parts), rows, row_block, prologue, dtype, needed(row_block, prologue))


def _channels(stack: Stack) -> int:
    """Output channels of a block: whole lanes, at most `BLOCK_BYTES`, about eight blocks in a small weight; or all."""
    if (fixed := BLOCKS.get((stack.form, stack.inputs, stack.out))) is not None:
        return min(fixed, stack.out)
    whole = stack.out * stack.channel_bytes
    size = min(BLOCK_BYTES, max(LEAST_BLOCK_BYTES, whole / 8))
    most = CHANNELS // 2 if stack.form == "s4" else CHANNELS
    channels = min(most, max(LANES, int(size / stack.channel_bytes) // LANES * LANES))
    if channels >= stack.out:
        return stack.out
    return _up(pl.cdiv(stack.out, pl.cdiv(stack.out, channels)), LANES)


def _block_bytes(stack: Stack, channels: int) -> int:
    """On-chip bytes of a block: two buffers of it, and its values as floats."""
    floats = _up(channels, LANES) * (min(stack.inputs, _CHUNK) * 6 if stack.form == "s4" else stack.inputs * 2)
    return int(2 * _up(channels, LANES) * stack.channel_bytes) + (floats if stack.quantised else 0)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Operand(NamedTuple):
    """An operand or result of a kernel: how it is cut into blocks, and what its blocks amount to."""

    array: Any
    spec: pl.BlockSpec
    visited: int
    """Bytes of HBM that one call moves of it, if it is there. Which arrays are, XLA decides: it keeps small ones on
    the chip."""
    weight: bool = False
    """A weight or its scales: it stays in HBM."""


def _products(
    rows: Rows, stacks: Sequence[Stack], layer: jax.Array | None, residual: jax.Array | None
) -> Sequence[jax.Array]:
    """`rows` times each of `stacks` at `layer`, plus `residual`: float32 `[R, out]` each."""
    p = plan(stacks, rows.x.shape[0], 1 + (rows.up is not None), residual is not None)
    operands = _row_operands(rows, p)
    for stack, part in zip(stacks, p.parts, strict=True):
        operands += _weight_operands(stack, part)
    results = [_result(p, part) for part in p.parts]
    if residual is not None:
        operands.append(results[0]._replace(array=residual))
    kernel = functools.partial(_linear_kernel, p, rows, residual is not None)
    return _call(kernel, "umbra_linear", p, rows, layer, operands, results)


def _greedy(rows: Rows, stack: Stack, softcap: float | None) -> Sequence[jax.Array]:
    """Token, logit and log-sum-exp, `[R, 1]` each, of at most `ROWS` rows."""
    p = plan([stack], rows.x.shape[0], 1, False)
    operands = _row_operands(rows, p) + _weight_operands(stack, p.parts[0])
    column = pl.BlockSpec((p.rows, 1), lambda b, r, layer: (0, 0))
    results = [
        Operand(jax.ShapeDtypeStruct((p.rows, 1), dtype), column, 4 * p.rows)
        for dtype in (jnp.int32, jnp.float32, jnp.float32)
    ]
    return _call(
        functools.partial(_greedy_kernel, p, rows, softcap), "umbra_greedy_head", p, rows, None, operands, results
    )


def _call(
    kernel: Any, name: str, p: Plan, rows: Rows, layer: jax.Array | None, operands: Sequence[Operand],
    results: Sequence[Operand],
) -> Sequence[jax.Array]:  # fmt: skip
    scalar = jnp.zeros(1, jnp.int32) if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    inputs = p.parts[0].inputs
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.turns, p.row_blocks),
            in_specs=[o.spec for o in operands],
            out_specs=[r.spec for r in results],
            scratch_shapes=[pltpu.VMEM((p.rows, inputs), p.dtype)] if p.prologue else [],
        ),
        out_shape=[r.array for r in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=max(16 << 20, p.vmem + (4 << 20))
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.rows * inputs * sum(part.out for part in p.parts),
            transcendentals=p.rows * inputs if rows.activation else 0,
            bytes_accessed=sum(o.visited for o in [*operands, *results]),
        ),
        # For scripts/tpu/traffic.py, operand by operand: the scalar costs nothing.
        metadata={
            "reads": ",".join(["0", *(str(o.visited) for o in operands)]),
            "writes": ",".join(str(r.visited) for r in results),
        },
        name=name,
    )

    def run(scalar: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        return call(scalar, *(_in_hbm(a) if o.weight else a for a, o in zip(arrays, operands, strict=True)))

    return jax.jit(run, inline=True)(scalar, *(o.array for o in operands))


def _in_hbm(weight: jax.Array) -> jax.Array:
    """Without it XLA brings what is small enough whole onto the chip: a stack in every layer, for one layer's part, and
    in a loop over passes the head, which then takes the place of everything else."""
    return pltpu.with_memory_space_constraint(weight, pltpu.HBM)


def _row_operands(rows: Rows, p: Plan) -> list[Operand]:
    if not p.prologue:
        ready = rows.ready().astype(p.dtype)
        spec = pl.BlockSpec((p.row_block, ready.shape[1]), lambda b, r, layer: (r, 0))
        return [Operand(ready, spec, _nbytes(ready) * (p.turns if p.row_blocks > 1 else 1))]
    arrays = [rows.x, *([] if rows.up is None else [rows.up])]
    arrays += [] if rows.norm is None else [rows.norm[0].astype(jnp.float32)[None]]
    once = pl.Buffered(1)  # the same block at every turn
    return [
        Operand(a, pl.BlockSpec(a.shape, lambda b, r, layer: (0, 0), pipeline_mode=once), _nbytes(a)) for a in arrays
    ]


def _weight_operands(stack: Stack, part: Part) -> list[Operand]:
    def channels_second(b: jax.Array, r: jax.Array, layer: Any) -> tuple[Any, ...]:
        return layer[0], part.block(b), 0

    def channels_last(b: jax.Array, r: jax.Array, layer: Any) -> tuple[Any, ...]:
        return layer[0], 0, part.block(b)

    def tile_of_layers(b: jax.Array, r: jax.Array, layer: Any) -> tuple[Any, ...]:
        return layer[0] // stack.scale_rows, part.block(b)

    if stack.form == "s4":
        q = pl.BlockSpec((1, part.inputs, part.channels), channels_last)
    else:
        q = pl.BlockSpec((1, part.channels, part.inputs), channels_second)
    operands = [Operand(stack.q, q, int(stack.out * stack.weight_bytes), weight=True)]
    if stack.scale is not None:
        if stack.form == "s4":
            scale = pl.BlockSpec((1, stack.scale.shape[1], part.channels), channels_last)
        else:
            scale = pl.BlockSpec((stack.scale_rows, part.channels), tile_of_layers)
        operands.append(Operand(stack.scale, scale, stack.out * stack.scale_bytes, weight=True))
    return operands


def _result(p: Plan, part: Part) -> Operand:
    def index(b: jax.Array, r: jax.Array, layer: Any) -> tuple[Any, ...]:
        # Outside of its turns a weight stays at the first or the last block of its result: nothing is written there.
        row = jnp.where(b < part.first, 0, jnp.where(b >= part.first + part.blocks, p.row_blocks - 1, r))
        return row, part.block(b)

    array = jax.ShapeDtypeStruct((p.rows, part.out), jnp.float32)
    return Operand(array, pl.BlockSpec((p.row_block, part.channels), index), _nbytes(array))


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _table_rows(ids: jax.Array, table: jax.Array, slab: int) -> jax.Array:
    """Rows `ids` of `table` `[V, D]`, float32 `[T, D]`; V is a multiple of `slab`."""
    tokens, width = len(ids), table.shape[1]
    block = _SUBLANES if tokens % _SUBLANES == 0 else tokens
    moved = tokens * slab * _up(width, LANES) * table.dtype.itemsize

    def kernel(ids: Any, rows: Any, out: Any) -> None:
        t = pl.program_id(0)
        wanted = lax.broadcasted_iota(jnp.int32, (slab, width), 0) == ids[t] % slab
        row = jnp.sum(jnp.where(wanted, rows[...].astype(jnp.float32), 0.0), axis=0, keepdims=True)
        out[pl.ds(t % block, 1), :] = row

    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens,),
            in_specs=[pl.BlockSpec((slab, width), lambda t, ids: (ids[t] // slab, 0))],
            out_specs=pl.BlockSpec((block, width), lambda t, ids: (t // block, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + 4 * tokens * width),
        metadata={"reads": f"0,{moved}", "writes": str(4 * tokens * width)},
        name="umbra_embed",
    )
    return jax.jit(lambda ids, table: call(ids, _in_hbm(table)), inline=True)(ids.astype(jnp.int32), table)


def _linear_kernel(p: Plan, rows: Rows, has_residual: bool, layer: Any, *refs: Any) -> None:
    refs_left = list(refs)
    h = _ready_rows(p, rows, refs_left)
    weights = [_take_weight(part, refs_left) for part in p.parts]
    residual = refs_left.pop(0) if has_residual else None
    b = pl.program_id(0)
    for part, (q, scale), out in zip(p.parts, weights, refs_left, strict=True):

        def turn(part: Part = part, q: Any = q, scale: Any = scale, out: Any = out) -> None:
            y = _block_product(h, part.form, q, scale, layer[0])
            out[...] = y if residual is None else residual[...] + y

        if len(p.parts) == 1:
            turn()
        else:
            pl.when((b >= part.first) & (b < part.first + part.blocks))(turn)


def _greedy_kernel(p: Plan, rows: Rows, softcap: float | None, layer: Any, *refs: Any) -> None:
    refs_left = list(refs)
    h = _ready_rows(p, rows, refs_left)
    (part,) = p.parts
    q, scale = _take_weight(part, refs_left)
    token, highest, total = refs_left
    b = pl.program_id(0)

    @pl.when(b == 0)
    def _() -> None:
        token[...] = jnp.zeros_like(token)
        highest[...] = jnp.full_like(highest, _NEG_INF)
        total[...] = jnp.zeros_like(total)

    logits = reference.capped(_block_product(h, part.form, q, scale, layer[0]), softcap)
    ids = b * part.channels + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    usable = (logits > _NEG_INF) & (ids < part.out)  # no NaN; nothing from past the end of the last block
    clean = jnp.where(usable, jnp.minimum(logits, _LARGEST), _NEG_INF)
    here = jnp.max(clean, axis=1, keepdims=True)
    lowest = jnp.min(jnp.where(clean == here, ids, part.out), axis=1, keepdims=True)
    before = highest[...]
    token[...] = jnp.where(here > before, lowest, token[...])
    now = jnp.maximum(before, here)
    base = jnp.maximum(now, -_LARGEST)  # finite also where no logit is
    highest[...] = now
    shrunk = total[...] * jnp.exp(jnp.maximum(before, -_LARGEST) - base)
    total[...] = shrunk + jnp.sum(jnp.exp(clean - base), axis=1, keepdims=True)

    @pl.when(b == p.turns - 1)
    def _() -> None:
        total[...] = highest[...] + jnp.log(total[...])


def _ready_rows(p: Plan, rows: Rows, refs: list[Any]) -> Any:
    """The rows to multiply (a reference), made at the first turn. Takes their operands and the scratch from `refs`."""
    if not p.prologue:
        return refs.pop(0)
    x = refs.pop(0)
    up = None if rows.up is None else refs.pop(0)
    norm = None if rows.norm is None else refs.pop(0)
    h = refs.pop()

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ready = rows.prepared(x[...], None if up is None else up[...], None if norm is None else norm[...])
        h[...] = ready.astype(h.dtype)

    return h


def _take_weight(part: Part, refs: list[Any]) -> tuple[Any, Any]:
    return refs.pop(0), refs.pop(0) if part.form in ("c8", "s4") else None


def _block_product(h: Any, form: str, q: Any, scale: Any, layer: jax.Array) -> jax.Array:
    """`[R, channels]`, float32: the rows times one block of a weight."""
    if form == "s4":
        return _grouped_product(h, q, scale)
    precision = lax.Precision.HIGHEST if form == "float32" else None
    y = lax.dot_general(
        h[...], q[0].astype(h.dtype), (((1,), (1,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    if scale is None:
        return y
    rows = lax.broadcasted_iota(jnp.int32, scale.shape, 0)
    mine = jnp.where(rows == layer % scale.shape[0], scale[...], 0.0)
    return y * jnp.sum(mine, axis=0, keepdims=True)


def _grouped_product(h: Any, q: Any, scale: Any) -> jax.Array:
    """The same for 4-bit values with a scale for each 32 inputs, some inputs at a time."""
    inputs, channels = q.shape[1:]
    total = jnp.zeros((h.shape[0], channels), jnp.float32)
    for start in range(0, inputs, _CHUNK):
        size = min(_CHUNK, inputs - start)
        values = q[0, pl.ds(start, size)].astype(jnp.float32).reshape(size // GROUP, GROUP, channels)
        scales = scale[0, pl.ds(start // GROUP, size // GROUP)].astype(jnp.float32)
        floats = (values * scales[:, None]).reshape(size, channels).astype(h.dtype)
        total = total + jnp.dot(h[:, pl.ds(start, size)], floats, preferred_element_type=jnp.float32)
    return total
