"""Choosing the next token of a row from its logits."""

from .base import Choice, RowParams
from .noise import choice_seed, gumbel, seed_words, threefry2x32
from .reference import choose

__all__ = ["Choice", "RowParams", "choice_seed", "choose", "gumbel", "seed_words", "threefry2x32"]
