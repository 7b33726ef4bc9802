"""A pass's bookkeeping in native code (native/src/passes.cc): a custom call before the trunk and one behind it.

XLA makes about a hundred small programs of the same arithmetic, which take seconds to compile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...configs.engine import MAX_DRAFT
from .. import native
from ..attention import Queries
from .base import Advanced, Grown, Layout, Pace, Sent, Slots
from .reference import total_tokens


def lay_out(slots: Slots, sent: Sent, pace: Pace | None, rows: int, tile: int | None) -> Layout:
    """See `api.lay_out`; sharded arrays only as parts, inside `shard_map`."""
    B, total, groups = len(slots.token), total_tokens(len(sent.ids), rows, tile), len(sent.starts) + len(slots.token)
    results = (
        *[_ints(total)] * 3, _ints(), _ints(groups), _ints(groups), _ints(),  # ids and queries
        *[_ints(B)] * 4, *[_ints(rows)] * 3, _ints(), _ints(rows), _ints(rows, MAX_DRAFT),
    )  # fmt: skip
    call = jax.ffi.ffi_call(native.handler("umbra_lay_out"), results)
    cost, length = (jnp.zeros(0, jnp.float32), jnp.int32(0)) if pace is None else pace
    ids, token_slots, positions, n_tokens, starts, counts, n_groups, *rest = call(
        slots.token, slots.position, slots.limit, slots.active, slots.drafts, slots.draft_odds, slots.n_drafts,
        sent.ids, sent.slots, sent.positions, sent.starts, sent.counts, sent.last, sent.decodes, sent.capacity,
        sent.sizes, cost, length,
    )  # fmt: skip
    queries = Queries(token_slots, positions, n_tokens, starts, counts, n_groups, sent.tables)
    return Layout(ids, queries, *rest)


def advance(slots: Slots, place: Layout, chosen: jax.Array) -> tuple[Advanced, Grown]:
    """See `api.advance`; sharded arrays only as parts, inside `shard_map`."""
    updated = Advanced.of(slots)
    B, width = len(slots.token), 1 + MAX_DRAFT
    results = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated),
        *[_ints(B, width)] * 3,
        _ints(B),
    )
    aliases = {i: i for i in range(len(updated))}
    call = jax.ffi.ffi_call(native.handler("umbra_advance"), results, input_output_aliases=aliases)
    out = call(
        *updated, slots.limit, slots.begin, slots.stop_ids, slots.drafts, slots.draft_sources, slots.conclude,
        slots.close, place.n_drafts, place.n_chosen, place.first, place.begin, chosen,
    )  # fmt: skip
    return Advanced(*out[: len(updated)]), Grown(*out[len(updated) :])


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
