"""Drafting without a shadow: the lookup alone, with odds that hold roughly for any model."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import FEATURES, LONGEST_MATCH, MAX_DRAFTS, SHADOW_PLACES, DraftWeights

FIRST = (0.0, 0.0, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.82)
"""Odds of the first copied token by the length of the match, the last for all longer ones. They only decide how much is
tried; what a model really accepts is measured when its shadow is trained."""
LATER = 0.9
"""Odds of every further token once the first one stood."""


def lookup_only(d_model: int) -> DraftWeights:
    """Weights whose shadow is empty, for a trunk of width `d_model` and slots whose `sources` are at most LOOKUP."""
    odds = np.full((1, LONGEST_MATCH + 1, 3, MAX_DRAFTS), LATER, np.float32)
    for length in range(LONGEST_MATCH + 1):
        odds[0, length, :, 0] = FIRST[min(length, len(FIRST) - 1)]

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    r, m, z = 8, 8, 8
    fields: dict[str, Any] = dict(
        read=np.zeros((1, r), np.int8), read_scale=zeros(1), context=zeros(d_model, r), epsilon=np.float32(1e-5),
        recur=zeros(r, 2 * r), gate_u=zeros(r), gate_z=zeros(r), bias_g=zeros(r), bias_c=zeros(r), start=zeros(r),
        step=zeros(SHADOW_PLACES, r), markov=zeros(r, r), up=zeros(r, m), down=zeros(m, r),
        head=np.zeros((z, r), np.int8), head_scale=zeros(z), vocab=np.arange(z, dtype=np.int32),
        conf=zeros(2 * r + FEATURES), conf_bias=zeros(SHADOW_PLACES), gate=zeros(1, SHADOW_PLACES, 2),
        gate_temperatures=zeros(1), lookup=odds,
    )  # fmt: skip
    return DraftWeights(**fields)
