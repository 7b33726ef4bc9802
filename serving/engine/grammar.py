"""What the text of an answer must match: plain data, no engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .landing import longest_part

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]

MAX_GRAMMAR = 200_000
"""Characters of a grammar's text."""

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way of writing JSON: no tokens are spent on white space, and a small model cannot lose itself in it."""


class BadGrammar(ValueError):
    """The grammar cannot be followed: it is wrong, nothing matches it, or it uses what is not supported. `field` is
    where it came from."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The language of a request's answer.

    `text` is a JSON Schema (as JSON), a regular expression, choices (a JSON list of strings), or a context-free grammar
    in Lark's form as llguidance has it, or in GBNF. Every answer that ends by itself matches the whole of it; one that
    is cut off is the beginning of something that does. Which features of each are there is said when it is compiled
    (`Grammars.compile`).
    """

    kind: GrammarKind
    text: str
    longest_part: int | None = None
    """Not None: an answer that comes near its limit is brought to its end (`landing.py`), since half of it is worth
    nothing. By so many characters may a single token put off the end."""
    field: str = dataclasses.field(default="", compare=False)
    """The field of the request it came from, to be named in refusals."""

    def __post_init__(self) -> None:
        """Raises `ValueError` in one sentence."""
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(
                f"a grammar may have at most {MAX_GRAMMAR} characters, this {self.kind} has {len(self.text)}"
            )

    def named(self, field: str) -> Grammar:
        """The same, from `field`."""
        return dataclasses.replace(self, field=field)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that is valid under a schema, properties in the schema's order, written in one line as Python's `json`
        does. It is finished within the limit of tokens, if that leaves room for the shortest such text."""
        return cls("json_schema", json.dumps(schema), longest_part(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts. `ValueError` when there are none, or an empty one."""
        if not texts or not all(texts):
            raise ValueError("a choice needs at least one text, none of them empty")
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def grammar(cls, text: str) -> Grammar:
        """Lark (a rule `start: ...`) or GBNF (a rule `root ::= ...`)."""
        return cls("grammar", text)
