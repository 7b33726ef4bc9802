"""Row tiles, and the property of XLA:CPU they rest on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from umbra.kernels.tiles import map_rows


@pytest.mark.parametrize("tile", [None, 2, 8])
@pytest.mark.parametrize("valid", [0, 1, 8, 9, 16])
def test_map_rows(tile: int | None, valid: int) -> None:
    x = jnp.arange(32.0).reshape(16, 2)
    got = jax.jit(lambda n: map_rows(lambda r: {"sum": r.sum(1), "twice": 2 * r}, tile, n, x))(valid)
    np.testing.assert_array_equal(got["sum"][:valid], x.sum(1)[:valid])
    np.testing.assert_array_equal(got["twice"][:valid], 2 * x[:valid])


def test_map_rows_needs_whole_tiles() -> None:
    with pytest.raises(ValueError, match="15 rows are not a multiple of the tile of 4"):
        map_rows(lambda x: x, 4, jnp.int32(1), jnp.zeros((15, 1)))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (576, 1536), (1536, 576), (640, 2048), (96, 49)])
def test_products_of_2_to_32_rows_round_alike(inputs: int, outputs: int) -> None:
    """The bits of a row depend neither on the number of rows in the tile nor on its place in it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, inputs), dtype=np.float32)
    weight = jnp.asarray(rng.standard_normal((3, outputs, inputs), dtype=np.float32))

    @jax.jit
    def layers(x: jax.Array, weight: jax.Array) -> jax.Array:
        def body(i: jax.Array, total: jax.Array) -> jax.Array:
            w = lax.dynamic_index_in_dim(weight, i, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, lax.dot_general(x, w, (((1,), (1,)), ((), ()))), i, 0)

        return lax.fori_loop(0, 3, body, jnp.zeros((3, len(x), outputs)))

    whole = np.asarray(layers(x, weight))
    for rows in (2, 3, 4, 7, 8, 16, 24, 31):
        for first in (0, 1, 32 - rows):
            part = np.asarray(layers(x[first : first + rows], weight))
            np.testing.assert_array_equal(part, whole[:, first : first + rows], err_msg=f"{rows} rows from {first}")
