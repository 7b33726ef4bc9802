"""What the OpenAI endpoints share in answering: ids, usage, log-probabilities beside text, whole and streamed replies.

`openai_chat` and `openai_completions` say how a choice looks (`Shape`); `respond` does the rest.
"""

from __future__ import annotations

import codecs
import dataclasses
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from ..effort import Prepared
from ..engine.request import Emission, TokenLogprob, Usage
from ..engine.thoughts import Thinking, ThoughtEnd
from .bridge import Reply
from .errors import openai_body
from .middleware import request_info
from .schemas import SamplingBody
from .service import Loaded, Service, failure, gather
from .stream import KEEP_ALIVE, EventStream, Watch, event

FINISH = {"stop_token": "stop", "stop_string": "stop", "max_tokens": "length", "context_length": "length"}
"""The engine's reasons in OpenAI's words; the others are errors."""


class Shape(Protocol):
    """How the answers of one request look. It may keep state per choice: emissions of a choice come in order."""

    id_prefix: str
    object: str
    chunk_object: str
    thinking: Thinking | None
    """How the choices think; known once the request is prepared, before the first emission."""

    def whole(self, index: int, emission: Emission) -> dict[str, Any]:
        """A finished choice."""
        ...

    def pieces(self, index: int, emission: Emission) -> list[dict[str, Any]]:
        """The choice in the chunks that tell a stream's client about `emission`; none if there is nothing to tell."""
        ...


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that has been checked and only needs running."""

    body: SamplingBody
    loaded: Loaded
    shape: Shape
    prepare: Callable[[], Sequence[Prepared]]
    """Gives every prompt as the engine wants it; runs in a worker."""
    prompts: int
    prompt_param: str
    ignored: Sequence[str]

    @property
    def n(self) -> int:
        return 1 if self.body.n is None else self.body.n

    @property
    def choices(self) -> int:
        return self.prompts * self.n

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def head(self) -> dict[str, Any]:
        """The fields that every chunk, or the whole answer, begins with."""
        return {
            "id": f"{self.shape.id_prefix}-{uuid.uuid4().hex}",
            "object": self.shape.chunk_object if self.body.stream else self.shape.object,
            "created": int(time.time()),
            "model": self.loaded.name,
            "system_fingerprint": self.loaded.engine.system_fingerprint,
        }


async def respond(request: Request, service: Service, call: Call) -> Response:
    """Run the request and answer it, streamed or whole. The engine's work ends when the client goes."""
    reply = service.new_reply()
    watch = Watch(request, reply)
    handed_over = False
    notes = request_info(request.scope).notes
    try:
        prepared = await service.submit(reply, call.prepare, call.n, call.prompt_param)
        call.shape.thinking = prepared[0].params.thinking
        effort = _effort(prepared[0])
        notes["prompt_tokens"] = prompt_tokens = sum(len(one.prompt) for one in prepared)
        notes.update(effort)
        headers = {
            "x-umbra-prompt-tokens": str(prompt_tokens),
            **{f"x-umbra-{name}": value for name, value in effort.items()},
            **_ignored_header(call.ignored),
        }
        if not call.body.stream:
            emissions = await gather(reply, call.choices)
            notes.update(_notes(emissions))
            return _whole(call, emissions, headers)
        handed_over = True
        return EventStream(
            _chunks(call, reply, service.config.heartbeat, notes),
            reply=reply,
            watch=watch,
            error_event=lambda error: event(openai_body(error)),
            send_timeout=service.config.send_timeout,
            headers=headers,
        )
    finally:
        if not handed_over:
            reply.close()
            await watch.stop()


def _whole(call: Call, emissions: Sequence[Emission], headers: dict[str, str]) -> Response:
    answer = {
        **call.head(),
        "choices": [call.shape.whole(index, emission) for index, emission in enumerate(emissions)],
        "usage": usage(emissions, call.n),
    }
    headers = {**headers, **_timing_headers(emissions[0])}
    return Response(to_json(answer), media_type="application/json", headers=headers)


async def _chunks(call: Call, reply: Reply, heartbeat: float, notes: dict[str, Any]) -> AsyncIterator[bytes]:
    """The events of a stream. What one step emitted goes out as one write."""
    head = call.head()
    no_usage: dict[str, Any] = {"usage": None} if call.include_usage else {}
    ended: dict[int, Emission] = {}
    while len(ended) < call.choices:
        batch = await reply.take(heartbeat)
        if not batch:
            yield KEEP_ALIVE
        out, error = b"", None
        for index, emission in batch:
            if (error := failure(emission)) is not None:
                emission = dataclasses.replace(emission, finish_reason=None)  # its text is still sent
            if error is None or emission.text or emission.thought:
                for piece in call.shape.pieces(index, emission):
                    out += event({**head, "choices": [piece], **no_usage})
            if error is not None:
                break
            if emission.finish_reason is not None:
                ended[index] = emission
        if out:
            yield out
        if error is not None:
            raise error
    emissions = [ended[index] for index in range(call.choices)]
    notes.update(_notes(emissions))
    if call.include_usage:
        yield event({**head, "choices": [], "usage": usage(emissions, call.n)})
    yield b"data: [DONE]\n\n"


