"""Ragged paged attention: the tokens of a step against the blocks of their sequences."""

from .api import AttentionResult, Queries, Want, attention, key_bounds, merge, plan, unsupported
from .pool import SCHEMA, KVFormat, KVPool
from .reference import GROUP

__all__ = [
    "GROUP",
    "SCHEMA",
    "AttentionResult",
    "KVFormat",
    "KVPool",
    "Queries",
    "Want",
    "attention",
    "key_bounds",
    "merge",
    "plan",
    "unsupported",
]
