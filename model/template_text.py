"""Keeping what messages say apart from what a template writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .token_split import LookAlikes

_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's two private planes: characters without a meaning of their own."""


class Disguise:
    """Replaces, one for one, the characters of everything in some data that reads like a special token.

    The replacements are characters that occur neither in the data nor in the template, so `reveal` is exact. They are
    no spaces, so that trimming, slicing and joining work as before.
    """

    def __init__(self, look_alikes: LookAlikes, data: Any, template: str) -> None:
        self._look_alikes = look_alikes
        self._data = data
        self._template = template
        self._table: dict[int, str] = {}

    def hide(self, value: Any) -> Any:
        """A copy of `value` (strings, lists, dicts) in which no string can become a special token."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """`text` with the original characters."""
        return text.translate({ord(new): chr(old) for old, new in self._table.items()}) if self._table else text

    def _hide(self, text: str) -> str:
        spans = self._look_alikes.spans(text)
        if not spans:
            return text
        chars = list(text)
        for start, end in spans:
            chars[start:end] = text[start:end].translate(self._replacements())
        return "".join(chars)

    def _replacements(self) -> dict[int, str]:
        if not self._table:
            taken = set(itertools.chain(self._template, *_strings(self._data)))
            free = (chr(code) for code in itertools.chain(*_PRIVATE) if chr(code) not in taken)
            self._table = {ord(char): next(free) for char in sorted(self._look_alikes.chars)}
        return self._table


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
