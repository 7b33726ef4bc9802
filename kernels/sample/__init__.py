"""Choosing the next token of a row from its logits."""

from .accept import accept
from .api import choose_rows
from .base import Choice, RowParams
from .noise import choice_seed, gumbel, gumbel_of, seed_words, threefry2x32
from .reference import choose

__all__ = [
    "Choice",
    "RowParams",
    "accept",
    "choice_seed",
    "choose",
    "choose_rows",
    "gumbel",
    "gumbel_of",
    "seed_words",
    "threefry2x32",
]
