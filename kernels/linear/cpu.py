"""Linear layers on a CPU, in native code (native/src/linear.cc): one call makes the operands of a product, multiplies
them with several matrices, and adds what comes after.

Letters: D model width, L layers, R rows, T tokens, V vocabulary.

Stacks are passed whole, with the layer's index: XLA would copy a slice. A row's bits depend on the row, the weights and
the instruction-independent rules in native/src/linear.h alone; they are the same on every instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from . import packing, reference
from .weight import Quantised, out_features

Norm = tuple[jax.Array, float]

_FLOATS = {"float32": len(packing.FORMS), "bfloat16": len(packing.FORMS) + 1}
"""Numbers of the forms of plain arrays; those of packed ones are their places in `packing.FORMS`."""
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
MOST_WEIGHTS = 8
"""Weights of one call."""


def unsupported(weight: jax.Array | Quantised) -> str | None:
    """Why the native kernels cannot multiply with a weight; None if they can."""
    if isinstance(weight, Quantised):
        if weight.layout == "cpu":
            return None
        return f"weights in the layout {weight.layout!r} are not for the native kernels; supported: cpu"
    if str(weight.dtype) in _FLOATS:
        return None
    return f"weights of {weight.dtype} have no native kernel; supported: {', '.join(_FLOATS)}, and quantised forms"


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
) -> tuple[jax.Array, ...]:
    """See api.py."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; supported: silu, gelu_tanh")
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"one call takes 1 to {MOST_WEIGHTS} weights, got {len(weights)}")
    rows, inputs = x.shape
    stacked = layer is not None
    optional = [up, norm and norm[0], post_norm and post_norm[0], residual]
    biases = list(bias or [])
    operands = [value for value in (*optional, *biases) if value is not None]
    for weight in weights:
        operands += _operands(weight, inputs, stacked)
    results = [jax.ShapeDtypeStruct((rows, out_features(w, inputs, stacked=stacked)), jnp.float32) for w in weights]
    # A sum takes the place of its first term, which nothing else needs once it is added.
    alias = {3 + sum(value is not None for value in optional[:-1]): 0} if residual is not None else {}
    call = jax.ffi.ffi_call(native.handler("umbra_linear"), results, input_output_aliases=alias)
    return tuple(
        call(
            x, jnp.int32(0) if layer is None else layer, n_rows, *operands,
            optional=_bits(optional), biases=_bits(biases), activation=np.int32(_ACTIVATIONS[activation]),
            epsilon=np.float32(norm[1] if norm else 0), post_epsilon=np.float32(post_norm[1] if post_norm else 0),
            forms=np.array([_form(weight) for weight in weights], np.int32),
        )
    )  # fmt: skip


def gated(
    x: jax.Array,
    gate: jax.Array | Quantised,
    up: jax.Array | Quantised,
    down: jax.Array | Quantised,
    layer: jax.Array | None,
    *,
    n_rows: jax.Array,
    activation: str,
    norm: Norm | None,
    post_norm: Norm | None,
    residual: jax.Array | None,
) -> jax.Array:
    """See api.py. In one call the product with `gate` and `up` becomes the operand of the one with `down` where it is
    made: it is not written as floats, nor read and prepared by every thread."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; supported: silu, gelu_tanh")
    (rows, inputs), stacked = x.shape, layer is not None
    inner = out_features(gate, inputs, stacked=stacked)
    own = residual is x  # passed once: two operands that are one array could not both give their memory to the result
    optional = [None, norm and norm[0], post_norm and post_norm[0], None if own else residual]
    operands = [value for value in optional if value is not None]
    for weight, features in ((gate, inputs), (up, inputs), (down, inner)):
        operands += _operands(weight, features, stacked)
    result = jax.ShapeDtypeStruct((rows, out_features(down, inner, stacked=stacked)), jnp.float32)
    place = 0 if own else 3 + sum(value is not None for value in optional[:-1])
    alias = {} if residual is None else {place: 0}  # as in `linear`
    call = jax.ffi.ffi_call(native.handler("umbra_gated"), result, input_output_aliases=alias)
    return call(
        x, jnp.int32(0) if layer is None else layer, n_rows, *operands,
        optional=_bits([*optional, x if own else None]), activation=np.int32(_ACTIVATIONS[activation]),
        epsilon=np.float32(norm[1] if norm else 0), post_epsilon=np.float32(post_norm[1] if post_norm else 0),
        inner=np.int32(inner), forms=np.array([_form(weight) for weight in (gate, up, down)], np.int32),
    )  # fmt: skip


def embed(ids: jax.Array, table: jax.Array | Quantised, *, n_rows: jax.Array) -> jax.Array:
    """See api.py."""
    if not isinstance(table, Quantised):
        return reference.embed(ids, table, n_rows=n_rows)
    result = jax.ShapeDtypeStruct((ids.shape[0], table.in_features), jnp.float32)
    call = jax.ffi.ffi_call(native.handler("umbra_embed"), result)
    operands = _operands(table, table.in_features, False)
    return call(ids, n_rows, *operands, form=np.int32(_form(table)), out=np.int32(table.out_features))


def greedy_head(
    x: jax.Array, table: jax.Array | Quantised, *, norm: Norm | None, n_rows: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py. With a soft cap the logits are in memory: its bits must be those that all logits are bounded with."""
    if softcap is not None:
        (logits,) = linear(
            x, [table], None, n_rows=n_rows, norm=norm, up=None, activation=None, bias=None, post_norm=None,
            residual=None,
        )  # fmt: skip
        return reference.summary(reference.capped(logits, softcap))
    rows, inputs = x.shape
    number, real = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    call = jax.ffi.ffi_call(native.handler("umbra_greedy_head"), (number, real, real))
    operands = [] if norm is None else [norm[0]]
    token, highest, log_sum = call(
        x, n_rows, *operands, *_operands(table, inputs, False),
        norm=np.int32(norm is not None), epsilon=np.float32(norm[1] if norm else 0),
        form=np.int32(_form(table)), out=np.int32(out_features(table, inputs, stacked=False)),
    )  # fmt: skip
    return token, highest, log_sum


def _bits(values: Sequence[jax.Array | None]) -> np.int32:
    """Bit i: there is a value i."""
    return np.int32(sum(1 << i for i, value in enumerate(values) if value is not None))


def _form(weight: jax.Array | Quantised) -> int:
    if (reason := unsupported(weight)) is not None:
        raise ValueError(reason)
    return packing.FORMS.index(weight.form) if isinstance(weight, Quantised) else _FLOATS[str(weight.dtype)]


def _operands(weight: jax.Array | Quantised, inputs: int, stacked: bool) -> list[jax.Array]:
    """What the native code takes of a weight: the packed parts, or the array as `[out, in]` (a stack of them)."""
    if isinstance(weight, Quantised):
        return [weight.parts[name] for name in ("blocks", "supers") if name in weight.parts]
    lead = weight.shape[:1] if stacked else ()
    return [weight.reshape(*lead, -1, inputs)]
