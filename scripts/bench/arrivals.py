"""What is asked of a server, and when: open loop, so that a slow server does not slow the questions down."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...configs.prompt_sets import Prompt
from .processes import BenchError

BLOCK_TOKENS = 512
"""Prompt tokens named by one of a trace's `hash_ids`; equal ids mean equal text."""

TOKENS_PER_WORD = 1.3
"""About what tokenizers make of English words; real counts are in the rows."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request: `at` seconds after the start a user sends `text` and wants `max_tokens` tokens."""

    id: str
    category: str
    at: float
    text: str
    max_tokens: int


def poisson(
    prompts: Sequence[Prompt], count: int, rate: float, max_tokens: int, seed: int, round_number: int
) -> list[Arrival]:
    """`count` requests with exponential times between them, `rate` a second on average.

    Times are those of `seed` in every round; prompts go on where the round before ended, so that no prompt is asked
    twice (and found in a cache) before all were.
    """
    noise = random.Random(seed)
    at = 0.0
    arrivals = []
    for i in range(count):
        prompt = prompts[(round_number * count + i) % len(prompts)]
        arrivals.append(Arrival(f"{i + 1}:{prompt.id}", prompt.category, at, prompt.turns[0], max_tokens))
        at += noise.expovariate(rate)
    return arrivals


def trace(
    path: Path, prompts: Sequence[Prompt], count: int, round_number: int, *, time_scale: float, length_scale: float
) -> list[Arrival]:
    """The first `count` requests of a trace: JSON lines, gzipped or not, with `timestamp` (milliseconds) and either

    - `input_length`, `output_length` (tokens) and `hash_ids`: lengths are multiplied by `length_scale`, and the text is
      made of words of the prompt set, one fixed piece for each hash id (in each round another); or
    - `turns` and `max_tokens`: a prompt as in prompt files, with the length of its answer.
    """
    words = sorted({word for prompt in prompts for word in prompt.turns[0].split() if word.isalpha()})
    arrivals: list[Arrival] = []
    start: float | None = None
    for number, row in _rows(path, count):
        try:
            start = row["timestamp"] if start is None else start
            at = (row["timestamp"] - start) / 1e3 * time_scale
            if "turns" in row:
                text, tokens, category = row["turns"][0], row["max_tokens"], str(row.get("category", "trace"))
            else:
                blocks = [f"{round_number}/{block}" for block in row["hash_ids"]]
                text = _text(blocks, row["input_length"], length_scale, words)
                tokens, category = max(1, round(row["output_length"] * length_scale)), "trace"
            arrivals.append(Arrival(str(number), category, at, text, tokens))
        except (KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BenchError(f"{path}, line {number}: not a request of a trace ({what})") from None
    if not arrivals:
        raise BenchError(f"the trace {path} holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _rows(path: Path, count: int) -> list[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = [line for _, line in zip(range(count), file, strict=False)]
        return [(number, json.loads(line)) for number, line in enumerate(lines, 1)]
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read the trace {path}: {error}") from None


def _text(blocks: Sequence[str], tokens: int, scale: float, words: Sequence[str]) -> str:
    """Words for a prompt of `tokens * scale` tokens; each block of it is chosen by its name alone."""
    pieces = []
    for index, block in enumerate(blocks):
        length = min(BLOCK_TOKENS, tokens - index * BLOCK_TOKENS) * scale / TOKENS_PER_WORD
        chosen = random.Random(block).choices(words, k=max(1, round(BLOCK_TOKENS * scale / TOKENS_PER_WORD)))
        pieces.append(" ".join(chosen[: max(1, round(length))]))
    return " ".join(pieces)
