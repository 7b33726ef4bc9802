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
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ..configs.engine import BLOCK
from ..configs.trunk import LOCAL, TrunkConfig
from ..kernels import numerics
from ..kernels.attention import Queries, attend, write_kv
from ..kernels.attention.reference import GROUP
from ..kernels.tiles import map_rows
from .params import param_specs
from .rope import cos_sin, rotate


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the step runs, apart from the model: decided per target, fixed at compile time."""

    tile: int | None = None
    """Rows of one product (kernels/tiles.py); None: all rows at once, for a TPU."""
    head_tile: int | None = None
    """The same for the head, which few rows of a step need."""
    axis: str | None = None
    """Mesh axis over which heads, F and V are split; None: not split."""
    context: int = 8192
    """Positions that can occur."""
    tpu: bool = False
    """Compiled for a TPU."""

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
    """A decoder. `params` are arrays (or abstract arrays) by the names of `param_specs`."""

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param  # absent when tied to `embed`

    def __init__(self, config: TrunkConfig, params: Mapping[str, Any]) -> None:
        self.config = config
        stacked = [path for path in param_specs(config) if path.startswith("layers.")]
        self.layers = Layers({path.removeprefix("layers."): params[path] for path in stacked})
        for path in param_specs(config).keys() - stacked:
            setattr(self, path, nnx.Param(params[path]))

    def embed_tokens(self, ids: jax.Array, run: Execution) -> jax.Array:
        """Embeddings `[T, D]` of `ids` `[T]`, float32."""
        table = self.embed[...]
        if run.axis:
            first = lax.axis_index(run.axis) * table.shape[0]
            mine = (ids >= first) & (ids < first + table.shape[0])
            x = jnp.where(mine[:, None], table[jnp.where(mine, ids - first, 0)], 0)
        else:
            x = table[ids]
        return run.sum(x.astype(jnp.float32)) * self.config.embed_scale

    def __call__(
        self, ids: jax.Array, queries: Queries, pool: jax.Array, layers: jax.Array, n_layers: jax.Array, run: Execution
    ) -> tuple[jax.Array, jax.Array]:
        """Last hidden states `[T, D]` (before the final norm) of the tokens `ids` `[T]`, and the pool with their KV.

        `layers` int32 `[L]` lists the layers to run, the first `n_layers` of it, in order.
        """
        c = self.config
        x = self.embed_tokens(ids, run)
        # The same table is taken once: JAX would write it into the program twice if another thread had just replaced
        # it in the cache of tables, and then not find the program in its cache of compiled ones.
        kinds = (False, True) if LOCAL in c.layer_types else (False,)
        angles = jnp.stack([cos_sin(c, queries.positions, run.context, local=local) for local in kinds])
        is_local = jnp.asarray(np.array([kind == LOCAL for kind in c.layer_types], np.int32))
        stack = {name: getattr(self.layers, name)[...] for name in self.layers.names}

        def layer(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, pool = carry
            index = layers[i]
            local = is_local[index]
            weights = _Layer(c, stack, index, run)
            q, k, v = map_rows(weights.project, run.tile, queries.n_tokens, x, angles[local])
            pool = write_kv(pool, index, k, v, queries, pin=run.tpu)
            attended = attend(
                q, pool, index, queries,
                scale=c.scale, window=local * (c.sliding_window or 0), softcap=c.attention_softcap,
                pin=run.tpu,
            )  # fmt: skip
            x = map_rows(weights.finish, run.tile, queries.n_tokens, x, attended)
            return x, pool

        return lax.fori_loop(0, n_layers, layer, (x, pool))

    def logits(self, x: jax.Array, run: Execution) -> jax.Array:
        """Logits `[R, V]`, float32, of hidden states `[R, D]`."""
        c = self.config
        x = rms_norm(x, self.final_norm[...], c.norm_eps)
        table = (self.embed if c.tied_embeddings else self.head)[...]
        logits = _linear(x, table)
        if run.axis:
            logits = lax.all_gather(logits, run.axis, axis=1, tiled=True)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * numerics.tanh(logits / c.logit_softcap)
        return logits


class _Layer:
    """One layer of the stack, at a traced index. Weights are taken from the stack where they are used."""

    def __init__(self, config: TrunkConfig, stack: Mapping[str, jax.Array], index: jax.Array, run: Execution) -> None:
        self.config, self.stack, self.index, self.run = config, stack, index, run

    def __getitem__(self, name: str) -> jax.Array:
        return lax.dynamic_index_in_dim(self.stack[name], self.index, 0, keepdims=False)

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[R, N, H]`, keys and values `[R, K, H]` of hidden states `[R, D]`, rotated by `angles`."""
        c = self.config
        h = rms_norm(x, self["attn_norm"], c.norm_eps)
        q, k, v = (_linear(h, self[name]) for name in ("q", "k", "v"))
        if c.qkv_bias:
            q, k, v = (y + self[f"{name}_bias"].astype(jnp.float32) for y, name in ((q, "q"), (k, "k"), (v, "v")))
        if c.qk_norm:
            q = rms_norm(q, self["q_norm"], c.norm_eps)
            k = rms_norm(k, self["k_norm"], c.norm_eps)
        return rotate(q, angles), rotate(k, angles), v

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Hidden states after attention's output projection and the feed-forward network."""
        c = self.config
        y = self.run.sum(_linear(attended.reshape(len(attended), -1), _flatten_inputs(self["o"])))
        if c.sandwich_norms:
            y = rms_norm(y, self["post_attn_norm"], c.norm_eps)
        x = x + y
        h = rms_norm(x, self["mlp_norm"], c.norm_eps)
        gate, up = _linear(h, self["gate"]), _linear(h, self["up"])
        y = self.run.sum(_linear(_activate(gate, c.activation) * up, self["down"]))
        if c.sandwich_norms:
            y = rms_norm(y, self["post_mlp_norm"], c.norm_eps)
        return x + y


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019), float32."""
    mean = numerics.product(numerics.ordered_sum(numerics.product(x, x)), jnp.float32(1.0 / x.shape[-1]))
    return numerics.product(x * (1.0 / jnp.sqrt(mean + eps))[..., None], weight.astype(jnp.float32))


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x` `[R, in]` times `weight` `[..., in]`: `[R, ...]`, accumulated in float32."""
    flat = weight.reshape(-1, weight.shape[-1])  # more axes would make XLA:CPU transpose a copy
    y = lax.dot_general(x.astype(weight.dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.reshape(len(x), *weight.shape[:-1])


def _flatten_inputs(weight: jax.Array) -> jax.Array:
    return weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))


