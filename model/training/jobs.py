"""What training asks of whoever runs the trunk: plain data, so that model/ needs no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Job:
    """Tokens to be continued by the trunk. Temperature 0 is greedy, and `seed` then means nothing."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """The trunk's continuation of a job."""

    token_ids: tuple[int, ...]
    features: np.ndarray | None
    """float16 [n, D]: row i is the hidden state before the final norm that chose token i."""
    ended: bool
    """The trunk ended its answer itself."""


Generate = Callable[[Sequence[Job]], Iterator[tuple[int, Completion]]]
"""Runs jobs; gives (index of the job, completion) in any order. A completion depends on its job alone."""


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A trunk in conversation."""

    encode: Callable[[list[Message]], list[int]]
    """Ids of a conversation, up to the start of the answer."""
    encode_open: Callable[[str], list[int]] | None
    """Ids of a system message and the start of a user turn, for the trunk to say what a user would; None if the trunk
    has no tokenizer."""
    decode: Callable[[Sequence[int]], str] | None
    generate: Generate
    context_length: int
