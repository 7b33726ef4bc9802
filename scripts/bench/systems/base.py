"""The contract of an adapter: load a model, then continue token sequences greedily and say when tokens came."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a system is loaded with."""

    model: str  # ours: as given on the command line; a peer: path of the GGUF file
    quant: str
    threads: int
    mesh: tuple[int, int] | None
    sequences: int  # most sequences of one `generate` call
    context: int  # most tokens of one sequence, prompt and continuation


@dataclasses.dataclass(frozen=True)
class Stream:
    """One continued sequence. Seconds count from the call of `generate`."""

    prompt_tokens: int
    token_ids: list[int]
    ttft: float
    first_tokens: int  # tokens of the first emission
    last: float  # when the last token came
    passes: int | None = None  # trunk passes that emitted tokens; None: one per token
    cached_tokens: int = 0  # prompt tokens whose KV was already there

    @property
    def tok_s(self) -> float | None:
        """Tokens after the first emission over the time after it."""
        rest = len(self.token_ids) - self.first_tokens
        return rest / (self.last - self.ttft) if rest > 0 and self.last > self.ttft else None


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of one `generate` call: a stream per prompt, and the seconds until all had ended."""

    streams: list[Stream]
    seconds: float

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Run:
        return cls([Stream(**stream) for stream in value["streams"]], value["seconds"])


class System(abc.ABC):
    """One engine under test. Methods are called one at a time, in the worker's main thread."""

    @abc.abstractmethod
    def load(self, setup: Setup) -> dict[str, Any]:
        """Load the model. Gives `versions` {package: version} and `settings`: what was chosen for this system."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """Continue every prompt by exactly `max_tokens` tokens, greedily, past any end of text, all at once.

        Nothing computed for an earlier call may be used, except what the system cannot be told to forget: that is
        reported as `cached_tokens`.
        """
