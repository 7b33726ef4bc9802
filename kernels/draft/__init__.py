"""Guessing the next tokens of a sequence: by looking up what followed before, and with a shadow network."""

from .api import draft, laid_out
from .base import (
    AGREES,
    CERTAIN,
    DIFFERS,
    FEATURES,
    LONGEST_MATCH,
    LOOKUP,
    MAX_DRAFTS,
    SHADOW,
    SHADOW_PLACES,
    SHORTEST_MATCH,
    UNKNOWN,
    DraftInput,
    Drafts,
    DraftWeights,
)
from .defaults import lookup_only
from .widths import widths

__all__ = [
    "AGREES",
    "CERTAIN",
    "DIFFERS",
    "FEATURES",
    "LONGEST_MATCH",
    "LOOKUP",
    "MAX_DRAFTS",
    "SHADOW",
    "SHADOW_PLACES",
    "SHORTEST_MATCH",
    "UNKNOWN",
    "DraftInput",
    "DraftWeights",
    "Drafts",
    "draft",
    "laid_out",
    "lookup_only",
    "widths",
]
