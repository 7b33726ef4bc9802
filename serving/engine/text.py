"""The text of one request as its tokens arrive.

Tokens are pieces of bytes: a character may be spread over several of them, and so may a stop string. Text leaves here
only when it is certain: a character when it is complete, and the beginning of a stop string when it turned out not to
be one. How the tokens are grouped into steps changes nothing, each character is looked at once per stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text up to the first stop string.

    Of several stop strings the one that is complete first counts, of those complete at the same character the longest.
    Bytes that are not UTF-8 become U+FFFD. With `skip_space`, white space before the first other character is dropped
    and no stop string is looked for in it.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), *, skip_space: bool = False
    ) -> None:
        if not all(stop):
            raise ValueError("stop strings must not be empty")
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopString(text) for text in dict.fromkeys(stop)]
        self._first_chars = frozenset(text[0] for text in stop)
        self._held = ""  # the longest end of the text so far that begins a stop string
        self._stopped = False
        self._skip_space = skip_space

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """The text that has become certain, and the index in `token_ids` of the token that completed a stop string, or
        None. The stop string and what follows it never appear; after it there is no more text."""
        pieces = []
        for index, token_id in enumerate(token_ids):
            if self._stopped:
                break
            pieces.append(self._add(self._decoder.decode(self._token_bytes(token_id))))
            if self._stopped:
                return "".join(pieces), index
        return "".join(pieces), None

    def finish(self) -> str:
        """The text that was held back: the beginning of a stop string that did not come, and U+FFFD for a character
        that is not complete. Empty after a stop string."""
        if self._stopped:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        if self._stopped:
            return text
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return text + held

    def _add(self, text: str) -> str:
        """What can be emitted after `text` arrived."""
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        start = len(self._held)
        text = self._held + text
        for position in range(start, len(text)):
            found = [len(stop.text) for stop in self._stops if stop.advance(text[position])]
            if found:
                self._stopped = True
                self._held = ""
                return text[: position + 1 - max(found)]
        certain = len(text) - max((stop.matched for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]


class _StopString:
    """Knuth-Morris-Pratt search: `matched` characters of `text` are the end of what was read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._border = [0] * len(text)  # the longest proper end of text[: i + 1] that also begins it
        size = 0
        for i in range(1, len(text)):
            while size and text[i] != text[size]:
                size = self._border[size - 1]
            size += text[i] == text[size]
            self._border[i] = size

    def advance(self, char: str) -> bool:
        """Reads one character; true if it completes the stop string."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._border[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)
