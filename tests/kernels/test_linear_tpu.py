"""The Pallas products: against plain JAX in TPU interpret mode, and compiled for real chips."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import tpu as pltpu

from umbra.configs.models import NAMED, named
from umbra.kernels.linear import Quantised, reference, tpu
from umbra.scripts.tpu import chips

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
NOTHING: dict[str, Any] = dict(norm=None, up=None, activation=None, bias=None, post_norm=None, residual=None)
LAYERS = 10
"""More than the eight whose scales are fetched together."""
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Kernels run in TPU interpret mode with everything it can check."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    try:
        with pltpu.force_tpu_interpret_mode(STRICT):
            yield
        races = interpret_pallas_call.races
        assert races is None or not races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


def quantised(form: str, out: int, inputs: int, *, layers: int | None = LAYERS) -> Quantised:
    rng = np.random.default_rng((out, inputs))
    lead = () if layers is None else (layers,)
    if form == "c8":
        q = jnp.asarray(rng.integers(-127, 128, (*lead, out, inputs)), jnp.int8)
        scale = jnp.asarray(rng.uniform(0.5, 2, (*lead, out)) / 127, jnp.float32)
    else:
        q = jnp.asarray(rng.integers(-8, 8, (*lead, inputs, out)), jnp.int4)
        scale = jnp.asarray(rng.uniform(0.5, 2, (*lead, inputs // 32, out)) / 8, jnp.bfloat16)
    return Quantised({"q": q, "scale": scale}, form, "tpu", (*lead, out, inputs), inputs, layers is not None)


def close(got: jax.Array, want: jax.Array) -> None:
    """Both round the rows to bfloat16, perhaps a few differently, and add up in float32 in their own order."""
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * float(jnp.abs(want).max()))


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "rows", "inputs", "outs"),
    [
        ("c8", 8, 256, (384, 128, 128)),  # several weights on one walk
        ("c8", 5, 64, (64,)),  # nothing is whole tiles
        ("c8", 20, 512, (1500,)),  # the last block is not whole
        ("s4", 8, 1056, (256, 40)),  # inputs in chunks, the last one short
    ],
)
def test_products_are_those_of_plain_jax(
    interpreted: None, form: str, rows: int, inputs: int, outs: tuple[int, ...]
) -> None:
    weights = [quantised(form, out, inputs) for out in outs]
    how = NOTHING | dict(n_rows=jnp.int32(rows), norm=(random(LAYERS, inputs), 1e-5))
    x = random(rows, inputs)
    got = tpu.linear(x, weights, jnp.int32(8), **how)
    for one, want in zip(got, reference.linear(x, weights, jnp.int32(8), **how, tile=None), strict=True):
        close(one, want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_residual_run_in_the_kernel(interpreted: None, activation: str) -> None:
    weight = quantised("c8", 128, 256)
    how = NOTHING | dict(
        n_rows=jnp.int32(8), up=random(8, 256, seed=1), activation=activation, residual=random(8, 128)
    )  # fmt: skip
    (got,) = tpu.linear(random(8, 256), [weight], jnp.int32(2), **how)
    (want,) = reference.linear(random(8, 256), [weight], jnp.int32(2), **how, tile=None)
    close(got, want)


def test_bias_and_norm_after_the_product(interpreted: None) -> None:
    weight = quantised("c8", 128, 64)
    how = NOTHING | dict(
        n_rows=jnp.int32(4), bias=[random(LAYERS, 128)], post_norm=(random(LAYERS, 128, seed=1), 1e-6),
        residual=random(4, 128),
    )  # fmt: skip
    (got,) = tpu.linear(random(4, 64), [weight], jnp.int32(0), **how)
    (want,) = reference.linear(random(4, 64), [weight], jnp.int32(0), **how, tile=None)
    close(got, want)


def test_more_rows_than_fit_are_walked_in_blocks(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "ROWS", 32)
    weights = [quantised("c8", 256, 128), quantised("c8", 128, 128)]
    how = NOTHING | dict(n_rows=jnp.int32(70), norm=(random(LAYERS, 128), 1e-5))
    x = random(70, 128)
    got = tpu.linear(x, weights, jnp.int32(8), **how)
    for one, want in zip(got, reference.linear(x, weights, jnp.int32(8), **how, tile=None), strict=True):
        close(one, want)


def test_a_row_depends_on_itself_alone(interpreted: None) -> None:
    """Also beside rows of NaN, as padding may hold."""
    weight = quantised("c8", 256, 128)
    how = NOTHING | dict(n_rows=jnp.int32(8), norm=(random(LAYERS, 128), 1e-5))
    x = random(8, 128)
    (alone,) = tpu.linear(x, [weight], jnp.int32(8), **how)
    (beside,) = tpu.linear(x.at[3:].set(jnp.nan), [weight], jnp.int32(8), **how)
    assert np.array_equal(alone[:3], beside[:3])


def test_weights_of_other_layouts_are_refused() -> None:
    weight = Quantised({"q": jnp.zeros((1, 32, 32), jnp.int8)}, "w8", "plain", (1, 32, 32), 32, True)
    with pytest.raises(ValueError, match="layout is 'plain'; load it with the layout 'tpu'"):
        tpu.linear(random(4, 32), [weight], jnp.int32(0), **NOTHING, n_rows=jnp.int32(4))


# --- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bfloat16", "float32", "c8"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_greedy_head_sees_the_logits(interpreted: None, form: str, softcap: float | None) -> None:
    """Token and logit are those of the full logits, bit for bit."""
    vocabulary, width, rows = 3001, 64, 5
    table = quantised("c8", vocabulary, width, layers=None) if form == "c8" else random(vocabulary, width).astype(form)
    how: dict[str, Any] = dict(n_rows=jnp.int32(rows), norm=(random(width), 1e-5))
    (logits,) = tpu.linear(random(rows, width), [table], None, **NOTHING | how)
    token, highest, total = tpu.greedy_head(random(rows, width), table, **how, softcap=softcap)
    wanted, best, sums = reference.summary(reference.capped(logits, softcap))
    assert np.array_equal(token, wanted)
    np.testing.assert_array_equal(highest, best) if softcap is None else np.testing.assert_allclose(highest, best)
    np.testing.assert_allclose(total, sums, rtol=1e-6)


def test_odd_logits(interpreted: None) -> None:
    """Ties between blocks go to the lowest id, NaN counts as -inf, +inf as the largest number, and a row without any
    finite logit gives token 0."""
    table = jnp.zeros((2000, 32), jnp.float32).at[jnp.asarray([700, 1999]), 0].set(3.0)
    table = table.at[5, 1].set(jnp.nan).at[1500, 2].set(jnp.inf)
    x = jnp.zeros((3, 32)).at[0, 0].set(1.0)
    tie = table.at[5, 1].set(0.0).at[1500, 2].set(0.0)
    how: dict[str, Any] = dict(norm=None, n_rows=jnp.int32(3), softcap=None)
    token, highest, _ = tpu.greedy_head(x, tie, **how)
    assert (int(token[0]), float(highest[0])) == (700, 3.0)
    token, highest, _ = tpu.greedy_head(x.at[1, 2].set(1.0).at[:, 1].set(1.0), table, **how)
    assert int(token[1]) == 1500 and float(highest[1]) == np.finfo(np.float32).max
    token, highest, total = tpu.greedy_head(x, jnp.full_like(table, jnp.nan), **how)
    assert token.tolist() == [0, 0, 0] and bool((highest == -jnp.inf).all()) and bool((total == -jnp.inf).all())


@pytest.mark.parametrize("form", ["c8", "bfloat16", "float32"])
@pytest.mark.parametrize("vocabulary", [512, 500])  # whole tiles, and not
def test_rows_of_a_table(interpreted: None, form: str, vocabulary: int) -> None:
    table = quantised("c8", vocabulary, 64, layers=None) if form == "c8" else random(vocabulary, 64).astype(form)
    ids = jnp.asarray([0, vocabulary - 1, 7, 7, 33, 1, 2, 8, 64], jnp.int32)
    for wanted in (ids, ids[:8]):
        got = tpu.embed(wanted, table, n_rows=jnp.int32(len(wanted)))
        assert np.array_equal(got, reference.embed(wanted, table, n_rows=jnp.int32(len(wanted))))


# --- block sizes -----------------------------------------------------------------------------------------------------


def abstract(form: str, out: int, inputs: int) -> tpu.Stack:
    one = jax.ShapeDtypeStruct
    if form == "s4":
        return tpu.Stack(form, one((2, inputs, out), jnp.int4), one((2, inputs // 32, out), jnp.bfloat16))  # type: ignore[arg-type]
    if form == "c8":
        return tpu.Stack(form, one((16, out, inputs), jnp.int8), one((16, out), jnp.float32))  # type: ignore[arg-type]
    return tpu.Stack(form, one((2, out, inputs), jnp.dtype(form)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NAMED if not name.startswith("tiny")])
@pytest.mark.parametrize("form", ["c8", "s4", "bfloat16"])
def test_every_product_of_every_model_fits_every_chip(name: str, form: str) -> None:
    c = named(name)
    for model in (m for m in (1, 4, 8) if c.n_kv_heads % m == 0):
        heads, kv, wide = c.n_heads * c.head_dim // model, c.n_kv_heads * c.head_dim // model, c.d_ff // model
        groups = [((heads, kv, kv), c.d_model), ((c.d_model,), heads), ((wide, wide), c.d_model), ((c.d_model,), wide)]
        for outs, inputs in [*groups, ((c.vocab_size // model,), c.d_model)]:
            if form == "s4" and inputs % 32:
                continue
            for rows in (1, 8, 32, 160, 640, 2048):
                plan = tpu.plan([abstract(form, out, inputs) for out in outs], rows, 2, True)
                assert plan.vmem <= tpu.BUDGET < min(tpu.VMEM.values()) / 2
                for part, out in zip(plan.parts, outs, strict=True):
                    assert part.channels == out or part.channels % 128 == 0
                    assert (part.blocks - 1) * part.channels < out


@pytest.mark.parametrize(("form", "out", "inputs"), [("c8", 3000, 512), ("s4", 1024, 2048), ("bfloat16", 5000, 1024)])
def test_every_byte_of_a_weight_is_visited_once(form: str, out: int, inputs: int) -> None:
    """Blocks are fetched when their index changes: what that adds up to is what the call declares."""
    stacks = [abstract(form, out, inputs), abstract(form, 512, inputs)]
    plan = tpu.plan(stacks, 8, 1, False)
    assert plan.turns > len(stacks)
    for stack, part in zip(stacks, plan.parts, strict=True):
        q, *scales = tpu._weight_operands(stack, part)
        visited, before = 0, None
        for turn in range(plan.turns):
            at = tuple(int(i) for i in q.spec.index_map(turn, 0, [1]))
            if at != before:
                axis = 2 if form == "s4" else 1
                first = at[axis] * part.channels
                visited += (min(first + part.channels, stack.out) - first) * inputs
            before = at
        assert visited * (0.5 if form == "s4" else stack.q.dtype.itemsize) == q.visited
        # Eight layers' scales of a channel lie in one tile.
        layers = 1 if form == "s4" else 8
        assert [s.visited for s in scales] == [
            layers * scale.size // len(scale) * scale.dtype.itemsize for scale in [stack.scale][: len(scales)]
        ]


# --- compiled for a chip ---------------------------------------------------------------------------------------------


@pytest.fixture
def uncached() -> Iterator[None]:
    """Programs for a topology cannot be read back from the compilation cache without a TPU."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@functools.cache
