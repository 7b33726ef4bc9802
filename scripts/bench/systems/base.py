"""The contract of an adapter: load a model, then continue token sequences greedily and say when tokens came."""

from __future__ import annotations

import abc
import dataclasses
import itertools
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
    kernels: str = "auto"  # ours only: what `--kernels` says
    kv: str = "auto"  # ours only: what `--kv` says
    embedding: str = "file"  # ours only: precision of the embedding's rows
    chunk: int | None = None  # ours only: most prompt tokens of a step; None: the engine's default
    logits: bool = False  # ours only: keep raw logits, for `score`
    draft: str = "auto"  # ours only: where drafted tokens come from
    shadow: str = "auto"  # ours only: what `--shadow` says
    plain: bool = False  # ours only: programs that cannot draft
    draft_length: int | None = None  # ours only: always so many; None: the gate decides
    temperature: float = 0.0  # ours only: above 0, tokens are drawn with the number of the prompt as seed


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
    gaps: list[float] = dataclasses.field(default_factory=list)  # seconds from one emission to the next
    emitted: list[int] = dataclasses.field(default_factory=list)  # tokens of each emission; empty: not known
    answer: int | None = None  # tokens up to the first end of text, that included; None: not known

    @property
    def answer_passes(self) -> int | None:
        """Passes that emitted the answer up to its end; None where emissions are not passes."""
        if self.answer is None or len(self.emitted) != self.passes:
            return None
        reached = itertools.accumulate(self.emitted)
        return next((i for i, tokens in enumerate(reached, 1) if tokens >= self.answer), None)

    @property
    def tok_s(self) -> float | None:
        """Tokens after the first emission over the time after it."""
        rest = len(self.token_ids) - self.first_tokens
        return rest / (self.last - self.ttft) if rest > 0 and self.last > self.ttft else None

    @property
    def answer_tok_s(self) -> float | None:
        """The same up to the emission with the end of the answer; None if all of it came at once."""
        if self.answer is None:
            return None
        times = itertools.accumulate(self.gaps, initial=self.ttft)
        reached = itertools.accumulate(self.emitted or [self.first_tokens, *[1] * len(self.gaps)])
        tokens, when = next((n, t) for n, t in zip(reached, times, strict=True) if n >= self.answer)
        rest = tokens - self.first_tokens
        return rest / (when - self.ttft) if rest > 0 and when > self.ttft else None


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of one `generate` call: a stream per prompt, and the seconds until all had ended."""

    streams: list[Stream]
    seconds: float

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Run:
        return cls([Stream(**stream) for stream in value["streams"]], value["seconds"])


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a system says of a given text, token by token: its own most likely token there, and the logarithm of the
    probability that it gives to the text's."""

    top: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def add(self, logits: Any, follow: Sequence[int]) -> None:
        """Take in rows of `logits` `[R, V]` and the tokens of the text that follow them."""
        import numpy as np

        rows = logits.astype(np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        self.top.extend(rows.argmax(axis=1).tolist())
        self.logprobs.extend((rows[np.arange(len(follow)), follow] - total).tolist())


def between(times: Sequence[float]) -> list[float]:
    """The time from each to the next."""
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


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

    def score(self, sequences: Sequence[Sequence[int]], begins: Sequence[int]) -> list[Scores]:
        """Scores of every sequence's tokens from index `begins` (at least 1) on, each given those before it."""
        raise NotImplementedError(f"{type(self).__name__} cannot score a given text")
