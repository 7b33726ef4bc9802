"""Row tiles: how the plain CPU path keeps a row's bits independent of the batch around it.

XLA picks another code path, with other rounding, for a product of one row and for one of many. Between 2 and 32 rows it
rounds every row alike (a test holds it to that). So on a CPU everything that works on rows of a step runs in a loop
over tiles of one fixed number of rows in that range, and only over those that hold valid rows: a row gets the same bits
alone, in a full batch, or anywhere inside a prompt. On a TPU a step is one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map_rows(fn: Callable[..., Any], tile: int | None, n_valid: jax.Array, *rows: jax.Array) -> Any:
    """`fn(*rows)`, computed `tile` rows at a time over the first `n_valid` rows.

    `fn` takes arrays `[R, ...]` and returns a pytree of arrays `[R, ...]`, row by row. Rows past the last valid tile
    are zero. `tile=None` calls `fn` once on everything. The number of rows must be a multiple of `tile`.
    """
    if tile is None:
        return fn(*rows)
    total = rows[0].shape[0]
    if total % tile:
        raise ValueError(f"{total} rows are not a multiple of the tile of {tile}")
    one = jax.eval_shape(fn, *(jax.ShapeDtypeStruct((tile, *x.shape[1:]), x.dtype) for x in rows))
    out = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), one)

    def body(i: jax.Array, out: Any) -> Any:
        start = i * tile
        results = fn(*(lax.dynamic_slice_in_dim(x, start, tile) for x in rows))
        return jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, start, 0), out, results)

    return lax.fori_loop(0, (n_valid + tile - 1) // tile, body, out)
