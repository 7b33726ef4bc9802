"""Ending an answer in time: where little room is left, a short way to the end of a JSON text is taken.

A model may well write a string or a list without end. What it is to write here has a meaning only as a whole, so the
last tokens that it may have are used to finish it. Nothing but the tokens so far and the room left decides, so drafting
changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST_WAY = 512
"""Tokens that an end may take; an answer further from its end is left alone."""
LEAST_SLACK = 16
"""Tokens to spare when the way to the end is taken: one token of the model's choice may make it longer."""

_ENDS = (
    '"}', '"]', '"', "}", "]", ",", ' ""', " []", " {}", '""', "[]", "{}", " null", "null", "0", "1", " 0", " 1",
    " true", " false", "true", "false", ' "', " [", " {",
)  # fmt: skip
"""Tokens that bring JSON nearer to its end, the best first. A comma comes before digits: a number may have any number
of them."""


_DEPTH = 24


class Fill(Protocol):
    """Writes the tokens that may come next into a mask."""

    def __call__(self, matcher: LLMatcher, mask: np.ndarray) -> None: ...


class Ends:
    """The tokens of one vocabulary that end things."""

    def __init__(
        self, tokens: Sequence[bytes], eos_ids: Sequence[int], vocab_size: int, eos_id: int | None = None
    ) -> None:
        """`eos_id` is the likeliest of `eos_ids`."""
        ids = {text: i for i, text in reversed(list(enumerate(tokens)))}
        self._eos = frozenset(eos_ids)
        self._end = eos_id if eos_id in self._eos else eos_ids[-1]
        self._others = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        for i in eos_ids:
            self._others[i >> 5] &= ~(np.uint32(1) << np.uint32(i & 31))
        self._best = [*eos_ids, *(ids[text.encode()] for text in _ENDS if text.encode() in ids)]

    def way(
        self, matcher: LLMatcher, words: int, fill: Fill, known: tuple[int, ...] | None = None
    ) -> tuple[int, ...] | None:
        """Tokens from where `matcher` is to the end, the last one included; None if it is too far. A way that was
        `known` some tokens before is gone on with where it still leads to the end: to see that takes microseconds, to
        find the next token of a new one a mask. It may then be a little longer than it must be."""
        mask = np.zeros(words, np.uint32)
        way: list[int] = []
        consumed = 0
        ended = False
        while not ended and len(way) < LONGEST_WAY:
            for rest in (known, known[1:]) if known else ():
                if rest and matcher.validate_tokens(list(rest)) == len(rest):
                    matcher.rollback(consumed)
                    return (*way, *rest)
            fill(matcher, mask)
            token = self._choose(mask)
            if token is None:
                break
            way.append(token)
            ended = token in self._eos
            if not ended:
                if not matcher.consume_token(token):
                    break
                consumed += 1
        matcher.rollback(consumed)
        return tuple(way) if ended else None

    def only_end(self, mask: np.ndarray) -> int | None:
        """The likely end of the text, where `mask` allows nothing but an end."""
        return None if (mask & self._others).any() else self._end

    def _choose(self, mask: np.ndarray) -> int | None:
        for token in self._best:
            if mask[token >> 5] >> np.uint32(token & 31) & 1:
                return token
        found = np.flatnonzero(mask)
        if not len(found):
            return None
        word = int(mask[found[0]])
        return 32 * int(found[0]) + (word & -word).bit_length() - 1


class Landing:
    """When an answer turns to its end."""

    def __init__(self, whole: int, part: int) -> None:
        """`whole` is the length of a short answer, in tokens; `part` that by which a single token may make the way
        to the end longer."""
        self.slack = LEAST_SLACK + part
        self.zone = 2 * whole + 2 * self.slack + 32
        """With more room than this nobody asks for the way."""

    def due(self, way: int, room: int) -> bool:
        """Whether the way to the end, of `way` tokens, must be taken now, with room for `room` tokens. Too late is too
        late: then the answer is cut off."""
        return way <= room <= way + self.slack


def longest_part(schema: Any) -> int:
    """Characters of the longest among the shortest values of a JSON Schema's parts, about: by so much may the way to
    the end grow when a model opens one of them."""
    return _Lengths(schema).longest(schema, 0)


class _Lengths:
    """Works out each part once, so that parts that refer to one another cost nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # by the identity of a part of `root`

    def longest(self, schema: Any, depth: int) -> int:
        if isinstance(schema, list):
            return max((self.longest(item, depth + 1) for item in schema), default=0)
        if not isinstance(schema, dict) or depth > _DEPTH:
            return 0
        return max([self.shortest(schema), *(self.longest(value, depth + 1) for value in schema.values())])

    def shortest(self, schema: Any) -> int:
        """Characters of the shortest value, about."""
        if not isinstance(schema, dict):
            return 4
        if id(schema) not in self._known:
            self._known[id(schema)] = 0  # what it is within itself
            self._known[id(schema)] = self._shortest(schema)
        return self._known[id(schema)]

    def _shortest(self, schema: dict[str, Any]) -> int:
        for name in ("const", "enum"):
            if name in schema:
                values = schema[name] if name == "enum" and isinstance(schema[name], list) else [schema[name]]
                return min((len(json.dumps(value, ensure_ascii=False)) for value in values), default=0)
        if isinstance(schema.get("$ref"), str):
            return self.shortest(self._found(schema["$ref"]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                return min(map(self.shortest, schema[name]), default=0)
        return self._of_type(schema)

    def _of_type(self, schema: dict[str, Any]) -> int:
        properties, required, least = schema.get("properties"), schema.get("required"), schema.get("minLength")
        if isinstance(properties, dict) and isinstance(required, list):
            named = [name for name in required if isinstance(name, str)]
            return 2 + sum(len(name) + 6 + self.shortest(properties.get(name)) for name in named)
        if schema.get("type") == "array":
            items = schema.get("minItems")
            return 2 + (items * (2 + self.shortest(schema.get("items"))) if isinstance(items, int) else 0)
        return 2 + (least if isinstance(least, int) else 0) + (20 if {"pattern", "format"} & set(schema) else 2)

    def _found(self, pointer: str) -> Any:
        at = self._root
        for name in pointer.removeprefix("#").split("/")[1:]:
            at = at.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        return at
