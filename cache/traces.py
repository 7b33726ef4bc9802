"""Requests to replay: public traces, our own access logs, and made-up conversations, all of one form.

A line of a trace is a JSON object with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`: one
number per block of the prompt; two prompts with the same first n numbers have their first n blocks in common.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TracedRequest:
    """One request. `arrived` in seconds, lengths in tokens."""

    arrived: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """The first `limit` requests of a trace, gzipped or not. Raises `ValueError` for a line that is none."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return list(itertools.islice(_parsed(file, path), limit))


def _parsed(lines: Iterable[str], path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            yield TracedRequest(
                fields["timestamp"] / 1000, fields["input_length"], fields["output_length"], tuple(fields["hash_ids"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a line of a trace: {error}") from error


def conversations(
    count: int,
    *,
    turns: int,
    system_blocks: int,
    turn_blocks: int,
    block_tokens: int,
    output_tokens: int,
    pause: float,
    interval: float,
    seed: int = 0,
) -> list[TracedRequest]:
    """Chats that share a system prompt: each turn sends everything before it again, about `pause` seconds after the
    last one; a new chat begins about every `interval` seconds."""
    rng = random.Random(seed)
    ids = itertools.count(system_blocks)
    requests, begun = [], 0.0
    for _ in range(count):
        begun += rng.expovariate(1 / interval)
        blocks, arrived = list(range(system_blocks)), begun
        for _ in range(turns):
            blocks += [next(ids) for _ in range(turn_blocks)]
            requests.append(TracedRequest(arrived, len(blocks) * block_tokens, output_tokens, tuple(blocks)))
            arrived += rng.expovariate(1 / pause)
    return sorted(requests, key=lambda request: request.arrived)


def reuse_bound(requests: Iterable[TracedRequest]) -> float:
    """The share of blocks that a cache without end would find."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        total += len(request.blocks)
        found += next((n for n, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return found / total if total else 0.0
