"""Single operations, called as the step calls them, with the weights of a named model.

An operation runs many times inside one compiled program, each time on another layer (and sequence), so that what it
reads comes from memory as it does in a step: a model's weights do not fit the caches, one layer's would. Stacks smaller
than `COLD` bytes are repeated.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....configs.engine import BLOCK, EngineConfig
from ....configs.trunk import TrunkConfig
from ....kernels import attention as attention_op
from ....kernels import linear as linear_op
from ....kernels.attention import GROUP, KVFormat
from ....kernels.backend import Backend, Kernels
from ....kernels.host_memory import move_to_huge_pages
from ....kernels.sample import RowParams, choose_rows
from ....model.load import Model

COLD = 128 << 20
"""Bytes beyond what caches keep."""

Case = dict[str, Any]
"""An operation and its sizes: `op`, `name`, `rows`, and for attention `context`, `sequences` and `layout`."""

MOST_TABLES = 8
"""Each copy of a table is a branch of the program; those of the named models need no more."""

LEAST = 0.02
"""Seconds of a timed call."""


class Timed:
    """An operation that can be run: `run(first, count)` does it `count` times from layer `first` on, and returns
    something to wait for. `bytes` and `ops` (a multiplication and an addition are two) are of one time; `arithmetic` is
    what it computes in."""

    def __init__(self, run: Callable[[int, int], Any], bytes: float, ops: float, arithmetic: str) -> None:
        self.run, self.bytes, self.ops, self.arithmetic = run, bytes, ops, arithmetic
        self.first, self.count = 0, 1

    def prepare(self) -> None:
        """Compile, and find out how often it must run to be timed."""
        self.call()
        while (took := self.call()) < LEAST / 2 and self.count < 1 << 16:
            self.count = min(16 * self.count, max(self.count + 1, round(self.count * LEAST / max(took, 1e-6))))

    def seconds(self) -> float:
        """Seconds of one time: the median of three calls."""
        return sorted(self.call() for _ in range(3))[1] / self.count

    def call(self) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self.run(self.first, self.count))
        self.first = (self.first + self.count) % (1 << 20)
        return time.perf_counter() - began


def make(case: Case, model: Model, backends: Kernels, kv: KVFormat) -> Timed:
    """The operation of `case`, ready to be compiled."""
    if case["op"] == "linear":
        return _linear(case, model, backends.linear)
    if case["op"] in ("embed", "head"):
        return _table(case, model, backends.linear)
    if case["op"] == "attention":
        return _attention(case, model, backends.attention, kv)
    return _sample(case, model, backends.sample)


# ---- products


GATED = "feed-forward"
PRODUCTS = {"q, k, v": ("q", "k", "v"), "o": ("o",), GATED: ("gate", "up", "down")}
"""The products of a layer as the step takes them: name -> parameters of one call."""


def _linear(case: Case, model: Model, backend: str) -> Timed:
    c, rows = model.config, case["rows"]
    weights = [model.params[f"layers.{name}"] for name in PRODUCTS[case["name"]]]
    inputs = c.n_heads * c.head_dim if case["name"] == "o" else c.d_model
    elements = sum(math.prod(weight.shape) for weight in weights) // c.n_layers
    size, exact = _bytes(weights), _arithmetic(weights, backend)
    copies = -(-COLD // size)
    weights = [_repeated(weight, copies) for weight in weights]
    layers, n_rows, x = c.n_layers * copies, jnp.int32(rows), _noise(rows, inputs)

    def product(weights: Any, x: jax.Array, layer: jax.Array) -> tuple[jax.Array, ...]:
        how: dict[str, Any] = dict(n_rows=n_rows, backend=backend, tile=_tile(rows))
        if case["name"] == GATED:
            gate, up, down = weights
            return (linear_op.gated(x, gate, up, down, layer, activation=c.activation, **how),)
        return linear_op.linear(x, weights, layer, **how)

    @jax.jit
    def run(weights: Any, x: jax.Array, first: jax.Array, count: jax.Array) -> Any:
        def one(i: jax.Array, total: Any) -> Any:
            return jax.tree.map(jnp.maximum, total, product(weights, x, (first + i) % layers))

        return lax.fori_loop(0, count, one, tuple(jnp.zeros(s.shape, s.dtype) for s in results))

    results = jax.eval_shape(product, weights, x, n_rows)
    moved = size / c.n_layers + 4 * rows * (inputs + sum(s.shape[1] for s in results))
    return Timed(lambda first, count: run(weights, x, first, count), moved, 2 * rows * elements, exact)


def _table(case: Case, model: Model, backend: str) -> Timed:
    """Embedding rows, or the head with the choice of the most likely token."""
    config, rows = model.config, case["rows"]
    head = case["op"] == "head"
    table = model.params["embed" if config.tied_embeddings or not head else "head"]
    copies = min(MOST_TABLES, -(-COLD // _bytes(table))) if head else 1
    tables = [table, *(jax.tree.map(jnp.copy, table) for _ in range(copies - 1))]
    norm = (model.params["final_norm"], config.norm_eps)
    x, n_rows = _noise(rows, config.d_model), jnp.int32(rows)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, 4096), jnp.int32)

    def step(table: Any, i: jax.Array, total: jax.Array) -> jax.Array:
        if not head:
            some = lax.dynamic_slice_in_dim(ids, (i * rows) % (4096 - rows), rows)
            return jnp.maximum(total, linear_op.embed(some, table, n_rows=n_rows, backend=backend))
        token, top, _ = linear_op.greedy_head(
            x, table, norm=norm, n_rows=n_rows, softcap=config.logit_softcap, backend=backend, tile=_tile(rows)
        )
        return jnp.maximum(total, top + token)

    empty = jnp.zeros((rows, config.d_model) if not head else (rows,), jnp.float32)

    @jax.jit
    def run(tables: Any, first: jax.Array, count: jax.Array) -> jax.Array:
        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            at = first + i
            branches = [lambda total, table=table: step(table, at, total) for table in tables]
            return lax.switch(at % len(tables), branches, total)

        return lax.fori_loop(0, count, one, empty)

    def some(first: int, count: int) -> jax.Array:
        return run(tables, first, count)

    size = _bytes(table) if head else rows * _bytes(table) / config.vocab_size
    ops = 2 * rows * config.vocab_size * config.d_model if head else 0
    return Timed(some, size + 4 * rows * config.d_model, ops, _arithmetic([table], backend))


# ---- attention


def _attention(case: Case, model: Model, backend: str, kv: KVFormat) -> Timed:
    """`rows` tokens of each of `sequences` sequences after `context` tokens each.

    `layout` "pool" is how the engine has it: a block holds all layers, and a sequence's blocks lie anywhere.
    "contiguous" is one layer whose blocks lie one behind the other in ascending order.
    """
    c, rows, sequences = model.config, case["rows"], case["sequences"]
    contiguous = case["layout"] == "contiguous"
    layers = 1 if contiguous else c.n_layers
    per_token = kv.bytes_per_token(1, c.n_kv_heads, c.head_dim)
    width = -(-(case["context"] + rows) // BLOCK)
    groups = max(1, -(-COLD // (per_token * BLOCK * width * sequences * layers)))  # sets of sequences, taken in turns
    blocks = 1 + groups * sequences * width
    order = np.arange(1, blocks)
    if not contiguous:
        np.random.default_rng(0).shuffle(order)
    tables = jnp.asarray(order.reshape(groups, sequences, width), jnp.int32)
    pool = _filled(kv.pool(blocks, layers, c.n_kv_heads, c.head_dim))
    if jax.default_backend() == "cpu":  # as the engine does it
        jax.tree.map(move_to_huge_pages, jax.block_until_ready(pool))
    tokens = rows * sequences
    q, k, v = (_noise(tokens, n * c.head_dim).reshape(tokens, n, c.head_dim) for n in _heads(c))
    starts = [s * rows + g for s in range(sequences) for g in range(0, rows, GROUP)]
    counts = [min(GROUP, rows - g) for _ in range(sequences) for g in range(0, rows, GROUP)]
    slots = np.repeat(np.arange(sequences, dtype=np.int32), rows)
    positions = np.tile(np.arange(case["context"], case["context"] + rows, dtype=np.int32), sequences)
    angles = jnp.asarray(np.stack([np.ones((tokens, c.head_dim // 2)), np.zeros((tokens, c.head_dim // 2))], 1), "f4")
    queries = attention_op.Queries(
        slots=jnp.asarray(slots), positions=jnp.asarray(positions), n_tokens=jnp.int32(tokens),
        starts=jnp.asarray(starts, jnp.int32), counts=jnp.asarray(counts, jnp.int32), n_groups=jnp.int32(len(starts)),
        tables=tables[0],
    )  # fmt: skip

    def run(pool: Any, first: jax.Array, count: jax.Array) -> tuple[Any, jax.Array]:
        def one(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            pool, total = carry
            at = first + i
            own = queries._replace(tables=lax.dynamic_index_in_dim(tables, at // layers % groups, 0, keepdims=False))
            made = attention_op.attention(
                q, k, v, pool, at % layers, own,
                angles=angles, scale=c.scale, window=jnp.int32(0), softcap=c.attention_softcap, backend=backend,
            )  # fmt: skip
            return made.pool, jnp.maximum(total, made.out)

        return lax.fori_loop(0, count, one, (pool, jnp.zeros(q.shape, jnp.float32)))

    compiled = jax.jit(run, donate_argnums=0)
    held = [pool]

    def again(first: int, count: int) -> jax.Array:
        held[0], out = compiled(held[0], first, count)
        return out

    seen = sum(case["context"] + r + 1 for r in range(rows)) * sequences
    ops = 4 * seen * c.n_heads * c.head_dim
    return Timed(again, sequences * (case["context"] + rows) * per_token, ops, "float32")


def _heads(config: TrunkConfig) -> tuple[int, int, int]:
    return config.n_heads, config.n_kv_heads, config.n_kv_heads


def _filled(shapes: Any) -> Any:
    """A pool with some plausible KV in every block."""
    rng = np.random.default_rng(0)

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        tile = (1, *shape.shape[1:])
        if shape.dtype == np.int8:
            one = rng.integers(-127, 128, tile, np.int8)
        elif len(shape.shape) == 5 and shape.shape[-2] == 2:  # scales
            one = np.full(tile, 0.01)
        else:
            one = rng.standard_normal(tile, np.float32)
        return jnp.tile(jnp.asarray(one, shape.dtype), (shape.shape[0], 1, 1, 1, 1))

    return jax.tree.map(fill, shapes)


# ---- sampling


def _sample(case: Case, model: Model, backend: Backend) -> Timed:
    V, rows = model.config.vocab_size, case["rows"]
    logits = _noise(rows, V) * 4.0
    params = _row_params(rows, V, top_p=0.95 if case["name"] == "top-p" else 1.0, greedy=case["name"] == "greedy")
    active = jnp.ones((rows,), bool)

    @jax.jit
    def run(logits: jax.Array, params: Any, first: jax.Array, count: jax.Array) -> jax.Array:
        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            choice = choose_rows(logits, params._replace(position=params.position + first + i), active, backend=backend)
            return total + choice.token

        return lax.fori_loop(0, count, one, jnp.zeros((rows,), jnp.int32))

    return Timed(lambda first, count: run(logits, params, first, count), 4.0 * rows * V, 0.0, "float32")


def _row_params(rows: int, vocab: int, *, top_p: float, greedy: bool) -> Any:
    def each(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((rows,), value, dtype)

    return RowParams(
        temperature=each(0.0 if greedy else 0.8), top_k=each(0, jnp.int32), top_p=each(top_p), min_p=each(0.0),
        repetition=each(1.0), presence=each(0.0), frequency=each(0.0), seed=jnp.zeros((rows, 2), jnp.uint32),
        position=each(1, jnp.int32), counts=jnp.zeros((rows, vocab), jnp.int32),
        slot=jnp.arange(rows), drafted=jnp.full((rows, 1), -1, jnp.int32),
        bias_ids=jnp.full((rows, 1), -1, jnp.int32), bias_values=jnp.zeros((rows, 1)), n_logprobs=each(-1, jnp.int32),
        mask=each(-1, jnp.int32), masks=jnp.zeros((1, -(-vocab // 32)), jnp.uint32),
    )  # fmt: skip


# ---- weights


def _repeated(weight: Any, copies: int) -> Any:
    """A stack followed by copies of itself."""
    if copies == 1:
        return weight
    if isinstance(weight, linear_op.Mixed):
        return linear_op.Mixed(tuple(_repeated(stack, copies) for stack in weight.stacks), weight.which * copies)
    parts = jax.tree.map(lambda part: jnp.concatenate([part] * copies), weight)
    if isinstance(weight, linear_op.Quantised):
        return dataclasses.replace(parts, shape=(weight.shape[0] * copies, *weight.shape[1:]))
    return parts


def _arithmetic(weights: Sequence[Any], backend: str) -> str:
    """What products with `weights` are computed in."""
    return "float32" if backend == "xla" or all(isinstance(w, jax.Array) for w in weights) else "int8"


def _bytes(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _noise(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))


def _tile(rows: int) -> int:
    """Rows of a product in plain JAX: as the engine has it in steps of decode rows, and of prompt chunks."""
    sizes = EngineConfig()
    return sizes.tile if rows <= sizes.tile else sizes.prefill_tile


def cases(ops: Sequence[str], rows: Sequence[int], contexts: Sequence[int]) -> list[Case]:
    """Everything that is measured."""
    made: list[Case] = []
    names = {"linear": list(PRODUCTS), "embed": ["rows"], "head": ["greedy"], "sample": ["greedy", "top-p"]}
    for op in ops:
        if op == "attention":
            made += [_attend("decode", 1, context) for context in contexts]
            made += [_attend("decode", 1, contexts[0], sequences=16)]
            made += [_attend("verify", width, contexts[-1]) for width in (5, 32)]
            made += [_attend("prefill", BLOCK, context) for context in (0, contexts[-1])]
        elif op == "table":
            made += [_attend("table walk", 1, TABLE_TOKENS, layout=layout) for layout in ("pool", "contiguous")]
        elif op == "walk":
            made += [
                _attend("table walk", 1, context, layout=layout)
                for context in contexts
                for layout in ("pool", "contiguous")
            ]
        else:
            some = rows if op in ("linear", "head") else list(dict.fromkeys((rows[0], rows[-1])))
            made += [{"op": op, "name": name, "rows": r} for name in names[op] for r in some]
    return made


TABLE_TOKENS = 32 * 1024 - 1
"""Context of the table walk: with the new token, 32K."""


def _attend(name: str, rows: int, context: int, *, sequences: int = 1, layout: str = "pool") -> Case:
    return {
        "op": "attention", "name": name, "rows": rows, "context": context, "sequences": sequences, "layout": layout,
    }  # fmt: skip
