"""Shared by the tests of the engine and of the server."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

WORDS = ("name", "age", "city", "ok", "größe", "tags", "id", "a b", "x-1", "value", "kind", "next")


class RandomSchemas:
    """Schemas whose values cannot grow without end, so that any model finishes them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def object(self, depth: int = 0) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(WORDS, rng.randint(1, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: self.any(depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        simple: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "string", "maxLength": rng.randint(1, 12)},
            lambda: {"type": "string", "enum": rng.sample(WORDS, rng.randint(1, 4))},
            lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
            lambda: {"type": "boolean"},
            lambda: {"type": ["null", "boolean"]},
            lambda: {"const": rng.choice([7, "fixed", None, [1, 2]])},
            lambda: {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green)$"])},
            lambda: {"type": "string", "format": "date"},
        ]
        nested: list[Callable[[], dict[str, Any]]] = [
            lambda: self.object(depth),
            lambda: {"type": "array", "items": self.any(depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3},
            lambda: {"anyOf": [self.any(depth + 1), self.any(depth + 1)]},
        ]
        return rng.choice(simple + nested if depth < 3 else simple)()


@pytest.fixture(scope="session")
def random_schemas() -> Callable[[int, int], list[dict[str, Any]]]:
    """Makes that many object schemas from a seed."""

    def make(count: int, seed: int) -> list[dict[str, Any]]:
        schemas = RandomSchemas(seed)
        return [schemas.object() for _ in range(count)]

    return make
