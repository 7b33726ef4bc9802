"""The trunk over given texts, with any subset of its layers and without an engine: for measuring what layers do and
whether a text is what the trunk would have written.

Letters: D model width, L layers, R rows with logits, T tokens of a text, V vocabulary.

Weights, KV and kernels are those that serve, so that a choice here is the engine's choice with drafting off.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..configs.engine import BLOCK
from ..configs.trunk import TrunkConfig
from ..kernels.attention import GROUP, KVFormat, Queries
from ..kernels.backend import Kernels
from .load import Model
from .trunk import Execution, Trunk

_ROWS = 32  # logits are taken for multiples of this


Layers = tuple[int, ...]


class Text(NamedTuple):
    """A prompt and its answer. Only the answer, the tokens from index `begin` on, is looked at."""

    ids: Sequence[int]
    begin: int


class Comparison(NamedTuple):
    """What a subset of layers makes of an answer, against all layers. Every array is [tokens of the answer]."""

    kl: np.ndarray
    """Kullback-Leibler divergence of the subset's distribution from that of all layers, in nats."""
    same: np.ndarray
    """Whether both would have chosen the same token."""
    nats: np.ndarray
    """Minus the log-probability that the subset gives to the answer's token."""
    all_nats: np.ndarray
    """The same of all layers."""


