"""Text with slots: `{name}` is a value of the list `name`, `{name2}` another value of the same list, `{n:3-20}` a
number, and `{n}` afterwards the same number again. Values may contain slots themselves.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

SLOT = re.compile(r"\{([a-z_]+)(\d*)(?::(\d+)-(\d+))?\}")
SECTION = re.compile(r"\[([a-z_ ]+)\]")


def read_sections(path: Path) -> dict[str, list[str]]:
    """The lines under each `[section]` of a file, without empty lines and `#` comments."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if match := SECTION.fullmatch(line.strip()):
            lines = sections.setdefault(match[1], [])
        else:
            lines.append(line.strip())
    return sections


def read_slots(path: Path) -> dict[str, list[str]]:
    """The lists of a slot file: items are separated by ` | ` or lines."""
    return {
        name: [item.strip() for line in lines for item in line.split(" | ")]
        for name, lines in read_sections(path).items()
    }


class Filler:
    """Fills the slots of one text. The same slot gets the same value everywhere in it."""

    def __init__(self, slots: Mapping[str, Sequence[str]], rng: random.Random) -> None:
        self._slots, self._rng = slots, rng
        self._values: dict[str, str] = {}
        self._used: dict[str, set[str]] = {}

    def __call__(self, template: str, given: Mapping[str, str] | None = None) -> str:
        """`template` with its slots filled; `given` are values that are put in as they are."""
        given = given or {}

        def value(match: re.Match[str]) -> str:
            name, number, low, high = match.groups()
            key = name + number
            if key in given:
                return given[key]
            if key not in self._values:
                if low is not None:
                    self._values[key] = str(self._rng.randint(int(low), int(high)))
                else:
                    self._values[key] = self(self._draw(name), given)
            return self._values[key]

        return SLOT.sub(value, template)

    def _draw(self, name: str) -> str:
        """A value of the list that this text does not have yet."""
        if name not in self._slots:
            raise ValueError(f"no list of values is called {name!r}")
        used = self._used.setdefault(name, set())
        free = [item for item in self._slots[name] if item not in used] or list(self._slots[name])
        chosen = self._rng.choice(free)
        used.add(chosen)
        return chosen
