"""Whole steps of a small trunk with the TPU's kernels, in TPU interpret mode: the ids are those of plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from umbra.configs.engine import EngineConfig
from umbra.kernels.attention import KVFormat
from umbra.kernels.backend import Kernels
from umbra.kernels.draft import LOOKUP, SHADOW
from umbra.model.load import Model, load_model
from umbra.serving.engine import make_mesh
from umbra.serving.engine.drafting import Drafter
from umbra.serving.engine.programs import Program, cost_entries, programs, step_rows, step_sizes
from umbra.serving.engine.request import SamplingParams
from umbra.serving.engine.state import Guided, SlotState, StepInput, empty_rows, fill_row, input_shapes
from umbra.serving.engine.step import Fixed

CONFIG = EngineConfig(slots=2, context_length=256, blocks=5, prefill_chunk=30, decode_steps=2)
TPU = Kernels("tpu", "tpu", "xla")
PROMPTS = (23, 5)
"""Tokens of each prompt."""


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Kernels run in TPU interpret mode with everything it can check."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    strict = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise",
        vector_clock_size=256,  # by default all DMAs share a clock, and no two of them ever race
    )  # fmt: skip
    try:
        with pltpu.force_tpu_interpret_mode(strict):
            yield
        races = interpret_pallas_call.races
        assert races is None or not races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def programs_of(model: Model, kernels: Kernels, kv: str, shadow: Any = None) -> dict[str, Program]:
    """The engine's programs by kind."""
    mesh = make_mesh(jax.devices()[:1], model.config)
    listed = programs(
        model.config, CONFIG, mesh, params=model.params, kernels=kernels, kv=KVFormat(kv, "float32"), shadow=shadow
    )
    return {program.kind: program for program in listed}


def rows_for(model: Model) -> SlotState:
    return empty_rows(CONFIG.slots, CONFIG.context(model.config), model.config.vocab_size)


def generate(model: Model, kernels: Kernels) -> np.ndarray:
    """Tokens int32 `[passes, slots]`: a prompt in each slot, then two decode passes in one loop on the device."""
    listed = programs_of(model, kernels, "float32")
    prefill, decode = listed["prefill"], listed["decode_n"]
    rows = rows_for(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in PROMPTS]
    for at, prompt in enumerate(prompts):
        fill_row(
            rows, at, SamplingParams(temperature=0.0), seed=0, stop_ids=(), limit=CONFIG.context(model.config) - 1,
            prompt=prompt, generated=np.array([], np.int32), position=len(prompt) - 1, active=True,
        )  # fmt: skip
    state: Any = jax.tree.map(jnp.asarray, rows)
    pool: Any = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), prefill.args[1])
    layers = jnp.asarray([model.config.n_layers, *range(model.config.n_layers)], jnp.int32)

    def run(program: Program, inputs: StepInput) -> np.ndarray:
        nonlocal pool, state
        pool, state, result, _ = program.jit()(Fixed(dict(model.params), None), pool, state, inputs, layers)
        return np.asarray(result.tokens)[:, :, 0]

    return np.concatenate([run(prefill, _prefill_input(model, prompts)), run(decode, _decode_input(model))])


def _empty(model: Model, *, prefill: bool) -> StepInput:
    tokens, groups = step_sizes(CONFIG, prefill)
    width, rows, vocab = CONFIG.table_width(model.config), step_rows(CONFIG, "cpu"), model.config.vocab_size
    shapes = input_shapes(1, CONFIG.slots, tokens, groups, width, rows, vocab)
    empty = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    empty = empty._replace(guided=Guided.nothing(1, CONFIG.slots, rows, vocab))
    tables = 1 + np.arange(CONFIG.slots * width, dtype=np.int32).reshape(CONFIG.slots, width)
    return empty._replace(
        tables=tables, positions=np.full_like(empty.positions, -1), last=np.full_like(empty.last, -1),
        capacity=np.full_like(empty.capacity, CONFIG.context(model.config)),
    )  # fmt: skip


def _prefill_input(model: Model, prompts: list[np.ndarray]) -> StepInput:
    from umbra.kernels.attention import GROUP

    inputs, at, group = _empty(model, prefill=True), 0, 0
    for slot, prompt in enumerate(prompts):
        n = len(prompt)
        inputs.ids[at : at + n], inputs.slots[at : at + n] = prompt, slot
        inputs.positions[at : at + n] = np.arange(n)
        for start in range(0, n, GROUP):
            inputs.starts[group], inputs.counts[group] = at + start, min(GROUP, n - start)
            group += 1
        at += n
        inputs.last[slot] = at - 1
    inputs.sizes[0] = at, group
    return inputs


def _decode_input(model: Model) -> StepInput:
    inputs = _empty(model, prefill=False)
    inputs.decodes[:] = True
    return inputs


def test_ids_are_those_of_plain_jax(interpreted: None) -> None:
    """With 8 bits a channel, which bring the kernels for products."""
    model = load_model("tiny", quant="int8", kernels=TPU)
    got = generate(model, TPU)
    assert got.shape == (3, CONFIG.slots) and (got >= 0).all()
    assert np.array_equal(got, generate(model, Kernels()))


