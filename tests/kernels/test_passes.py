"""The bookkeeping of a pass: native code against plain JAX in every bit, and both against what plain Python says."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.configs.engine import MAX_DRAFT
from umbra.kernels import native
from umbra.kernels.passes import Advanced, Grown, Layout, Pace, Sent, Slots, advance, lay_out

J, S, V, K, CLOSE = MAX_DRAFT, 64, 12, 5, (2, 8)
INTS = np.int32


class Engine(NamedTuple):
    """Sizes of a program."""

    slots: int
    rows: int
    tokens: int = 0
    groups: int = 0
    tile: int | None = None
    paced: bool = True


ENGINES = {
    "one slot": Engine(slots=1, rows=1, paced=False),
    "prompts": Engine(slots=3, rows=3, tokens=20, groups=4, paced=False),
    "drafts": Engine(slots=1, rows=17),
    "few rows": Engine(slots=5, rows=14, tile=8),
    "everything": Engine(slots=4, rows=70, tokens=24, groups=6, tile=16),
}


class Case(NamedTuple):
    slots: Slots
    sent: Sent
    pace: Pace | None
    chosen: np.ndarray
    """For each row: whether it agrees with what was drafted, and what it chooses if not."""


def some_slots(rng: np.random.Generator, n: int) -> Slots:
    position = rng.integers(0, S - 1, n)
    n_drafts = rng.integers(0, J + 1, n) * (rng.random(n) < 0.7)
    there = np.arange(J) < n_drafts[:, None]
    conclude = np.where(np.arange(K) < rng.integers(0, K + 1, n)[:, None], rng.integers(0, V, (n, K)), -1)
    long = np.arange(CLOSE[1] - 1, -1, -1) < rng.integers(0, 4, (n, CLOSE[0]))[..., None]
    stops = np.where(rng.random((n, 4)) < 0.3, rng.integers(0, V, (n, 4)), -1)
    return Slots(
        token=rng.integers(0, V, n),
        position=position,
        active=rng.random(n) < 0.8,
        n_drafts=n_drafts,
        thinking=rng.random(n) < rng.choice([0, 0.6]),
        conclude_at=position + rng.integers(-K - 1, J, n),
        counts=rng.integers(0, 9, (n, V)),
        history=rng.integers(0, 4, (n, S)),
        limit=np.minimum(position + rng.integers(0, 40, n), S - 1),
        begin=rng.integers(0, position + 2),
        stop_ids=stops,
        drafts=np.where(there, rng.integers(0, 4, (n, J)), -1),
        draft_sources=np.where(there, rng.integers(1, 5, (n, J)), 0),
        draft_odds=np.where(there, rng.choice([0, 0.1, 0.5, 0.5, 0.8, 0.97, 1, rng.random()], (n, J)), 0),
        conclude=conclude,
        close=np.where(long, rng.integers(0, 4, (n, *CLOSE)), -1),
    )


def some_input(rng: np.random.Generator, engine: Engine, slots: Slots) -> Sent:
    """Slots that decode, finish a prompt, are in the middle of one, or wait."""
    n = engine.slots
    fields = {name: np.zeros(engine.tokens, INTS) for name in ("ids", "slots", "positions")}
    groups = {name: np.zeros(engine.groups, INTS) for name in ("starts", "counts")}
    last, decodes = np.full(n, -1), rng.random(n) < 0.8
    used = n_groups = 0
    for slot in rng.permutation(n):
        size = int(rng.integers(1, 8))
        if used + size > engine.tokens or n_groups == engine.groups or rng.random() < 0.4:
            continue
        at = slice(used, used + size)
        fields["ids"][at], fields["slots"][at] = rng.integers(0, V, size), slot
        fields["positions"][at] = rng.integers(0, S - 16) + np.arange(size)
        groups["starts"][n_groups], groups["counts"][n_groups] = used, size
        used, n_groups = used + size, n_groups + 1
        decodes[slot] = False
        last[slot] = used - 1 if rng.random() < 0.6 else -1
    capacity = slots.position + rng.integers(1, 40, n)
    tables, sizes = rng.integers(0, 9, (n, 2)), np.array([[used, n_groups]])
    return Sent(**fields, **groups, last=last, decodes=decodes, capacity=capacity, tables=tables, sizes=sizes)


def some_case(engine: Engine, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    slots = some_slots(rng, engine.slots)
    steps = rng.choice([0.001, 0.02, 0.1, 0.5], engine.tokens + engine.rows + 1)
    pace = Pace(1 + np.cumsum(steps) - rng.choice([0, 0.3]) * (rng.random(len(steps)) < 0.1), rng.choice([0, 0, 3, 15]))
    chosen = np.where(rng.random(engine.rows) < rng.choice([0.5, 0.95]), -1, rng.integers(0, V, engine.rows))
    case = Case(slots, some_input(rng, engine, slots), pace if engine.paced else None, chosen)
    types = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
    return jax.tree.map(lambda x: np.asarray(x, types.get(np.asarray(x).dtype)), case)


@functools.cache
def program(engine: Engine, backend: str):
    def run(case: Case) -> tuple[Layout, Advanced, Grown]:
        place = lay_out(case.slots, case.sent, case.pace, engine.rows, engine.tile, backend=backend)
        tokens = jnp.where(case.chosen < 0, jnp.maximum(place.draft, 0), case.chosen)
        return place, *advance(case.slots, place, tokens, backend=backend)

    return jax.jit(run)


def run(engine: Engine, backend: str, case: Case) -> tuple[Layout, Advanced, Grown]:
    return jax.tree.map(np.asarray, program(engine, backend)(case))


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    if reason := native.unavailable():
        pytest.skip(reason)


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_native_code_is_plain_jax_and_plain_python(name: str, seed: int) -> None:
    engine = ENGINES[name]
    case = some_case(engine, seed)
    expected, got = run(engine, "xla", case), run(engine, "cpu", case)
    for kind, a, b in zip(("layout", "slots", "grown"), got, expected, strict=True):
        flat, tree = jax.tree_util.tree_flatten_with_path(b)
        for (path, value), other in zip(flat, tree.flatten_up_to(a), strict=True):
            assert value.dtype == other.dtype and np.array_equal(value, other), f"{kind}{jax.tree_util.keystr(path)}"
    check_layout(engine, case, got[0])
    for slot in range(engine.slots):
        check_slot(case, slot, *got)


def check_layout(engine: Engine, case: Case, place: Layout) -> None:
    """The tokens and rows, as lists."""
    slots, sent = case.slots, case.sent
    n = int(sent.sizes[0, 0])
    tokens = list(zip(sent.ids[:n], sent.slots[:n], sent.positions[:n], strict=True))
    groups = list(zip(sent.starts, sent.counts, strict=True))[: int(sent.sizes[0, 1])]
    rows, room = [], np.minimum(sent.capacity, slots.limit) - slots.position - 1
    for b in range(engine.slots):
        width, drafted = 0, int(place.n_drafts[b])
        if sent.decodes[b] and slots.active[b]:
            width = 1 + drafted
            assert 0 <= drafted <= min(slots.n_drafts[b], max(room[b], 0))
            line = [slots.token[b], *slots.drafts[b, :drafted]]
            groups.append((len(tokens), width))
            rows += [(len(tokens) + w, b, slots.position[b] + 1 + w, line[1:][:w]) for w in range(width)]
            tokens += [(id_, b, slots.position[b] + w) for w, id_ in enumerate(line)]
        elif sent.last[b] >= 0:
            rows.append((sent.last[b], b, sent.positions[sent.last[b]] + 1, []))
        if not width:
            assert drafted == 0
    assert len(rows) == place.n_rows <= engine.rows and len(tokens) == place.queries.n_tokens
    queries = place.queries
    listed = list(zip(place.ids, queries.slots, queries.positions, strict=True))
    assert listed == tokens + [(0, 0, -1)] * (len(listed) - len(tokens))
    assert len(listed) % (engine.tile or 1) == 0
    assert list(zip(queries.starts, queries.counts, strict=True))[: queries.n_groups] == groups
    for r, (source, slot, position, before) in enumerate(rows):
        assert (place.source[r], place.slots[r], place.chosen_at[r]) == (source, slot, position)
        assert place.before[r].tolist() == [*before, *[-1] * (J - len(before))]
    assert not place.chosen_at[len(rows) :].any()


def check_slot(case: Case, b: int, place: Layout, after: Advanced, grown: Grown) -> None:
    """A slot takes one token after the other."""
    old = Slots(*(np.asarray(x)[b] for x in case.slots))
    position, active, thinking, tokens = int(old.position), bool(old.active), bool(old.thinking), []
    text, conclude_at, begun = old.history.tolist(), int(old.conclude_at), min(int(old.begin), int(place.begin[b]))
    while place.n_chosen[b]:
        at, w = int(place.begin[b]) + len(tokens), len(tokens)
        r = int(place.first[b]) + w
        token = int(case.chosen[r]) if case.chosen[r] >= 0 else max(int(place.draft[r]), 0)
        if thinking:
            token = concluded(old, token, at - conclude_at)
            if token in old.stop_ids:
                conclude_at = min(conclude_at, at)
                token = concluded(old, token, at - conclude_at)
        tokens.append(token)
        text[at : at + 1] = [token]
        position, active = at, not (token in old.stop_ids and not thinking or at >= old.limit)
        ends = [tuple(c[c >= 0]) for c in old.close if c[-1] >= 0]
        closed = thinking and any(tuple(text[begun : at + 1][-len(c) :]) == c for c in ends)
        thinking &= not closed
        if not active or closed or w == place.n_drafts[b] or token != old.drafts[w]:
            break
    n = len(tokens)
    assert grown.n_tokens[b] == n and grown.tokens[b].tolist() == tokens + [-1] * (J + 1 - n)
    assert (grown.sources[b, : max(n - 1, 0)] == old.draft_sources[: max(n - 1, 0)]).all()
    assert after.token[b] == (tokens[-1] if tokens else old.token)
    assert (after.position[b], after.active[b], after.thinking[b]) == (position, active, thinking)
    assert after.history[b].tolist() == text[:S]
    assert after.counts[b].tolist() == (old.counts + 2 * np.bincount(tokens, minlength=V)).tolist()
    assert after.n_drafts[b] == (0 if tokens else old.n_drafts)


def concluded(slot: Slots, token: int, index: int) -> int:
    return int(slot.conclude[index]) if 0 <= index < K and slot.conclude[index] >= 0 else token


def test_slots_are_updated_in_place() -> None:
    """Histories and counts are large: a loop over passes must not copy them."""
    engine = ENGINES["few rows"]
    case = some_case(engine, 1)

    def passes(slots: Slots) -> Slots:
        def one(_: jax.Array, slots: Slots) -> Slots:
            place, after, _ = program(engine, "cpu").__wrapped__(case._replace(slots=slots))
            return slots._replace(**after._asdict())

        return jax.lax.fori_loop(0, 3, one, slots)

    text = jax.jit(passes, donate_argnums=0).lower(case.slots).compile().as_text()
    assert "umbra_advance" in text
    for size in (V, S):
        shape = rf"s32\[{engine.slots},{size}\]"
        assert not re.search(rf"= {shape}\S* copy", text), f"copies {shape}"


def test_what_does_not_fit_is_refused() -> None:
    engine = ENGINES["few rows"]
    case = some_case(engine, 0)
    short = case._replace(slots=case.slots._replace(drafts=case.slots.drafts[:, 1:]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="umbra_lay_out: drafts does not have the type and shape"):
        jax.block_until_ready(program(engine, "cpu")(short))
    cheap = case._replace(pace=Pace(case.pace.cost[:3], case.pace.length))
    with pytest.raises(jax.errors.JaxRuntimeError, match="costs must be known up to R rows"):
        jax.block_until_ready(program(engine, "cpu")(cheap))
