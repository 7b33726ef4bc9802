"""The trunk: one decoder for all families, as a Flax NNX module.

Letters: B block-table rows, D model width, F feed-forward width, H head size, K key/value heads, L layers, N query
heads, T tokens of a step, V vocabulary.

The module is built for *serving*: it takes the ragged tokens of a step, writes their keys and values to the paged pool
and attends to it. It runs inside `shard_map`; under a mesh its weights are this device's part (whole heads, slices of
F and V), and it adds partial sums over the mesh axis `axis`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ..configs.engine import BLOCK
from ..configs.trunk import LOCAL, TrunkConfig
from ..kernels import linear, numerics
from ..kernels.attention import GROUP, KVFormat, KVPool, Queries, attention, plan
from ..kernels.backend import Kernels
from ..kernels.linear import Weight
from ..kernels.rows import rms_norm
from .params import param_specs
from .rope import cos_sin

PLAIN = Kernels()
FLOAT32 = KVFormat("float32")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the step runs, apart from the model: decided per target, fixed at compile time."""

    kernels: Kernels = PLAIN
    """Who computes each operation."""
    tile: int | None = None
    """Rows of one product of the plain path on a CPU (kernels/tiles.py); None: all rows at once."""
    head_tile: int | None = None
    """The same for the head, which few rows of a step need."""
    axis: str | None = None
    """Mesh axis over which heads, F and V are split; None: not split."""
    context: int = 8192
    """Positions that can occur."""

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' parts."""
        return lax.psum(x, self.axis) if self.axis else x