def test_blocks_on_the_chip_change_nothing(interpreted: None) -> None:
    """The loop with its window of KV and without: the same ids, the same pool. One sequence has a full block when the
    loop starts, the other fills its first one in the loop."""
    model = load_model("tiny", quant="none", kernels=TPU)
    staged = programs_of(model, TPU, "int8")["decode_n"]
    plain = staged
    while plain.fallback is not None:
        plain = plain.fallback
    assert staged.hot and plain.name == staged.name and not plain.hot
    assert [x.shape[0] for x in staged.hot] == [4, 4]  # values and scales: all blocks there are
    rng = np.random.default_rng(0)

    def stored(s: Any) -> np.ndarray:
        return rng.integers(-127, 128, s.shape, s.dtype) if s.dtype == np.int8 else rng.random(s.shape, s.dtype) / 64

    pool = jax.tree.map(stored, staged.args[1])
    rows = rows_for(model)
    for at, position in enumerate((200, 127)):
        fill_row(
            rows, at, SamplingParams(temperature=0.0), seed=0, stop_ids=(), limit=255,
            prompt=np.ones(position + 1, np.int32), generated=np.array([], np.int32), position=position, active=True,
        )  # fmt: skip
    layers = np.array([model.config.n_layers, *range(model.config.n_layers)], np.int32)

    def run(program: Program) -> Any:
        new_pool, _, result, _ = program.jit()(
            Fixed(dict(model.params), None), pool, rows, _decode_input(model), layers
        )
        return jax.tree.map(np.asarray, (result.tokens, [part[1:] for part in new_pool if part is not None]))

    tokens, blocks = run(staged)
    expected_tokens, expected_blocks = run(plain)
    assert (tokens[:, :, 0] >= 0).all() and np.array_equal(tokens, expected_tokens)
    assert all(map(np.array_equal, blocks, expected_blocks))


def test_drafted_tokens_change_nothing(random_shadow: Callable, interpreted: None) -> None:
    """Passes of several tokens: one slot drafts what will be chosen, and a wrong token behind it; the other only wrong
    ones. Then a shadow of random numbers drafts on."""
    model = load_model("tiny", kernels=TPU)
    plain = programs_of(model, TPU, "float32")["decode_n"]
    shadow = random_shadow(model.config.vocab_size, model.config.d_model)
    drafting = programs_of(model, TPU, "float32", shadow)["decode_n"]
    layers = np.array([model.config.n_layers, *range(model.config.n_layers)], np.int32)
    rows = rows_for(model)
    for at in range(CONFIG.slots):
        fill_row(
            rows, at, SamplingParams(), seed=0, stop_ids=(), limit=250, prompt=np.arange(100, dtype=np.int32) + at,
            generated=np.array([7]), position=100, active=True, sources=LOOKUP | SHADOW,
        )  # fmt: skip

    def run(program: Program, drafter: Any, rows: SlotState, times: int) -> tuple[list[np.ndarray], np.ndarray]:
        pool: Any = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), program.args[1])
        state: Any = jax.tree.map(jnp.asarray, rows)
        results = []
        for _ in range(times):
            pool, state, result, _ = program.jit()(
                Fixed(dict(model.params), drafter), pool, state, _decode_input(model), layers
            )
            results.append(result)
        tokens = np.concatenate([np.asarray(result.tokens) for result in results])  # [passes, slots, W]
        drafted = sum(np.asarray(result.drafted).sum(0) for result in results)
        return [tokens[:, slot][tokens[:, slot] >= 0] for slot in range(CONFIG.slots)], drafted

    expected, _ = run(plain, None, rows, 3)
    rows.drafts[0, :4] = [*expected[0][:3], (expected[0][3] + 1) % 512]
    rows.drafts[1, :4] = (expected[1][:4] + 1) % 512
    rows.n_drafts[:], rows.draft_odds[:] = 4, 1.0
    cost = np.ones(cost_entries(step_rows(CONFIG, "cpu")), np.float32)
    got, drafted = run(drafting, Drafter(shadow, cost, np.int32(0)), rows, 1)
    assert len(got[0]) >= 5 and len(got[1]) >= 2 and (drafted >= 4).all()
    for mine, theirs in zip(got, expected, strict=True):
        n = min(len(mine), len(theirs))
        assert np.array_equal(mine[:n], theirs[:n])


def test_the_window_can_be_switched_off() -> None:
    model = load_model("tiny", kernels=TPU)
    mesh = make_mesh(jax.devices()[:1], model.config)
    off = dataclasses.replace(CONFIG, hot_window="off")
    listed = programs(model.config, off, mesh, params=model.params, kernels=TPU, kv=KVFormat("float32", "float32"))
    assert not any(program.hot or program.fallback for program in listed)
    with pytest.raises(ValueError, match="supported: auto, off"):
        EngineConfig(hot_window="on")  # type: ignore[arg-type]
