"""Random JSON schemas and questions to answer in their form, generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = (
    "name", "title", "age", "city", "country", "price", "tags", "items", "address", "email", "rating", "active",
    "summary", "year", "author", "quantity", "color", "start_date", "id", "notes",
)  # fmt: skip
SUBJECTS = (
    "a book", "a customer of a shop", "a recipe", "a city", "an animal", "a film", "a car", "a football team",
    "a hotel", "a song", "a holiday", "a phone", "a garden", "a school", "a job offer",
)  # fmt: skip
WORDS = ("red", "green", "small", "large", "new", "used", "open", "closed", "yes", "no")

Schema = dict[str, Any]


def schemas(count: int, seed: int = 0) -> list[tuple[Schema, str]]:
    """Object schemas with a question each, the same for the same seed. Strings and arrays may be of any length."""
    rng = random.Random(seed)
    return [(_object(rng, 0), f"Describe {rng.choice(SUBJECTS)} in JSON.") for _ in range(count)]


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(2, 5))
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": {name: _any(rng, depth + 1) for name in names}, "required": required}


def _any(rng: random.Random, depth: int) -> Schema:
    simple: list[Callable[[], Schema]] = [
        lambda: {"type": "string"},
        lambda: {"type": "string", "maxLength": rng.randint(5, 60)},
        lambda: {"enum": rng.sample(WORDS, rng.randint(2, 5))},
        lambda: {"type": "integer"},
        lambda: {"type": "integer", "minimum": 1, "maximum": rng.randint(10, 5000)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": ["string", "null"]},
        lambda: {"type": "string", "format": "date"},
        lambda: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    ]
    nested: list[Callable[[], Schema]] = [
        lambda: _object(rng, depth),
        lambda: {"type": "array", "items": _any(rng, depth + 1)},
        lambda: {"type": "array", "items": _any(rng, depth + 1), "minItems": 1, "maxItems": 4},
        lambda: {"anyOf": [_any(rng, depth + 1), _any(rng, depth + 1)]},
    ]
    return rng.choice(simple + (nested if depth < 3 else []))()
