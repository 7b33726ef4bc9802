"""The built-in prompts: thousands of varied requests from templates, from what the trunk itself says a user would ask,
and from passages that the trunk itself wrote. All of them follow from a seed and the trunk.

Which prompts a shadow is trained on decides where it is good, so they cover what people ask: writing, role play,
reasoning, maths, code, extraction, science, humanities, questions, translation, summaries, retrieval, copies, edits.
Letting an instruction-tuned model continue the template's user turn gives prompts like those that it was tuned on
(Xu et al. 2024, "Magpie").
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ...configs.prompt_sets import FOLDER, Prompt
from .templates import Filler, read_sections, read_slots

T = TypeVar("T")

DATA = FOLDER / "training"

SHARES: Mapping[str, float] = {
    "writing": 9, "roleplay": 7, "reasoning": 5, "math": 6, "math_reasoning": 9, "coding": 8, "code_short": 8,
    "code_read": 2, "code_edit": 3, "extraction": 5, "stem": 9, "humanities": 9, "qa": 5, "german": 5, "translation": 1,
    "chat": 5, "copy": 1, "summarization": 6, "rag": 5, "reading": 2,
}  # fmt: skip
"""How many of the prompts are of each category, in parts."""

ASKED: Mapping[str, float] = {
    "writing": 0.35, "roleplay": 0.3, "reasoning": 0.2, "math": 0.3, "math_reasoning": 0.25, "coding": 0.35,
    "code_short": 0.25, "extraction": 0.3, "stem": 0.4, "humanities": 0.4, "qa": 0.3, "chat": 0.4,
}  # fmt: skip
"""The share of a category's prompts that the trunk writes itself."""

PASSAGES: Mapping[str, float] = {"news": 0.03, "article": 0.04}
"""Passages that the trunk writes, per prompt."""


@dataclasses.dataclass(frozen=True)
class Seedling:
    """What the trunk is to write before the prompts are made: a passage that answers `text`, or (`open`) what a user
    would ask when `text` is the system message."""

    kind: str  # news, article, or the category of what is asked
    text: str
    open: bool
    max_tokens: int


def seedlings(n_prompts: int, seed: int) -> list[Seedling]:
    """What is to be written for `n_prompts` prompts, in an order whose beginnings are balanced."""
    sections = read_sections(DATA / "material.txt")
    slots = read_slots(DATA / "slots.txt")
    lists: list[list[Seedling]] = []
    for kind, part in PASSAGES.items():
        rng = _rng(seed, "seedling", kind)
        texts = (_cycle(sections[kind], rng, i) for i in range(max(2, round(part * n_prompts))))
        long = 300 if kind == "news" else 220
        lists.append([Seedling(kind, Filler(slots, rng)(text), False, long) for text in texts])
    for category, share in ASKED.items():
        lines = sections[f"ask {category}"]
        n = round(1.25 * share * _count(category, n_prompts))  # some are unusable
        lists.append([Seedling(category, lines[i % len(lines)], True, 140) for i in range(n)])
    return interleave(lists)


@dataclasses.dataclass
class Material:
    """What the trunk wrote: passages and questions."""

    passages: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {kind: [] for kind in PASSAGES})
    asked: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, seedling: Seedling, text: str, *, ended: bool) -> None:
        """Take what is usable of a text."""
        text = text.strip()
        if seedling.open:
            if ended and usable_question(text):
                self.asked.setdefault(seedling.kind, []).append(text)
        elif passage := usable_passage(text):
            self.passages[seedling.kind].append(passage)

    def add_passage(self, text: str) -> None:
        """Take a passage that somebody else wrote for every kind of prompt about passages."""
        for kind in PASSAGES:
            self.passages[kind].append(text)


def usable_question(text: str) -> bool:
    """Whether a text can be a prompt: neither a word nor an essay, and no marker of the template in it."""
    return 12 <= len(text) <= 800 and "<|" not in text and len(text.split()) >= 3


def usable_passage(text: str) -> str | None:
    """A text up to its last whole sentence; None if little is left, or if it goes round in circles."""
    end = max(text.rfind(mark) for mark in (". ", '." ', ".\n", "!", "?", '."'))
    text = text if text.endswith((".", '."', "!", "?")) else text[: end + 1]
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    words = text.split()
    fours = {tuple(words[i : i + 4]) for i in range(len(words) - 3)}
    return text if len(words) >= 50 and len(fours) >= 0.85 * (len(words) - 3) else None


def build_prompts(n_prompts: int, seed: int, material: Material) -> list[Prompt]:
    """About `n_prompts` different prompts, interleaved so that any first part of them is balanced."""
    templates = read_sections(DATA / "templates.txt")
    maker = _Maker(read_slots(DATA / "slots.txt"), read_code(DATA / "code.txt"), material)
    lists = []
    for category in SHARES:
        n = _count(category, n_prompts)
        asked = unique(material.asked.get(category, []))[: round(ASKED.get(category, 0.0) * n)]
        rng = _rng(seed, "prompt", category)
        made = maker.make(templates[category], n - len(asked), rng)
        lists.append([Prompt(f"{category}-{i}", category, (text,)) for i, text in enumerate(_mixed(asked, made, rng))])
    return interleave(lists)


