"""The contract of linear layers: products with weights of any kind, and the float work before and after them.

Letters: D model width, L layers, R rows, T tokens of the step, V vocabulary. `in` and `out` are a weight's input and
output features with their axes flattened: `[L, N, H, D]` has in = D and out = N H, `[L, D, N, H]` in = N H and out = D.

Exactness: a row's result depends on that row alone, never on how many rows there are or what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import numerics
from . import reference
from .weight import Mixed, Split, Weight

Norm = tuple[jax.Array, float]
"""Weight of a root-mean-square norm (a plain multiplier; `[in]`, or `[L, in]` to be taken at the layer) and epsilon."""


def linear(
    x: jax.Array,
    weights: Sequence[Weight],
    layer: jax.Array | None,
    *,
    n_rows: jax.Array,
    norm: Norm | None = None,
    up: jax.Array | None = None,
    activation: str | None = None,
    bias: Sequence[jax.Array | None] | None = None,
    post_norm: Norm | None = None,
    residual: jax.Array | None = None,
    backend: str,
    tile: int | None = None,
) -> tuple[jax.Array, ...]:
    """`x` float32 `[R, in]` times each of `weights`: float32 `[R, out]` each.

    In this order: `activation` ("silu" or "gelu_tanh") makes `x` into `activation(x) * up`; `norm` is applied; the
    products are taken; `bias` (one per weight, `[out]` or `[L, out..]`) is added; `post_norm` is applied; `residual`
    `[R, out]` is added. `layer` (int32 []) picks from stacks, of weights and of what goes with them; None: there are no
    stacks. Rows from `n_rows` (int32 []) on are padding: their results are unspecified.

    `tile` is the number of rows of one product in plain JAX on a CPU (kernels/tiles.py).
    """
    if (activation is None) != (up is None):
        raise ValueError("`activation` and `up` belong together: both or neither must be given")
    if (residual is not None or post_norm is not None) and len(weights) != 1:
        raise ValueError(f"a norm or sum after the product needs one weight, got {len(weights)}")
    if bias is not None:
        bias = [None if b is None else _flat(b, layer is not None and b.ndim > 1) for b in bias]
    special = any(isinstance(weight, Mixed | Split) for weight in weights)
    if not special:
        run: dict[str, Any] = dict(tile=tile) if backend == "xla" else {}
        return _module(backend).linear(
            x, weights, layer, n_rows=n_rows, norm=norm, up=up, activation=activation, bias=bias,
            post_norm=post_norm, residual=residual, **run,
        )  # fmt: skip

    # What belongs to the layer is taken here: a mixed stack numbers its layers in its own way.
    after = None if post_norm is None else (reference.at_layer(post_norm[0], layer, 1), post_norm[1])

    def one(weight: Weight, at: jax.Array | None, bias: jax.Array | None, residual: Any = None) -> jax.Array:
        before = None if norm is None else (reference.at_layer(norm[0], layer, 1), norm[1])
        return linear(
            x, [weight], at, n_rows=n_rows, norm=before, up=up, activation=activation,
            bias=None if bias is None else [reference.at_layer(bias, layer, 1)], post_norm=after, residual=residual,
            backend=backend, tile=tile,
        )[0]  # fmt: skip

    outputs = []
    for i, weight in enumerate(weights):
        own = None if bias is None else bias[i]
        if isinstance(weight, Split):
            if own is not None or after is not None or residual is not None:
                raise ValueError("a split table takes no bias, norm or sum after its product")
            both = [one(part, None, None) for part in (weight.frequent, weight.rest)]
            outputs.append(jnp.take(jnp.concatenate(both, axis=1), weight.place, axis=1))
        elif isinstance(weight, Mixed):
            if layer is None:
                raise ValueError("a stack of mixed forms needs a layer")
            run_one = functools.partial(one, bias=own, residual=residual)
            outputs.append(_switch(weight, layer, run_one))
        else:
            outputs.append(one(weight, layer, own, residual))
    return tuple(outputs)


def gated(
    x: jax.Array,
    gate: Weight,
    up: Weight,
    down: Weight,
    layer: jax.Array | None,
    *,
    n_rows: jax.Array,
    activation: str,
    norm: Norm | None = None,
    post_norm: Norm | None = None,
    residual: jax.Array | None = None,
    backend: str,
    tile: int | None = None,
) -> jax.Array:
    """A gated feed-forward network of `x` float32 `[R, D]`: `down(activation(gate(y)) * up(y))`, float32 `[R, D]`, with
    y = `norm`(x); then `post_norm` is applied and `residual` added. The bits are those of two calls of `linear`, whose
    arguments these are."""
    weights = (gate, up, down)
    if backend == "cpu" and not any(isinstance(weight, Mixed | Split) for weight in weights):
        return _module(backend).gated(
            x, *weights, layer, n_rows=n_rows, activation=activation, norm=norm, post_norm=post_norm,
            residual=residual,
        )  # fmt: skip
    run: dict[str, Any] = dict(n_rows=n_rows, backend=backend, tile=tile)
    open_gate, value = linear(x, [gate, up], layer, norm=norm, **run)
    return linear(
        open_gate, [down], layer, up=value, activation=activation, post_norm=post_norm, residual=residual, **run
    )[0]


def embed(ids: jax.Array, table: Weight, *, n_rows: jax.Array, backend: str) -> jax.Array:
    """Rows `ids` (int32 `[T]`, each in [0, V)) of the table `[V, D]`: float32 `[T, D]`."""
    if isinstance(table, Mixed):
        raise ValueError("a table has one matrix, not a stack of mixed forms")
    if not isinstance(table, Split):
        return _module(backend).embed(ids, table, n_rows=n_rows)
    rows = table.place[ids]
    first = table.frequent.shape[0]
    is_frequent = rows < first
    frequent = embed(jnp.where(is_frequent, rows, 0), table.frequent, n_rows=n_rows, backend=backend)
    rest = embed(jnp.where(is_frequent, 0, rows - first), table.rest, n_rows=n_rows, backend=backend)
    return jnp.where(is_frequent[:, None], frequent, rest)


def greedy_head(
    x: jax.Array,
    table: Weight,
    *,
    norm: Norm | None,
    n_rows: jax.Array,
    softcap: float | None,
    backend: str,
    tile: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most likely token (int32 `[R]`), its logit and the log-sum-exp of all logits (float32 `[R]`) of hidden states
    `x` `[R, D]`, without `[R, V]` logits in memory.

    The token is the lowest id of the largest of exactly the logits that `linear` gives, bounded by `softcap`; NaN
    counts as -inf and +inf as the largest finite number.
    """
    if isinstance(table, Mixed):
        raise ValueError("a table has one matrix, not a stack of mixed forms")
    if not isinstance(table, Split):
        run: dict[str, Any] = dict(tile=tile) if backend == "xla" else {}
        return _module(backend).greedy_head(x, table, norm=norm, n_rows=n_rows, softcap=softcap, **run)
    parts = [
        greedy_head(x, part, norm=norm, n_rows=n_rows, softcap=softcap, backend=backend, tile=tile)
        for part in (table.frequent, table.rest)
    ]
    (row_a, max_a, sum_a), (row_b, max_b, sum_b) = parts
    token_a, token_b = table.tokens[row_a], table.tokens[row_b + table.frequent.shape[0]]
    first = (max_a > max_b) | ((max_a == max_b) & (token_a < token_b))
    high, low = jnp.maximum(sum_a, sum_b), jnp.minimum(sum_a, sum_b)
    total = high + numerics.log(1 + numerics.exp(low - high))
    return jnp.where(first, token_a, token_b).astype(jnp.int32), jnp.maximum(max_a, max_b), total


def _module(backend: str) -> Any:
    if backend == "xla":
        return reference
    if backend == "cpu":
        from . import cpu

        return cpu
    if backend == "tpu":
        from . import tpu

        return tpu
    raise ValueError(f"linear layers have no backend {backend!r}; supported: xla, cpu, tpu")


def _flat(value: jax.Array, stacked: bool) -> jax.Array:
    """`[out]` or `[L, out]`, from a bias with more axes."""
    return value.reshape(value.shape[0], -1) if stacked else value.reshape(-1)


def _switch(weight: Mixed, layer: jax.Array, run: Callable[..., jax.Array]) -> jax.Array:
    """`run(stack, row)` for the stack that holds `layer`."""
    row = jnp.asarray(weight.rows)[layer]
    kind = jnp.asarray(weight.which, jnp.int32)[layer]
    return lax.switch(kind, [lambda row, stack=stack: run(stack, row) for stack in weight.stacks], row)