class Layers(nnx.Module):
    """The parameters of all layers, stacked: every one has L as its first axis."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.names = tuple(params)
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


class Trunk(nnx.Module):
    """A decoder. `params` are weights (arrays, quantised or abstract) by the names of `param_specs`."""

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param  # absent when tied to `embed`

    def __init__(self, config: TrunkConfig, params: Mapping[str, Any]) -> None:
        self.config = config
        stacked = [path for path in param_specs(config) if path.startswith("layers.")]
        self.layers = Layers({path.removeprefix("layers."): params[path] for path in stacked})
        for path in param_specs(config).keys() - stacked:
            setattr(self, path, nnx.Param(params[path]))

    def embed_tokens(self, ids: jax.Array, n_tokens: jax.Array, run: Execution) -> jax.Array:
        """Embeddings `[T, D]` of the first `n_tokens` of `ids` `[T]`, float32."""
        table: Weight = self.embed.get_value()
        if run.axis:
            rows = self.config.vocab_size // lax.axis_size(run.axis)
            ids = ids - lax.axis_index(run.axis) * rows
            mine = (ids >= 0) & (ids < rows)
            x = linear.embed(jnp.where(mine, ids, 0), table, n_rows=n_tokens, backend=run.kernels.linear)
            x = run.sum(jnp.where(mine[:, None], x, 0.0))
        else:
            x = linear.embed(ids, table, n_rows=n_tokens, backend=run.kernels.linear)
        return x if self.config.embed_scale == 1.0 else x * self.config.embed_scale

    def __call__(
        self, ids: jax.Array, queries: Queries, pool: KVPool, layers: jax.Array, n_layers: jax.Array, run: Execution,
        hot: Any = None,
    ) -> tuple[jax.Array, KVPool]:  # fmt: skip
        """Last hidden states `[T, D]` (before the final norm) of the tokens `ids` `[T]`, and the pool with their KV.

        `layers` int32 `[L]` lists the layers to run, the first `n_layers` of it, in order. `hot` holds copies of some
        of the pool's blocks (`tpu_hot.stage`).
        """
        c = self.config
        x = self.embed_tokens(ids, queries.n_tokens, run)
        # The same table is taken once: JAX would write it into the program twice if another thread had just replaced
        # it in the cache of tables, and then not find the program in its cache of compiled ones.
        mixed = LOCAL in c.layer_types
        kinds = (False, True) if mixed else (False,)
        angles = jnp.stack([cos_sin(c, queries.positions, run.context, local=local) for local in kinds])
        is_local = jnp.asarray(np.array([kind == LOCAL for kind in c.layer_types], np.int32))
        n_heads = c.n_heads // (lax.axis_size(run.axis) if run.axis else 1)
        work = plan(queries, pool, n_heads, backend=run.kernels.attention, hot=hot)
        stack = {name: getattr(self.layers, name).get_value() for name in self.layers.names}

        def layer(i: jax.Array, carry: tuple[jax.Array, KVPool]) -> tuple[jax.Array, KVPool]:
            x, pool = carry
            index = layers[i]
            local = is_local[index] if mixed else 0
            one = _Layer(c, stack, index, queries.n_tokens, run)
            q, k, v = one.project(x)
            window = jnp.asarray(local * (c.sliding_window or 0), np.int32)
            attended, pool = one.attend(q, k, v, pool, queries, angles[local], window, hot, work)
            return one.feed_forward(one.add_attended(x, attended)), pool

        return lax.fori_loop(0, n_layers, layer, (x, pool))

    def normalised(self, x: jax.Array) -> jax.Array:
        """Hidden states `x` `[R, D]` after the final norm."""
        return rms_norm(x, *self._final_norm())

    def logits(self, x: jax.Array, n_rows: jax.Array, run: Execution) -> jax.Array:
        """Logits `[R, V]`, float32, of the first `n_rows` of the hidden states `[R, D]`."""
        c = self.config
        (logits,) = linear.linear(
            x, [self._head()], None, n_rows=n_rows, norm=self._final_norm(), backend=run.kernels.linear,
            tile=run.head_tile,
        )  # fmt: skip
        if run.axis:
            logits = lax.all_gather(logits, run.axis, axis=1, tiled=True)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * numerics.tanh(logits / c.logit_softcap)
        return logits

    def greedy(self, x: jax.Array, n_rows: jax.Array, run: Execution) -> jax.Array:
        """The most likely tokens int32 `[R]` of the first `n_rows` of the hidden states `[R, D]`: those of `logits`,
        without having all of them in memory at once. The lowest id wins a tie."""
        token, best, _ = linear.greedy_head(
            x, self._head(), norm=self._final_norm(), n_rows=n_rows, softcap=self.config.logit_softcap,
            backend=run.kernels.linear, tile=run.head_tile,
        )  # fmt: skip
        if not run.axis:
            return token
        first = lax.axis_index(run.axis) * (self.config.vocab_size // lax.axis_size(run.axis))
        tokens = lax.all_gather(token + first, run.axis)  # [model, R]
        return jnp.take_along_axis(tokens, lax.all_gather(best, run.axis).argmax(0)[None], axis=0)[0]

    def _head(self) -> Weight:
        return (self.embed if self.config.tied_embeddings else self.head).get_value()

    def _final_norm(self) -> tuple[Any, float]:
        return self.final_norm.get_value(), self.config.norm_eps


class _Layer:
    """One layer of the stack, at a traced index. Operations take the whole stack and the index: a slice of it would
    be copied in every pass."""

    def __init__(
        self, config: TrunkConfig, stack: Mapping[str, Weight], index: jax.Array, n_rows: jax.Array, run: Execution
    ) -> None:
        self.config, self.stack, self.index, self.n_rows, self.run = config, stack, index, n_rows, run

    def _linear(self, x: jax.Array, names: tuple[str, ...], **how: Any) -> tuple[jax.Array, ...]:
        return linear.linear(
            x, [self.stack[name] for name in names], self.index, n_rows=self.n_rows,
            backend=self.run.kernels.linear, tile=self.run.tile, **how,
        )  # fmt: skip

    def _norm(self, name: str) -> tuple[Any, float]:
        return self.stack[name], self.config.norm_eps  # norms are never quantised

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[T, N, H]`, keys and values `[T, K, H]` of hidden states `[T, D]`, not rotated yet."""
        bias = [self.stack[f"{name}_bias"] for name in ("q", "k", "v")] if self.config.qkv_bias else None
        q, k, v = self._linear(x, ("q", "k", "v"), norm=self._norm("attn_norm"), bias=bias)
        H = self.config.head_dim
        return q.reshape(len(x), -1, H), k.reshape(len(x), -1, H), v.reshape(len(x), -1, H)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, pool: KVPool, queries: Queries, angles: jax.Array,
        window: jax.Array, hot: Any, work: Any,
    ) -> tuple[jax.Array, KVPool]:  # fmt: skip
        """Attention's result `[T, N * H]`, and the pool with the tokens' keys and values."""
        c = self.config
        result = attention(
            q, k, v, pool, self.index, queries,
            angles=angles,
            q_norm=self._norm("q_norm") if c.qk_norm else None,
            k_norm=self._norm("k_norm") if c.qk_norm else None,
            scale=c.scale, window=window, softcap=c.attention_softcap,
            backend=self.run.kernels.attention, hot=hot, work=work,
        )  # fmt: skip
        return result.out.reshape(len(q), -1), result.pool

    def add_attended(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Hidden states after attention's output projection."""

        def product(**after: Any) -> jax.Array:
            return self._linear(attended, ("o",), **after)[0]

        return self._add(x, product, "post_attn_norm")

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Hidden states after the feed-forward network."""

        def product(**after: Any) -> jax.Array:
            stack = self.stack
            return linear.gated(
                x, stack["gate"], stack["up"], stack["down"], self.index, n_rows=self.n_rows,
                activation=self.config.activation, norm=self._norm("mlp_norm"), backend=self.run.kernels.linear,
                tile=self.run.tile, **after,
            )  # fmt: skip

        return self._add(x, product, "post_mlp_norm")

    def _add(self, x: jax.Array, product: Callable[..., jax.Array], post_norm: str) -> jax.Array:
        """`x` plus the product, which takes a norm and a sum after it; normalised first where the family does so."""
        norm = self._norm(post_norm) if self.config.sandwich_norms else None
        if self.run.axis is None:
            return product(post_norm=norm, residual=x)
        y = self.run.sum(product())  # the product is this device's part; norm and residual want the whole
        return x + (y if norm is None else rms_norm(y, norm[0][self.index], norm[1]))


def logits(
    config: TrunkConfig, params: Mapping[str, Any], ids: np.ndarray, rows: np.ndarray | None = None, *,
    kernels: Kernels = PLAIN, kv: KVFormat = FLOAT32,
) -> jax.Array:  # fmt: skip
    """Logits `[T, V]` of one whole sequence `ids` `[T]` (or only `[len(rows), V]` at the positions `rows`): the trunk
    without an engine, for tests and tools."""
    T = len(ids)
    padded = -(-T // 64) * 64
    blocks = -(-padded // BLOCK)
    starts = np.arange(0, padded, GROUP, dtype=np.int32)
    queries = Queries(
        slots=jnp.zeros(padded, jnp.int32),
        positions=jnp.asarray(np.where(np.arange(padded) < T, np.arange(padded), -1), jnp.int32),
        n_tokens=jnp.int32(T),
        starts=jnp.asarray(starts),
        counts=jnp.asarray(np.clip(T - starts, 0, GROUP), jnp.int32),
        n_groups=jnp.int32(-(-T // GROUP)),
        tables=1 + jnp.arange(blocks, dtype=jnp.int32)[None],
    )
    wanted = np.arange(T) if rows is None else np.asarray(rows)
    wanted = np.pad(wanted, (0, -len(wanted) % 32), mode="edge").astype(np.int32)
    got = _whole(
        config, blocks, kernels, kv, dict(params), np.pad(np.asarray(ids, np.int32), (0, padded - T)), queries, wanted
    )
    return got[: T if rows is None else len(rows)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _whole(
    config: TrunkConfig, blocks: int, kernels: Kernels, kv: KVFormat, params: Mapping[str, Any], ids: jax.Array,
    queries: Queries, rows: jax.Array,
) -> jax.Array:  # fmt: skip
    run = Execution(kernels, tile=32, head_tile=32, context=blocks * BLOCK)
    shapes = kv.pool(blocks + 1, config.n_layers, config.n_kv_heads, config.head_dim)
    pool = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    trunk = Trunk(config, params)
    layers = jnp.arange(config.n_layers, dtype=jnp.int32)
    x, _ = trunk(ids, queries, pool, layers, jnp.int32(config.n_layers), run)
    return trunk.logits(x[rows], jnp.int32(len(rows)), run)
