"""The drafting kernel in native code (`native/src/draft.cc`): all slots of a step in one call.

The head is multiplied in integers, with o rounded to 16 bits; everything else is float32. The bits of a slot's drafts
depend on that slot alone, not on threads, instruction set or other slots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import native
from .base import MAX_DRAFTS, DraftInput, Drafts, DraftWeights


def unsupported() -> str | None:
    """Why this backend cannot be used here; None when it can."""
    return native.unavailable()


def draft(weights: DraftWeights, inputs: DraftInput) -> Drafts:
    """See `api.draft`; sharded arrays only as parts, inside `shard_map`."""
    slots = inputs.token.shape[0]
    ints = jax.ShapeDtypeStruct((slots, MAX_DRAFTS), jnp.int32)
    odds = jax.ShapeDtypeStruct((slots, MAX_DRAFTS), jnp.float32)
    length = jax.ShapeDtypeStruct((slots,), jnp.int32)
    call = jax.ffi.ffi_call(native.handler("umbra_draft"), (ints, ints, odds, length))
    return Drafts(*call(*weights, *inputs))
