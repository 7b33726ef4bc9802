"""The entry of the drafting kernel: a chain of guesses for every slot, on the backend asked for."""

from __future__ import annotations

from ..backend import Backend
from . import reference
from .base import DraftInput, Drafts, DraftWeights


def draft(weights: DraftWeights, inputs: DraftInput, *, backend: Backend) -> Drafts:
    """Drafts for all slots at once.

    A slot's drafts depend on that slot alone. They need not be equal in bits on two backends: a draft only stands if
    the trunk chooses the same token.
    """
    if backend == "cpu":
        from .cpu import draft as native_draft

        return native_draft(weights, inputs)
    if backend == "tpu":
        from .tpu import draft as tpu_draft

        return tpu_draft(weights, inputs)
    return reference.draft(weights, inputs)


def laid_out(weights: DraftWeights, backend: Backend) -> DraftWeights:
    """The weights as the backend wants them in memory; to be done once, when they are loaded."""
    if backend != "tpu":
        return weights
    from .tpu import laid_out as tpu_laid_out

    return tpu_laid_out(weights)
