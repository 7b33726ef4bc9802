"""Which drafted tokens stand: exactly those that the sampler would have chosen itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def accept(drafted: Array, n_drafted: Array, chosen: Array) -> Array:
    """How many drafted tokens of every row are accepted, int32 [B].

    A pass over the last token and W - 1 drafts of a row chooses W tokens: `chosen` int32 [B, W], of which entry w
    follows the first w drafts. `drafted` int32 [B, W - 1] holds the drafts, of which the first `n_drafted` int32 [B]
    (any number: at most W - 1 count) are real. A draft is accepted if it and all before it equal what was chosen in
    their place, so with n accepted drafts the row's new tokens are `chosen[:, : n + 1]`, the same ones that passes
    of one token would have given, at any temperature.
    """
    places = jnp.arange(drafted.shape[-1])
    agrees = (drafted == chosen[..., :-1]) & (places < n_drafted[..., None])
    return jnp.cumprod(agrees.astype(jnp.int32), axis=-1).sum(-1, dtype=jnp.int32)
