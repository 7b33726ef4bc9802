"""Ragged paged attention: the tokens of a step against the blocks of their sequences."""

from .api import Queries, attend, write_kv

__all__ = ["Queries", "attend", "write_kv"]
