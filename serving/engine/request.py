"""What goes into the engine and what comes out of it: plain data, no JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ...configs.engine import MAX_TOP_LOGPROBS
from ...kernels.draft import LOOKUP, SHADOW
from .grammar import Grammar
from .thoughts import Thinking

FinishReason = Literal["stop_token", "stop_string", "max_tokens", "context_length", "cancelled", "error"]
"""Why a request ended. `stop_token`: the model's own end (or a stop id); `context_length`: no position left."""

DraftSource = Literal["auto", "off", "lookup", "shadow"]
DRAFT_SOURCES = ("auto", "off", "lookup", "shadow")

Keep = Literal["nothing", "blocks", "conversation"]
"""What of a request's KV may outlive it. `nothing`: nothing that reaches a disk or another machine; `blocks`: whole
blocks; `conversation`: the partly filled last one as well, for what will be continued."""

KEEPS: tuple[Keep, ...] = ("nothing", "blocks", "conversation")

LOCAL = "local"
"""The principal of requests where nobody is authenticated."""

FORCED = 3
SOURCES = {LOOKUP: "lookup", SHADOW: "shadow", FORCED: "forced"}
"""Who drafts tokens, by number. Forced ones stand whatever the trunk says: the end of thoughts at their budget, and
tokens that are the only ones that a grammar allows."""

MAX_STOP_IDS = 16  # of a request, beside as many of the model's own
MAX_LOGIT_BIAS = 512


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen. Temperature 0 is greedy.

    The order is: penalties and bias, the grammar, temperature, top-k, top-p, min-p, then the token with the largest
    log-probability plus Gumbel noise. Noise depends on the seed, the position and the vocabulary id, on nothing else.
    The repetition penalty looks at prompt and answer, presence and frequency penalties at the answer.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: drawn by the engine
    max_tokens: int | None = None  # None: as long as the context allows
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: no log-probabilities; k: the chosen token's and the k most likely
    embed: bool = False  # the mean of the prompt's hidden states; nothing of it is taken from a cache
    digest: bool = False  # a CRC of every raw row of logits that chose a token
    draft: DraftSource = "auto"  # where drafted tokens come from; auto: wherever they can
    relax: float = 0.0  # greedy: a drafted token stands if its logit is at most this far below the best; 0: exact
    layers: tuple[int, ...] | None = None  # the layers that run, ascending; None: all
    thinking: Thinking | None = None
    prediction: tuple[int, ...] = ()  # what the answer may say: tokens that the lookup drafts from too
    grammar: Grammar | None = None  # what the text of the answer (not that of its thoughts) must match
    level: str | None = None  # the level that chose the four above, to be reported

    def __post_init__(self) -> None:
        """Raises `ValueError` in one sentence that names the parameter, what it got and what is allowed."""
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop token ids are supported, got {len(self.stop_token_ids)}")
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias:
            _between(f"logit_bias of token {token}", bias, -100.0, 100.0)
        if self.draft not in DRAFT_SOURCES:
            raise ValueError(f"draft {self.draft!r} is not supported; supported: {', '.join(DRAFT_SOURCES)}")
        _between("relax", self.relax, 0.0, 100.0)
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"layers must be different layer numbers in ascending order, got {list(self.layers)}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos is not possible with a grammar, which says where the answer ends")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {self.logprobs}")


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if math.isnan(value) or not (low < value if open_low else low <= value) or value > high:
        raise ValueError(
            f"{name} must be {'above' if open_low else 'at least'} {low:g} and at most {high:g}, got {value}"
        )


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model (before penalties and temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


@dataclasses.dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    thought_tokens: int = 0
    cached_by_tier: tuple[tuple[str, int], ...] = ()
    """The cached ones by where their KV was: "device", "memory", "disk" or "objects"."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Tokens of `SamplingParams.prediction` that the answer has, and those that it has not (`prediction.py`)."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds. `ttft` runs from submission to the first emitted token, `queued` to admission."""

    queued: float
    ttft: float
    total: float
    decode: float  # from the first emission to the last
    passes: int  # trunk passes that emitted tokens
    drafted: int = 0  # tokens that were drafted for them
    accepted: tuple[tuple[str, int], ...] = ()  # tokens that stood, by who drafted them
    cache: float = 0.0  # from admission until the KV that was found was in place


@dataclasses.dataclass(frozen=True)
class Emission:
    """What one step added to one request. `text` may lag behind `token_ids`: characters and possible stop strings
    that are not complete are held back; concatenated, the texts of a request are its whole text."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    digests: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # on the last emission
    timings: Timings | None = None  # on the last emission
    error: str | None = None  # one sentence, when finish_reason is "error"
    thought: str = ""  # like `text`, of what the model writes for itself before the answer
    sources: tuple[int, ...] = ()  # who drafted each token (SOURCES), 0: the trunk
    embedding: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """float32 [D], on the last emission, if asked for: the mean of the prompt's hidden states after the final norm, of
    length 1."""
    features: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """float16 [tokens, D], if the engine keeps them: the hidden state before the final norm that chose each token."""


Sink = Callable[[Sequence[tuple[str, Emission]]], None]
"""Receives (request id, emission) pairs, once per step, on the engine's thread: it must only hand them over."""


class EngineStopped(RuntimeError):
    """The engine does not take requests: it was not started, was closed, or failed."""


class QueueFull(Exception):
    """The waiting queue is full; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"the queue is full ({waiting} requests waiting); try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class PromptTooLong(ValueError):
    """The prompt leaves no position to generate in."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; this server's context is {context_length} tokens, "
            f"so at most {context_length - 1} can be the prompt"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length
