"""Linear layers in plain JAX: what the other backends are tested against, and what runs where they cannot.

Letters: R rows, V vocabulary, D model width, G groups of 32 inputs.

A row's bits depend on the row alone: float products run in tiles of rows (kernels/tiles.py), float sums beside them in
one order (kernels/numerics.py). Quantised products follow one rule for every grouped form: activations are integers of
8 bits per group of 32, products are added up exactly inside a group, and groups are added in ascending order:

    y = sum over groups g of  sum(q_w q_x) (scale_x scale_w)  +  min_w (scale_x sum(q_x))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import numerics
from ..rows import rms_norm
from ..tiles import map_rows
from .weight import GROUP, Quantised

Norm = tuple[jax.Array, float]

_LARGEST = np.float32(np.finfo(np.float32).max)
_NEG_INF = np.float32(-np.inf)
_SMALLEST_AMAX = np.float32(2.0**-118)
"""Below it 127 / amax is infinite; such a group counts as zero."""


def linear(
    x: jax.Array,
    weights: Sequence[jax.Array | Quantised],
    layer: jax.Array | None,
    *,
    n_rows: jax.Array,
    norm: Norm | None,
    up: jax.Array | None,
    activation: str | None,
    bias: Sequence[jax.Array | None] | None,
    post_norm: Norm | None,
    residual: jax.Array | None,
    tile: int | None,
) -> tuple[jax.Array, ...]:
    """See api.py. Weights, norms and biases of a stack are taken at `layer` inside the loop over row tiles."""
    extra = [value for value in (up, residual) if value is not None]

    def rows(x: jax.Array, *extra: jax.Array) -> tuple[jax.Array, ...]:
        rest = list(extra)
        if activation is not None:
            x = activate(x, activation) * rest.pop(0)
        if norm is not None:
            x = rms_norm(x, at_layer(norm[0], layer, 1), norm[1])
        outputs = []
        for i, weight in enumerate(weights):
            y = product(x, weight_at(weight, layer))
            if bias is not None and (values := bias[i]) is not None:
                y = y + at_layer(values, layer, 1).astype(jnp.float32)
            if post_norm is not None:
                y = rms_norm(y, at_layer(post_norm[0], layer, 1), post_norm[1])
            outputs.append(rest[0] + y if residual is not None else y)
        return tuple(outputs)

    return _map_padded(rows, tile, n_rows, x, *extra)


def embed(ids: jax.Array, table: jax.Array | Quantised, *, n_rows: jax.Array) -> jax.Array:
    """See api.py."""
    if not isinstance(table, Quantised):
        return table[ids].astype(jnp.float32)
    if table.form == "s4":
        columns = {name: jnp.take(part, ids, axis=-1) for name, part in table.parts.items()}
        return _signed_floats(**columns).T
    return _floats({name: part[ids] for name, part in table.parts.items()})


def greedy_head(
    x: jax.Array,
    table: jax.Array | Quantised,
    *,
    norm: Norm | None,
    n_rows: jax.Array,
    softcap: float | None,
    tile: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py. Here the logits of one tile of rows are in memory at once."""

    def rows(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if norm is not None:
            x = rms_norm(x, norm[0], norm[1])
        return summary(capped(product(x, table), softcap))

    return _map_padded(rows, tile, n_rows, x)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Logits bounded to +-`softcap` by a tanh."""
    return logits if softcap is None else softcap * numerics.tanh(logits / softcap)


def summary(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lowest index of the maximum, maximum and log-sum-exp of each row of `[R, V]`. NaN counts as -inf, and +inf as the
    largest finite number, as in sampling."""
    clean = jnp.where(logits > _NEG_INF, jnp.minimum(logits, _LARGEST), _NEG_INF)
    highest = jnp.max(clean, axis=-1)
    shifted = clean - jnp.maximum(highest, -_LARGEST)[:, None]
    total = numerics.log(numerics.ordered_sum(numerics.exp(shifted)))
    return jnp.argmax(clean, axis=-1).astype(jnp.int32), highest, highest + total


def activate(x: jax.Array, kind: str) -> jax.Array:
    """The gate of a feed-forward network: SiLU, or GELU by its tanh approximation."""
    if kind == "silu":
        return x / (1.0 + numerics.exp(-x))
    if kind != "gelu_tanh":
        raise ValueError(f"activation {kind!r} is not supported; supported: silu, gelu_tanh")
    cubic = x + numerics.product(0.044715 * x * x, x)
    return 0.5 * x * (1.0 + numerics.tanh(math.sqrt(2.0 / math.pi) * cubic))


def weight_at(weight: jax.Array | Quantised, layer: jax.Array | None) -> jax.Array | Quantised:
    """One matrix of a stack. What it is multiplied with is a slice, which XLA:CPU copies if it is not fused."""
    if layer is None:
        return weight
    return jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, layer, 0, keepdims=False), weight)