def _mixed(first: Sequence[str], second: Sequence[str], rng: random.Random) -> list[str]:
    mixed = [*first, *second]
    rng.shuffle(mixed)
    return unique(mixed)


class _Maker:
    """Makes prompts from templates, with code and passages."""

    def __init__(self, slots: Mapping[str, Sequence[str]], code: Sequence[str], material: Material) -> None:
        self._slots, self._code, self._material = slots, code, material

    def make(self, templates: Sequence[str], n: int, rng: random.Random) -> list[str]:
        """At most `n` prompts, all different. Templates that need a passage are left out while there is none."""
        templates = [template for template in templates if self._possible(template)]
        made: dict[str, None] = {}
        for i in range(3 * n if templates else 0):
            if len(made) >= n:
                break
            template = _cycle(templates, rng, i).replace("\\n", "\n")
            text = Filler(self._slots, rng)(template, self._given(template, rng))
            made.setdefault(text[0].upper() + text[1:])
        return list(made)

    def _possible(self, template: str) -> bool:
        passages = self._material.passages
        return all(len(passages[kind]) >= 3 for kind in PASSAGES if "{" + kind in template) and (
            "{passage}" not in template or bool(passages["article"])
        )

    def _given(self, template: str, rng: random.Random) -> dict[str, str]:
        """The code and passages that a template needs; a passage to be copied is short."""
        given: dict[str, str] = {}
        if "{code}" in template or "{bug}" in template:
            code = rng.choice(self._code)
            given = {"code": f"```\n{code}\n```", "bug": f"```\n{plant_bug(code, rng)}\n```"}
        for kind in PASSAGES:
            if "{" + kind in template:
                chosen = rng.sample(self._material.passages[kind], 3)
                given |= dict(zip((kind, f"{kind}2", f"{kind}3"), chosen, strict=True))
        if "{passage}" in template:
            sentences = re.split(r"(?<=[.!?]) ", rng.choice(self._material.passages["article"]))
            given["passage"] = " ".join(sentences[: rng.randint(2, 4)])
        return given


BUGS = (
    ("<=", "<"), (" < ", " <= "), (" > ", " < "), ("+ 1", "+ 2"), ("- 1", ""), ("True", "False"), ("append", "add"),
    (" += ", " = "), ("==", "="), ("range(n)", "range(1, n)"), ("return ", ""), ("0", "1"), ("[i]", "[j]"),
)  # fmt: skip
"""Replacements that break code."""


def plant_bug(code: str, rng: random.Random) -> str:
    """`code` with one thing wrong in it, where one of `BUGS` fits; in a fifth of the cases nothing is wrong."""
    fitting = [bug for bug in BUGS if bug[0] in code]
    if not fitting or rng.random() < 0.2:
        return code
    old, new = rng.choice(fitting)
    starts = [match.start() for match in re.finditer(re.escape(old), code)]
    start = rng.choice(starts)
    return code[:start] + new + code[start + len(old) :]


def read_code(path: Path) -> list[str]:
    """The pieces of code of a file: `#` lines at its beginning, then pieces between lines of `%%`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    while lines and lines[0].startswith("#"):
        lines.pop(0)
    return [piece.strip("\n") for piece in "\n".join(lines).split("\n%%\n")]


def interleave(lists: Iterable[Sequence[T]]) -> list[T]:
    """All items, in an order in which every beginning holds about the same share of each list."""
    placed = [
        ((i + 0.5) / len(items), order, item) for order, items in enumerate(lists) for i, item in enumerate(items)
    ]
    return [item for _, _, item in sorted(placed, key=lambda place: place[:2])]


def unique(texts: Iterable[str]) -> list[str]:
    """The first of each text, whatever its case and spaces."""
    seen: dict[str, str] = {}
    for text in texts:
        seen.setdefault(normal(text), text)
    return list(seen.values())


def normal(text: str) -> str:
    """A text's words, without case, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", text.lower()))


def without(prompts: Sequence[Prompt], excluded: Sequence[Prompt], words: int = 8) -> list[Prompt]:
    """The prompts that share no `words` consecutive words with an excluded one, and are none of them."""

    def grams(text: str) -> set[tuple[str, ...]]:
        parts = normal(text).split()
        return {tuple(parts[i : i + words]) for i in range(len(parts) - words + 1)} or {tuple(parts)}

    forbidden = set().union(*(grams(turn) for prompt in excluded for turn in prompt.turns))
    return [prompt for prompt in prompts if not any(grams(turn) & forbidden for turn in prompt.turns)]


def _cycle(lines: Sequence[str], rng: random.Random, i: int) -> str:
    """Line `i` of endless rounds, so that no line comes much more often than another; `rng` breaks the order up."""
    return lines[i % len(lines)] if rng.random() < 0.8 else rng.choice(lines)


def _count(category: str, n_prompts: int) -> int:
    return max(1, round(n_prompts * SHARES[category] / sum(SHARES.values())))


def _rng(*names: object) -> random.Random:
    return random.Random(hashlib.sha256("/".join(map(str, names)).encode()).digest())