def usage(emissions: Sequence[Emission], n: int) -> dict[str, Any]:
    """Tokens of a request, from the last emission of each choice: every prompt counts once, however many choices (`n`)
    it has; every output token counts."""
    finished = [emission.usage or Usage(0, 0) for emission in emissions]
    prompts = finished[::n]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.thought_tokens for one in finished),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def token_bytes(loaded: Loaded, token: int) -> bytes:
    """Bytes of a token in running text; of a special token those of its name; none without a tokenizer."""
    tokenizer = loaded.model.tokenizer
    if tokenizer is None:
        return b""
    return tokenizer.token_bytes(token) or tokenizer.token_str(token).encode()


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI's stand-in for an impossible token is -9999."""
    return max(logprob, -9999.0)


class TextAligner:
    """Holds log-probabilities back until their token's text is sent, as text may lag behind tokens.

    Tokens whose text is never sent (a stop string, the end of the turn) drop out, so that the tokens listed and the
    text agree. `take` gives (log-probability, position of the token's first character in the answer) pairs. Thoughts,
    and the white space after them, are not listed.
    """

    def __init__(self, running_bytes: Callable[[int], bytes] | None, thinking: Thinking | None = None) -> None:
        self._bytes = running_bytes
        self._thoughts = ThoughtEnd(thinking.close) if thinking is not None else None
        self._skip_space = thinking is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = 0  # characters before the next token
        self._sent = 0
        self._waiting: deque[tuple[TokenLogprob, int]] = deque()

    def take(self, emission: Emission) -> list[tuple[TokenLogprob, int]]:
        for item in emission.logprobs:
            if self._thoughts is not None and not self._thoughts.ended:
                self._thoughts.push(item.token_id)
                continue
            text = self._decoder.decode(self._bytes(item.token_id)) if self._bytes is not None else ""
            if self._skip_space and text:
                text = text.lstrip()
                self._skip_space = not text
                if not text:
                    continue
            self._waiting.append((item, self._start))
            self._start += len(text)
        self._sent += len(emission.text)
        ready = []
        while self._waiting and (self._bytes is None or self._waiting[0][1] < self._sent):
            ready.append(self._waiting.popleft())
        return ready


def aligner(loaded: Loaded, thinking: Thinking | None = None) -> TextAligner:
    tokenizer = loaded.model.tokenizer
    return TextAligner(None if tokenizer is None else tokenizer.token_bytes, thinking)


def _effort(prepared: Prepared) -> dict[str, str]:
    """For headers and the log: the level, and how much is thought if the request said something about it."""
    level, choice = prepared.params.level or "", prepared.choice
    if choice is None or not (choice.asked or choice.assessment):
        return {"level": level}
    return {"level": level, "thinking": str(choice)}


def _ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Names of unknown keys, at most ten, reduced to characters that may stand in a header."""
    names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:40] for name in ignored[:10]]
    return {"x-umbra-ignored": ",".join(names)} if names else {}


def _timing_headers(emission: Emission) -> dict[str, str]:
    """Times of the first choice, in milliseconds."""
    times, used = emission.timings, emission.usage
    if times is None or used is None:
        return {}
    return {
        "x-umbra-queue-ms": f"{times.queued * 1000:.1f}",
        "x-umbra-ttft-ms": f"{times.ttft * 1000:.1f}",
        "x-umbra-total-ms": f"{times.total * 1000:.1f}",
        "x-umbra-cached-tokens": str(used.cached_tokens),
        "x-umbra-tokens-per-pass": f"{used.completion_tokens / max(times.passes, 1):.2f}",
    }


def _notes(emissions: Sequence[Emission]) -> dict[str, Any]:
    """For the log line of the request."""
    first = emissions[0].timings
    notes: dict[str, Any] = {
        "tokens": sum(one.usage.completion_tokens for one in emissions if one.usage is not None),
        "finish": ",".join(sorted({one.finish_reason or "?" for one in emissions})),
    }
    if first is not None:
        notes.update(queue_ms=round(first.queued * 1000, 1), ttft_ms=round(first.ttft * 1000, 1))
    return notes