class Reader:
    """Reads texts of at most `longest` tokens with `model`, on one device; `kv` None: the form that serves it."""

    def __init__(self, model: Model, longest: int, kv: KVFormat | None = None) -> None:
        if longest < 2:
            raise ValueError(f"texts need at least 2 tokens, got {longest}")
        self.model = model
        self.longest = min(-(-longest // BLOCK) * BLOCK, -(-model.config.context_length // BLOCK) * BLOCK)
        if longest > self.longest:
            raise ValueError(f"a text of {longest} tokens is longer than the {model.config.context_length} positions")
        native = model.kernels.attention == "cpu"
        self._kv = kv or KVFormat("int8" if native else "float32")
        self._static = (model.config, self.longest // BLOCK, model.kernels, self._kv)

    def states(self, ids: Sequence[int]) -> np.ndarray:
        """Hidden states `[L + 1, T, D]`: the embedded text, then after each of the layers."""
        n, x = len(ids), self._embed(ids)
        made = [x]
        for layer in range(self.model.config.n_layers):
            x = self._through(x, n, (layer,))
            made.append(x)
        return np.stack([np.asarray(state)[:n] for state in made])

    def logits(self, text: Text, layers: Sequence[int] | None = None) -> jax.Array:
        """Logits `[R, V]` that chose the tokens of the answer, padded with repeats to a multiple of 32 rows."""
        listed = range(self.model.config.n_layers) if layers is None else layers
        return self._head(text, self._through(self._embed(text.ids), len(text.ids), listed))

    def choices(self, text: Text) -> np.ndarray:
        """Int32 tokens: what the whole trunk holds most likely in place of each token of the answer."""
        return np.asarray(self.logits(text).argmax(-1), np.int32)[: len(text.ids) - text.begin]

    def compare(self, text: Text, subsets: Sequence[Sequence[int]]) -> list[Comparison]:
        """Every subset of layers against all of them. What subsets have in common at their beginning is run once."""
        answer = np.asarray(text.ids[text.begin :], np.int32)
        n = len(answer)
        targets = jnp.asarray(np.pad(answer, (0, -n % _ROWS)))
        whole = tuple(range(self.model.config.n_layers))
        states = self._after(text.ids, [whole, *map(tuple, subsets)])
        expected = jax.nn.log_softmax(self._head(text, states[whole]))
        made = [_compare(expected, self._head(text, states[tuple(layers)]), targets) for layers in subsets]
        return [Comparison(*(np.asarray(part)[:n] for part in one)) for one in made]

    def _after(self, ids: Sequence[int], subsets: Sequence[Layers]) -> dict[Layers, jax.Array]:
        """Hidden states after each subset. In sorted order those with a common beginning are neighbours, so the states
        that are still of use are always those along one path."""
        ordered = sorted(set(subsets))
        path = [(0, self._embed(ids))]  # how many layers of the current subset, and the states after them
        made: dict[Layers, jax.Array] = {}
        for before, layers, after in zip([(), *ordered], ordered, [*ordered[1:], ()], strict=False):
            while path[-1][0] > _common(before, layers):
                path.pop()
            n, x = path[-1]
            shared = _common(layers, after)
            if shared > n:
                n, x = shared, self._through(x, len(ids), layers[n:shared])
                path.append((n, x))
            made[layers] = self._through(x, len(ids), layers[n:])
        return made

    def _embed(self, ids: Sequence[int]) -> jax.Array:
        return _embed(self._static, self.model.params, self._padded(ids), jnp.int32(len(ids)))

    def _through(self, x: jax.Array, n_tokens: int, layers: Sequence[int]) -> jax.Array:
        order = np.zeros(self.model.config.n_layers, np.int32)
        order[: len(layers)] = layers
        sizes = jnp.int32(n_tokens), jnp.int32(len(layers))
        return _through(self._static, self.model.params, x, jnp.asarray(order), *sizes)

    def _head(self, text: Text, x: jax.Array) -> jax.Array:
        rows = np.arange(text.begin - 1, len(text.ids) - 1, dtype=np.int32)
        rows = np.pad(rows, (0, -len(rows) % _ROWS), mode="edge")
        return _logits(self._static, self.model.params, x, jnp.asarray(rows))

    def _padded(self, ids: Sequence[int]) -> jax.Array:
        if len(ids) > self.longest:
            raise ValueError(f"a text of {len(ids)} tokens is longer than the {self.longest} this reader was made for")
        return jnp.asarray(np.pad(np.asarray(ids, np.int32), (0, self.longest - len(ids))))


Static = tuple[TrunkConfig, int, Kernels, KVFormat]


class _Continued(Trunk):
    """A trunk that starts from hidden states instead of token ids. Layers see the KV of their own alone, so that it
    does not matter which ran before, in which call."""

    def embed_tokens(self, ids: jax.Array, n_tokens: jax.Array, run: Execution) -> jax.Array:
        return ids


@functools.partial(jax.jit, static_argnums=0)
def _embed(static: Static, params: Mapping[str, Any], ids: jax.Array, n_tokens: jax.Array) -> jax.Array:
    return Trunk(static[0], params).embed_tokens(ids, n_tokens, _execution(static))


@functools.partial(jax.jit, static_argnums=0)
def _through(
    static: Static, params: Mapping[str, Any], x: jax.Array, layers: jax.Array, n_tokens: jax.Array,
    n_layers: jax.Array,
) -> jax.Array:  # fmt: skip
    """Hidden states `[T, D]` of one text after the first `n_layers` of the list `layers`."""
    config, blocks, _, kv = static
    T = blocks * BLOCK
    starts = jnp.arange(0, T, GROUP, dtype=jnp.int32)
    places = jnp.arange(T, dtype=jnp.int32)
    queries = Queries(
        slots=jnp.zeros(T, jnp.int32),
        positions=jnp.where(places < n_tokens, places, -1),
        n_tokens=n_tokens,
        starts=starts,
        counts=jnp.clip(n_tokens - starts, 0, GROUP),
        n_groups=-(-n_tokens // GROUP),
        tables=1 + jnp.arange(blocks, dtype=jnp.int32)[None],
    )
    shapes = kv.pool(blocks + 1, config.n_layers, config.n_kv_heads, config.head_dim)
    pool = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return _Continued(config, params)(x, queries, pool, layers, n_layers, _execution(static))[0]


@functools.partial(jax.jit, static_argnums=0)
def _logits(static: Static, params: Mapping[str, Any], x: jax.Array, rows: jax.Array) -> jax.Array:
    return Trunk(static[0], params).logits(x[rows], jnp.int32(len(rows)), _execution(static))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading entries that are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _execution(static: Static) -> Execution:
    _, blocks, kernels, _ = static
    return Execution(kernels, tile=32, head_tile=32, context=blocks * BLOCK)


@jax.jit
def _compare(p: jax.Array, part: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    """The fields of a `Comparison`, of log-probabilities `[R, V]` of all layers, logits `[R, V]` of the subset and
    tokens `[R]`."""
    q = jax.nn.log_softmax(part)
    chosen = targets[:, None]
    return (
        jnp.sum(jnp.exp(p) * (p - q), axis=-1),
        p.argmax(-1) == part.argmax(-1),
        -jnp.take_along_axis(q, chosen, axis=1)[:, 0],
        -jnp.take_along_axis(p, chosen, axis=1)[:, 0],
    )
