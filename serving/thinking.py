"""How complex a request looks, for thinking budgets that adapt to it.

The detector is made to be cheap and to be understood: it counts findings of a few features in the last user message
(words are English, symbols are anybody's), weighs them with the points in `configs/levels.py`, and says what it found.
More of a feature never lowers the score. It knows nothing of meaning: a budget in the request is always better.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.levels import COMPLEXITY, Complexity

LOOKED_AT = 2048
"""Characters at the beginning, and at the end, of a message that are searched."""
WORDS_PER_FINDING = 120
"""Words of the message that count as one finding of `length`."""


def _pattern(symbols: str, words: str) -> re.Pattern[str]:
    """Finds symbols, or whole words (patterns separated by white space)."""
    return re.compile(rf"{symbols}|\b(?:{'|'.join(words.split())})\b", re.IGNORECASE | re.MULTILINE)


_PATTERNS = {
    "maths": _pattern(
        r"[=≤≥≠≈√∑∏∫∂∞±×÷^]|\d\s?[-+*/%]\s?\(?\d|\\(?:frac|sqrt|sum|int|cdot)\b",
        r"""equations? solve[ds]? integrals? derivatives? probabilit(?:y|ies) percent(?:age)? sum product ratio
        fractions? average mean median theorem lemma proof matri(?:x|ces) vectors? polynomials? prime logarithms? modulo
        factorial divisible divided multipl(?:y|ied) squared? triangles? perimeter area volume angles? permutations?
        combinations? calculate compute how\smany how\smuch total remainder""",
    ),
    "numbers": _pattern(
        r"\d+(?:[.,]\d+)*",
        r"""two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred thousand
        million half twice double third quarter dozen""",
    ),
    "code": _pattern(
        r"```|[{};][ \t]*$|=>|\bdef \w|\b\w{1,40}(?:\(\w{0,40}\)|_\w|\.\w{1,40}\()",
        r"""code function algorithms? python javascript typescript java rust sql regex(?:p|es)? bugs? debug compile[rs]?
        class method refactor implement unit\stests? stack\strace exception recursion recursive complexity api json
        html css bash shell script program query""",
    ),
    "steps": _pattern(
        r"^[ \t]*(?:\d{1,3}[.)]|[-*•])[ \t]",
        r"""first second(?:ly)? then next afterwards after\sthat finally lastly steps? plan schedule each while until
        before after""",
    ),
    "reasoning": _pattern(
        r"\bif\s.{1,80}\bthen\b",
        r"""why prove show\sthat derive deduce explain compare contrast analy[sz]e evaluate justify design optimi[sz]e
        trade-?offs? pros\sand\scons puzzle riddle logic(?:al(?:ly)?)? suppose assum(?:e|ing) therefore must\sbe
        cause[sd]? consequences? strategy reason(?:ing)? which\sof""",
    ),
}


@dataclasses.dataclass(frozen=True)
class Assessment:
    """What was found in a request: points per feature, their sum, and the tokens of thought that follow from it."""

    score: float
    features: tuple[tuple[str, float], ...]  # those with points, most points first
    budget: int

    def __str__(self) -> str:
        """For logs and headers: `score 4.5 (maths 3, numbers 1.5)`."""
        found = ", ".join(f"{name} {points:g}" for name, points in self.features)
        return f"score {self.score:g}" + (f" ({found})" if found else "")


def assess(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, rules: Complexity = COMPLEXITY
) -> Assessment:
    """The complexity of a conversation's last user message, with the tools it may use."""
    text = _last_user_text(messages)
    counts = findings(text)
    counts["tools"] = len(tools or ())
    points = {name: min(rules.most[name], rules.points[name] * counts[name]) for name in rules.points}
    score = sum(points.values())
    ordered = sorted(((name, value) for name, value in points.items() if value), key=lambda pair: (-pair[1], pair[0]))
    return Assessment(score, tuple(ordered), rules.budget(score))


def findings(text: str) -> dict[str, int]:
    """How often each feature was found in a text."""
    seen = text if len(text) <= 2 * LOOKED_AT else f"{text[:LOOKED_AT]}\n{text[-LOOKED_AT:]}"
    counts = {name: sum(1 for _ in pattern.finditer(seen)) for name, pattern in _PATTERNS.items()}
    counts["steps"] += max(0, seen.count("?") - 1)
    counts["length"] = len(text.split()) // WORDS_PER_FINDING
    return counts


def _last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""