def mesh_of(chip: str) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(chips.devices(TOPOLOGIES[chip])[:1]), ("one",))


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("form", ["c8", "s4"])
def test_compiles_and_reads_weights_once(chip: str, form: str, uncached: None) -> None:
    """Three layers of a feed-forward network and a head: one kernel a product, and no copy of a weight."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    from umbra.scripts.tpu import hlo, traffic

    width, wide, rows, vocabulary = 1024, 3584, 8, 32064
    mesh = mesh_of(chip)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), tree)

    weights = placed(jax.eval_shape(lambda: (quantised(form, wide, width), quantised(form, width, wide))))
    x = placed(jax.ShapeDtypeStruct((rows, width), jnp.float32))
    norms = placed(jax.ShapeDtypeStruct((LAYERS, width), jnp.float32))
    table = placed(jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16))

    def step(x: jax.Array, weights: Any, norms: jax.Array, table: jax.Array) -> Any:
        def layer(i: jax.Array, x: jax.Array) -> jax.Array:
            how = NOTHING | dict(n_rows=jnp.int32(rows))
            gate, up = tpu.linear(x, [weights[0]] * 2, i, **how | dict(norm=(norms, 1e-5)))
            (x,) = tpu.linear(gate, [weights[1]], i, **how | dict(up=up, activation="silu", residual=x))
            return x

        x = jax.lax.fori_loop(0, LAYERS, layer, x)
        return tpu.greedy_head(x, table, norm=(norms[0], 1e-5), n_rows=jnp.int32(rows), softcap=None)

    specs = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs,) * 4, out_specs=specs, check_vma=False)
    text = jax.jit(sharded).lower(x, weights, norms, table).compile().as_text()
    counted = traffic.count(hlo.parse(text))
    assert counted.kernels == {"umbra_linear": 2 * LAYERS, "umbra_greedy_head": 1}
    first, second = (
        sum(p.size * (0.5 if p.dtype == jnp.int4 else p.dtype.itemsize) for p in w.parts.values()) for w in weights
    )
    least = 2 * first + second + table.size * 2
    # On a v5p, whose two cores share no on-chip memory, activations go through HBM.
    assert 0.99 * least <= counted.bytes <= (1.06 if chip == "v5p" else 1.03) * least


def test_a_table_of_tokens_stays_in_hbm(uncached: None) -> None:
    """Of a table that rows are looked up in, and that is the head of several passes in a loop, tiles are fetched: the
    whole of it would just fit the chip."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    from umbra.scripts.tpu import hlo, traffic

    vocabulary, width, rows, passes = 24576, 1024, 16, 4
    whole = jax.sharding.NamedSharding(mesh_of("v5e"), jax.sharding.PartitionSpec())
    table = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16, sharding=whole)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=whole)

    def step(ids: jax.Array, table: jax.Array) -> jax.Array:
        def one(_: jax.Array, ids: jax.Array) -> jax.Array:
            x = tpu.embed(ids, table, n_rows=jnp.int32(rows))
            return tpu.greedy_head(x, table, norm=None, n_rows=jnp.int32(rows), softcap=None)[0]

        return jax.lax.fori_loop(0, passes, one, ids)

    specs = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(step, mesh=mesh_of("v5e"), in_specs=specs, out_specs=specs, check_vma=False)
    text = jax.jit(sharded).lower(ids, table).compile().as_text()
    counted = traffic.count(hlo.parse(text))
    assert counted.bytes == pytest.approx(passes * (vocabulary + 8 * rows) * width * 2, rel=1e-3)