def at_layer(value: jax.Array, layer: jax.Array | None, ndim: int) -> jax.Array:
    """`value`, or its entry at `layer` if it has an axis more than `ndim`."""
    if value.ndim == ndim:
        return value
    if layer is None:
        raise ValueError(f"values of shape {value.shape} are a stack, but no layer is given")
    return lax.dynamic_index_in_dim(value, layer, 0, keepdims=False)


def product(x: jax.Array, weight: jax.Array | Quantised) -> jax.Array:
    """`x` `[R, in]` times one matrix `[.., in]`: `[R, out]`, float32."""
    if isinstance(weight, Quantised):
        return _quantised_product(x, weight)
    flat = weight.reshape(-1, x.shape[-1])  # more axes would make XLA:CPU transpose a copy
    return lax.dot_general(x.astype(flat.dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` `[R, in]` as integers in float32 `[R, G, 32]` and their scales `[R, G]`: the largest magnitude of a group
    becomes 127, and values are rounded to the nearest, ties to the even integer."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    largest = jnp.where(largest >= _SMALLEST_AMAX, largest, 0)
    inverse = jnp.where(largest > 0, np.float32(127) / largest, 0)
    return jnp.round(groups * inverse[..., None]), largest / np.float32(127)


def _quantised_product(x: jax.Array, weight: Quantised) -> jax.Array:
    if weight.layout == "cpu":
        raise ValueError("weights packed for the native kernels do not run in plain JAX; load them with layout 'plain'")
    if weight.layout == "tpu":
        return _float_activations(x, weight)
    q, scale = weight.parts["q"], weight.parts["scale"]
    minimum = weight.parts.get("min")
    width = q.shape[-1] // scale.shape[-1]
    values, x_scale = quantise_rows(x)
    sums = jnp.sum(values, axis=-1)  # integers below 2^24: exact in any order
    values = values.reshape(x.shape)

    def add(g: jax.Array, total: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(values, g * width, width, 1)
        whole = lax.dynamic_slice_in_dim(q, g * width, width, 1).astype(jnp.float32)
        # Products of integers, added up below 2^24: exact, so neither the order nor the number of rows matters.
        exact = lax.dot_general(part, whole, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        own = lax.dynamic_index_in_dim(x_scale, g * width // GROUP, 1)  # [R, 1]
        total = total + numerics.product(exact, own * scale[:, g][None])
        if minimum is not None:
            inputs = own * lax.dynamic_index_in_dim(sums, g * width // GROUP, 1)
            total = total + numerics.product(inputs, minimum[:, g][None])
        return total

    return lax.fori_loop(0, scale.shape[-1], add, jnp.zeros((x.shape[0], q.shape[-2]), jnp.float32))


def _float_activations(x: jax.Array, weight: Quantised) -> jax.Array:
    """Products with the TPU's forms: activations are bfloat16, only weights are integers."""
    x, q, scale = x.astype(jnp.bfloat16), weight.parts["q"], weight.parts["scale"]
    channels = weight.form == "c8"
    matrix = (q if channels else _signed_floats(q, scale)).astype(jnp.bfloat16)
    contracted = (((1,), (1 if channels else 0,)), ((), ()))
    y = lax.dot_general(x, matrix, contracted, preferred_element_type=jnp.float32)
    return y * scale[None] if channels else y


def dequantised(weight: Quantised) -> jax.Array:
    """The float32 values of a weight in the layout `plain` or `tpu`, in its logical shape."""
    if weight.form == "s4":
        return jnp.swapaxes(_signed_floats(**weight.parts), -1, -2).reshape(weight.shape)
    return _floats(weight.parts).reshape(weight.shape)


def _signed_floats(q: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 `[.., in, out]` of the form s4: what the TPU multiplies with, that is numbers of bfloat16."""
    groups = q.astype(jnp.float32).reshape(*scale.shape[:-1], GROUP, scale.shape[-1])
    values = groups * scale.astype(jnp.float32)[..., None, :]
    return values.reshape(q.shape).astype(jnp.bfloat16).astype(jnp.float32)


def _floats(parts: dict[str, Any]) -> jax.Array:
    """float32 values `[.., out, in]`: `scale * q` is exact where a minimum is added, so contraction changes nothing."""
    q, scale = parts["q"], parts["scale"]
    if scale.ndim == q.ndim - 1:
        return q.astype(jnp.float32) * scale[..., None]
    groups = q.astype(jnp.float32).reshape(*scale.shape, -1)
    values = groups * scale[..., None]
    if "min" in parts:
        values = values + parts["min"][..., None]
    return values.reshape(q.shape)


def _map_padded(fn: Callable[..., Any], tile: int | None, n_rows: jax.Array, *rows: jax.Array) -> Any:
    """`map_rows` for any number of rows."""
    count = rows[0].shape[0]
    if tile is None or count % tile == 0:
        return map_rows(fn, tile, n_rows, *rows)
    padded = [jnp.pad(x, [(0, -count % tile)] + [(0, 0)] * (x.ndim - 1)) for x in rows]
    return jax.tree.map(lambda y: y[:count], map_rows(fn, tile, n_rows, *padded))