def _activate(x: jax.Array, kind: str) -> jax.Array:
    if kind == "silu":
        return x / (1.0 + numerics.exp(-x))
    cubic = x + numerics.product(0.044715 * x * x, x)  # GELU by its tanh approximation
    return 0.5 * x * (1.0 + numerics.tanh(math.sqrt(2.0 / math.pi) * cubic))


def logits(
    config: TrunkConfig, params: Mapping[str, jax.Array], ids: np.ndarray, rows: np.ndarray | None = None
) -> jax.Array:
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
    got = _whole(config, blocks, dict(params), np.pad(np.asarray(ids, np.int32), (0, padded - T)), queries, wanted)
    return got[: T if rows is None else len(rows)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _whole(
    config: TrunkConfig, blocks: int, params: Mapping[str, jax.Array], ids: jax.Array, queries: Queries, rows: jax.Array
) -> jax.Array:
    run = Execution(tile=32, head_tile=32, context=blocks * BLOCK)
    shape = (blocks + 1, config.n_layers, 2, config.n_kv_heads, BLOCK, config.head_dim)
    trunk = Trunk(config, params)
    layers = jnp.arange(config.n_layers, dtype=jnp.int32)
    x, _ = trunk(ids, queries, jnp.zeros(shape, jnp.float32), layers, jnp.int32(config.n_layers), run)
    return map_rows(lambda x: trunk.logits(x, run), run.head_tile, jnp.int32(len(rows)), x[rows])
