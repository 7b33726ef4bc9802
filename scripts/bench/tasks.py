"""Small tasks with one right answer: arithmetic and formats, generated from a seed, judged exactly."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable

COUNT = 60

WORDS = (
    "river",
    "stone",
    "lamp",
    "bread",
    "cloud",
    "garden",
    "needle",
    "silver",
    "tiger",
    "violin",
    "winter",
    "yellow",
)


@dataclasses.dataclass(frozen=True)
class Task:
    id: str
    kind: str
    question: str
    answer: str
    check: str
    """Which of `CHECKS` decides."""

    def score(self, text: str) -> bool:
        """Whether `text` is right."""
        return CHECKS[self.check](text, self.answer)


def tasks(count: int = COUNT, seed: int = 0) -> list[Task]:
    """`count` tasks, all kinds in turn, the same for the same seed."""
    rng = random.Random(seed)
    makers = list(KINDS.items())
    made: list[Task] = []
    seen: set[str] = set()
    while len(made) < count:
        kind, maker = makers[len(made) % len(makers)]
        question, answer, check = maker(rng)
        if question not in seen:
            seen.add(question)
            made.append(Task(f"{kind}-{len(made) // len(makers) + 1:02d}", kind, question, answer, check))
    return made


Made = tuple[str, str, str]  # question, answer, check


def _addition(rng: random.Random) -> Made:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b), "number"


def _subtraction(rng: random.Random) -> Made:
    a, b = sorted((rng.randint(2, 99), rng.randint(2, 99)))
    return f"What is {b} - {a}? Answer with the number only.", str(b - a), "number"


def _multiplication(rng: random.Random) -> Made:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return f"What is {a} times {b}? Answer with the number only.", str(a * b), "number"


def _story(rng: random.Random) -> Made:
    name, a, b = rng.choice(("Mira", "Tom", "Ada", "Noor")), rng.randint(5, 30), rng.randint(2, 5)
    question = (
        f"{name} has {a} apples, gives away {b} and then buys {b + 3} more. How many apples does {name} have now?"
    )
    return f"{question} Answer with the number only.", str(a + 3), "number"


def _capitals(rng: random.Random) -> Made:
    word = rng.choice(WORDS)
    return f'Write the word "{word}" in capital letters and nothing else.', word.upper(), "text"


def _repeat(rng: random.Random) -> Made:
    word, n = rng.choice(WORDS), rng.randint(2, 4)
    question = f'Write the word "{word}" exactly {n} times, separated by commas and spaces, and nothing else.'
    return question, ", ".join([word] * n), "text"


def _copy(rng: random.Random) -> Made:
    line = f"{rng.choice(WORDS)}-{rng.randint(100, 999)}-{rng.choice(WORDS)}"
    return f"Repeat exactly, and write nothing else: {line}", line, "text"


def _json(rng: random.Random) -> Made:
    value = {"name": rng.choice(WORDS), "count": rng.randint(1, 50)}
    question = (
        f'Write a JSON object with the key "name" set to "{value["name"]}" and the key "count" set to {value["count"]}.'
    )
    return f"{question} Write only the JSON.", json.dumps(value), "json"


def _list(rng: random.Random) -> Made:
    words = rng.sample(WORDS, 3)
    question = f"Write these words as a list, one per line, each after a hyphen and a space: {', '.join(words)}."
    return f"{question} Write only the list.", "\n".join(f"- {word}" for word in words), "text"


def _last(rng: random.Random) -> Made:
    words = rng.sample(WORDS, 4)
    return f"Which is the last word of this list: {', '.join(words)}? Answer with that word only.", words[-1], "text"


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "addition": _addition,
    "capitals": _capitals,
    "subtraction": _subtraction,
    "repeat": _repeat,
    "multiplication": _multiplication,
    "copy": _copy,
    "story": _story,
    "json": _json,
    "list": _list,
    "last": _last,
}


def _number(text: str, answer: str) -> bool:
    """The last whole number of the text is the answer: `17 + 25 = 42` is right."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return bool(found) and found[-1] == answer


def _text(text: str, answer: str) -> bool:
    """Nothing but the answer, apart from space around it, a final full stop and quotation marks."""
    return text.strip().removesuffix(".").strip("\"'`").removesuffix(".").strip() == answer


def _same_json(text: str, answer: str) -> bool:
    """The same JSON value, in a code block or not."""
    inside = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
    try:
        return bool(json.loads(inside) == json.loads(answer))
    except ValueError:
        return False


CHECKS: dict[str, Callable[[str, str], bool]] = {"number": _number, "text": _text, "json": _same_json}
