"""One running answer: what the host knows of a request."""

from __future__ import annotations

import dataclasses
import enum
import time

import numpy as np

from ...configs.engine import BLOCK
from ...kernels.attention import KVPool
from .request import Emission, FinishReason, SamplingParams, Sink, Timings, TokenLogprob, Usage
from .text import TextStream


class Phase(enum.Enum):
    WAITING = "waiting"  # in the queue, holds nothing
    PREFILL = "prefill"  # has a slot; its prompt is being computed
    DECODE = "decode"  # has a slot; the whole prompt was dispatched
    PAUSED = "paused"  # preempted; its KV is in host memory
    DONE = "done"


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
    text: TextStream | None
    submitted: float = dataclasses.field(default_factory=time.monotonic)

    phase: Phase = Phase.WAITING
    shard: int = 0
    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the blocks published so far, in order
    generated: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # prompt tokens whose KV exists or is being written by a dispatched step
    cached: int = 0  # of these, tokens found in the pool
    in_flight: int = 0  # passes dispatched for it that may choose a token and were not read yet
    saved: list[KVPool] = dataclasses.field(default_factory=list)  # contents of its blocks while paused
    resume_as: Phase = Phase.PREFILL
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    passes: int = 0

    @property
    def position(self) -> int:
        """Position of the last token that is known: the prompt's last, or the last generated one."""
        return len(self.prompt) + len(self.generated) - 1

    @property
    def next_write(self) -> int:
        """Position whose KV the next decode pass would write."""
        return self.position + self.in_flight

    @property
    def exhausted(self) -> bool:
        """Whether the passes in flight already reach the limit."""
        return self.next_write >= self.limit

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

    def commit(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprob],
        digests: list[int],
        features: np.ndarray | None,
        now: float,
    ) -> Emission | None:
        """Take the tokens of one read step; the emission says whether the request has ended. None: no tokens."""
        if not token_ids:
            return None
        reason: FinishReason | None = None
        for n, token in enumerate(token_ids, 1):
            at_limit = self.position + n >= self.limit
            if token in self.stop_ids or at_limit:
                reason = "stop_token" if token in self.stop_ids else self.limit_reason
                token_ids = token_ids[:n]
                break
        text = ""
        if self.text is not None:
            text, stop_at = self.text.push(token_ids)
            if stop_at is not None:
                token_ids, reason = token_ids[: stop_at + 1], "stop_string"
        n = len(token_ids)
        self.generated += token_ids
        self.passes += n  # one token a pass
        self.first_token = self.first_token or now
        self.last_token = now
        return Emission(text, tuple(token_ids), tuple(logprobs[:n]), tuple(digests[:n]), reason, features=features)

    def close(self, reason: FinishReason, emission: Emission, error: str | None = None) -> Emission:
        """The last emission: `emission` with the held-back text, usage and timings."""
        now = time.monotonic()
        rest = self.text.finish() if self.text is not None else ""
        self.phase = Phase.DONE
        return dataclasses.replace(
            emission,
            text=emission.text + rest,
            finish_reason=reason,
            usage=Usage(len(self.prompt), len(self.generated), self.cached),
            timings=Timings(
                queued=(self.admitted or now) - self.submitted,
                ttft=(self.first_token or now) - self.submitted,
                total=now - self.submitted,
                decode=self.last_token - self.first_token,
                passes=self.passes,
            ),
            error=error,
        )


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK)
