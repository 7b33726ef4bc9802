"""Finding tokens that are written out in a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

Part = str | int
"""A piece of text, or the id of a token that stood in its place."""


class TokenSplitter:
    """Cuts text at given tokens: at each position the longest one that fits, from left to right."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._pattern = re.compile(any_of(self._ids)) if self._ids else None

    def split(self, text: str) -> list[Part]:
        """Text and ids in order; no empty text."""
        if self._pattern is None:
            return [text] if text else []
        parts: list[Part] = []
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                parts.append(text[position : match.start()])
            parts.append(self._ids[match.group()])
            position = match.end()
        if position < len(text):
            parts.append(text[position:])
        return parts


class LookAlikes:
    """Finds what reads like a special token in text that must stay text."""

    def __init__(self, specials: Collection[str]) -> None:
        self.chars = frozenset().union(*specials)
        self._written = re.compile(any_of(specials)) if specials else None
        self._beginnings = {special[:n] for special in specials for n in range(1, len(special))}
        self._endings = {special[n:] for special in specials for n in range(1, len(special))}
        self._longest = max(map(len, specials), default=0)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens are written out, and where one could arise beside other text: an end of `text` that
        begins a special token, or a beginning that ends one (spaces aside). Words on their own are let be."""
        spans = [match.span() for match in self._written.finditer(text)] if self._written else []
        if text.isidentifier():
            return spans
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(min(self._longest - 1, end - start), 0, -1)
        if size := next((n for n in lengths if text[end - n : end] in self._beginnings), 0):
            spans.append((end - size, end))
        if size := next((n for n in lengths if text[start : start + n] in self._endings), 0):
            spans.append((start, start + size))
        return spans


def any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of `words` at a position.

    Shared beginnings are factored out: Gemma has 6,000 special tokens, and a plain alternation would try each of them
    at every "<".
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(root)


def _expression(node: dict[str, Any]) -> str:
    branches = []
    for char, child in node.items():
        if not char:
            continue
        literal = re.escape(char)
        while len(child) == 1 and "" not in child:  # a single way on: no group needed
            ((char, child),) = child.items()
            literal += re.escape(char)
        branches.append(literal + (_expression(child) if set(child) != {""} else ""))
    group = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return group + "?" if "" in node else group


def encode_ids(core: Tokenizer, text: str) -> list[int]:
    """Ids of `text`. As a batch of one: `Tokenizer.encode` would hold up every other thread while it works."""
    return core.encode_batch_fast([text], add_special_tokens=False)[0].ids
