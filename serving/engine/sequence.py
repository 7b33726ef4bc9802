"""One running answer: what the host knows of a request."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import Counter

import numpy as np

from ...cache.keys import Identity
from ...cache.load import Load
from ...configs.engine import BLOCK, MAX_DRAFT
from ...kernels.attention import KVPool
from .grammars import Guide
from .prediction import came_true
from .request import SOURCES, Emission, FinishReason, Keep, SamplingParams, Sink, Timings, TokenLogprob, Usage
from .thoughts import Channels, ThoughtEnd

USUAL_ANSWER = 256
"""Tokens of an answer, at most, for the order of those who wait."""

PROMPT_TOKENS = 8
"""Prompt tokens that take about as long as a token of an answer."""


class Phase(enum.Enum):
    WAITING = "waiting"  # in the queue, holds nothing
    LOADING = "loading"  # has a slot; stored KV of its prompt is being brought up
    PREFILL = "prefill"  # has a slot; its prompt is being computed
    DECODE = "decode"  # has a slot; the whole prompt was dispatched
    PAUSED = "paused"  # preempted; its KV is in host memory
    DONE = "done"


@dataclasses.dataclass
class Grown:
    """What one step brought for one sequence."""

    tokens: list[int]
    sources: list[int]
    logprobs: list[TokenLogprob]
    digests: list[int]
    features: np.ndarray | None
    passes: int  # that brought tokens
    drafted: int  # tokens tried in them


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in the engine. Owned by the engine thread once submitted."""

    id: str
    params: SamplingParams
    prompt: np.ndarray  # int32
    seed: int
    stop_ids: tuple[int, ...]
    limit: int  # last position that may be generated
    limit_reason: FinishReason
    sink: Sink
    text: Channels | None
    identity: Identity  # whose blocks, and computed by what
    sources: int  # where its drafts may come from, 0: nowhere
    keep: Keep = "blocks"
    flow: tuple[str, int] = ("", 0)  # principal and priority: the requests among which it takes turns (`Turns`)
    turn: float = 0.0  # flows that wait for a slot are served in ascending order of this
    guide: Guide | None = None  # through its grammar
    submitted: float = dataclasses.field(default_factory=time.monotonic)

    phase: Phase = Phase.WAITING
    shard: int = 0
    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the blocks published so far, in order
    generated: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # prompt tokens whose KV exists or is being written by a dispatched step
    part: tuple[int, int] | None = None  # a block that begins like its next one, held, and how many tokens of it
    found: Counter[str] = dataclasses.field(default_factory=Counter)  # of these, tokens found, by tier
    expected: bool = False  # what it will need was asked for ahead
    load: Load | None = None  # of what the tiers have of its prompt
    before_load: int = 0  # prompt tokens that the pool had
    arranged: float = 0.0  # when everything found was in place
    kept: int = 0  # blocks that were offered to the tiers, or did not need to be
    in_flight: int = 0  # passes dispatched for it that may choose a token and were not read yet
    conclude_at: int | None = None  # where the conclusion of its thoughts begins, known while paused
    saved: list[KVPool] = dataclasses.field(default_factory=list)  # contents of its blocks while paused
    resume_as: Phase = Phase.PREFILL
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    passes: int = 0
    drafted: int = 0
    summed: np.ndarray | float = 0.0  # of its prompt tokens, hidden states; if it is to be embedded
    accepted: dict[int, int] = dataclasses.field(default_factory=dict)  # by source

    def __post_init__(self) -> None:
        how = self.params.thinking
        self._end = ThoughtEnd(how.close) if how is not None else None

    @property
    def root(self) -> bytes:
        """The key that its chain of blocks starts from."""
        return self.identity.root

    @property
    def width(self) -> int:
        """Tokens that one pass can add to it."""
        return 1 + MAX_DRAFT if self.sources or self.params.thinking is not None else 1

    @property
    def size(self) -> float:
        """What it asks for, in tokens of an answer. Most answers end before a distant limit."""
        return min(self.limit - len(self.prompt) + 1, USUAL_ANSWER) + len(self.prompt) / PROMPT_TOKENS

    @property
    def cached(self) -> int:
        """Prompt tokens whose KV was found."""
        return self.found.total()

    @property
    def position(self) -> int:
        """Position of the last token that is known: the prompt's last, or the last generated one."""
        return len(self.prompt) + len(self.generated) - 1

    @property
    def furthest(self) -> int:
        """The last position that it can have reached when what is in flight is done."""
        return self.position + self.in_flight * self.width

    @property
    def exhausted(self) -> bool:
        """Whether the passes in flight reach the limit, if each brings no more than one token."""
        return self.position + self.in_flight >= self.limit

    @property
    def can_decode(self) -> bool:
        """Whether the next step can choose tokens for it. One that follows a grammar waits for what the last step
        chose, and for the masks that follow from it."""
        if self.phase is not Phase.DECODE or self.exhausted:
            return False
        return self.guide is None or (self.in_flight == 0 and self.guide.steering is not None)

    @property
    def thinking(self) -> bool:
        """Whether the next token is a thought."""
        return self._end is not None and not self._end.ended

    @property
    def kv_length(self) -> int:
        """Positions whose KV exists once everything dispatched and read is done (a lower bound while in flight)."""
        phase = self.resume_as if self.phase is Phase.PAUSED else self.phase
        return self.position if phase is Phase.DECODE and self.generated else self.prefilled

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids at positions `start` to `stop`."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        head = self.prompt[start:] if start < n else self.prompt[:0]
        return np.concatenate([head, np.asarray(self.generated[max(start - n, 0) : stop - n], np.int32)])

    def commit(self, grown: Grown, now: float) -> Emission | None:
        """Take what one read step brought; the emission says whether the request has ended. None: no tokens."""
        token_ids = grown.tokens
        if not token_ids:
            return None
        reason: FinishReason | None = None
        for n, token in enumerate(token_ids, 1):
            thought = self.thinking  # an end id among thoughts is part of their conclusion
            if self._end is not None and thought:
                self._end.push(token)
            if token in self.stop_ids and not thought:
                reason = "stop_token"
            elif self.position + n >= self.limit:
                reason = self.limit_reason
            if reason is not None:
                token_ids = token_ids[:n]
                break
        thoughts = text = ""
        if self.text is not None:
            thoughts, text, stop_at = self.text.push(token_ids)
            if stop_at is not None:
                token_ids, reason = token_ids[: stop_at + 1], "stop_string"
        n = len(token_ids)
        self.generated += token_ids
        self._account(grown, n)
        self.first_token = self.first_token or now
        self.last_token = now
        return Emission(
            text, tuple(token_ids), tuple(grown.logprobs[:n]), tuple(grown.digests[:n]), reason, thought=thoughts,
            sources=tuple(grown.sources[:n]), features=None if grown.features is None else grown.features[:n],
        )  # fmt: skip

    def _account(self, grown: Grown, tokens: int) -> None:
        self.passes += grown.passes
        self.drafted += grown.drafted
        for source in grown.sources[:tokens]:
            if source:
                self.accepted[source] = self.accepted.get(source, 0) + 1

    def _usage(self, thoughts: int) -> Usage:
        prediction = self.params.prediction
        true = came_true(prediction, self.generated) if prediction else 0
        return Usage(
            len(self.prompt),
            len(self.generated),
            self.cached,
            thoughts,
            tuple((tier, n) for tier, n in self.found.items() if n),
            accepted_prediction_tokens=true,
            rejected_prediction_tokens=len(prediction) - true,
        )

    def close(self, reason: FinishReason, emission: Emission, error: str | None = None) -> Emission:
        """The last emission: `emission` with the held-back text, usage and timings."""
        now = time.monotonic()
        thought, rest = self.text.finish() if self.text is not None else ("", "")
        thoughts = self.text.thought_tokens if self.text is not None else 0
        self.phase = Phase.DONE
        return dataclasses.replace(
            emission,
            text=emission.text + rest,
            thought=emission.thought + thought,
            finish_reason=reason,
            usage=self._usage(thoughts),
            timings=Timings(
                queued=(self.admitted or now) - self.submitted,
                ttft=(self.first_token or now) - self.submitted,
                total=now - self.submitted,
                decode=self.last_token - self.first_token,
                passes=self.passes,
                drafted=self.drafted,
                accepted=tuple((SOURCES[source], n) for source, n in sorted(self.accepted.items())),
                cache=max(self.arranged - self.admitted, 0.0),
            ),
            error=error,
            embedding=self._embedding(),
        )

    def _embedding(self) -> np.ndarray | None:
        if not self.params.embed or self.prefilled < len(self.prompt):
            return None
        length = float(np.linalg.norm(self.summed))
        return np.asarray(self.summed / max(length, 1e-30), np.float32)


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK)
