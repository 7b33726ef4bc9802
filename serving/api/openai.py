"""What the OpenAI endpoints share in answering: ids, usage, whole and streamed replies.

`openai_chat` and `openai_completions` say how a choice looks (`Shape`); `respond` does the rest.
"""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from ..effort import Prepared
from ..engine.request import Emission, Keep, Usage
from ..engine.thoughts import Thinking
from .bridge import Reply
from .errors import openai_body
from .middleware import request_info
from .reporting import effort_notes, metadata, outcome, timing_headers
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
    def keep(self) -> Keep:
        """What may outlive the request: KV in all tiers, unless it says that nothing is to be stored."""
        return "nothing" if (self.body.model_extra or {}).get("store") is False else "blocks"

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
        prepared = await service.submit(reply, call.prepare, call.n, call.prompt_param, call.keep)
        call.shape.thinking = prepared[0].params.thinking
        effort = effort_notes(prepared[0])
        notes["prompt_tokens"] = prompt_tokens = sum(len(one.prompt) for one in prepared)
        notes.update(effort)
        headers = {
            "x-umbra-prompt-tokens": str(prompt_tokens),
            **{f"x-umbra-{name}": value for name, value in effort.items()},
            **_ignored_header(call.ignored),
        }
        if not call.body.stream:
            emissions = await gather(reply, call.choices)
            notes.update(outcome(emissions))
            return _whole(call, emissions, headers)
        handed_over = True
        return EventStream(
            _chunks(call, reply, service.config.heartbeat, notes, effort),
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
    headers = {**headers, **timing_headers(emissions[0])}
    return Response(to_json(answer), media_type="application/json", headers=headers)


async def _chunks(
    call: Call, reply: Reply, heartbeat: float, notes: dict[str, Any], told: dict[str, str]
) -> AsyncIterator[bytes]:
    """The events of a stream. What one step emitted goes out as one write. `told` is what the chunk that ends the last
    choice says of the effort, beside times."""
    head = call.head()
    no_usage: dict[str, Any] = {"usage": None} if call.include_usage else {}
    ended: dict[int, Emission] = {}
    while len(ended) < call.choices:
        batch = await reply.take(heartbeat)
        if not batch:
            yield KEEP_ALIVE
        chunks: list[dict[str, Any]] = []
        error = None
        for index, emission in batch:
            if (error := failure(emission)) is not None:
                emission = dataclasses.replace(emission, finish_reason=None)  # its text is still sent
            if error is None or emission.text or emission.thought:
                chunks += [{**head, "choices": [piece], **no_usage} for piece in call.shape.pieces(index, emission)]
            if error is not None:
                break
            if emission.finish_reason is not None:
                ended[index] = emission
        if chunks and len(ended) == call.choices:
            emissions = [ended[index] for index in range(call.choices)]
            chunks[-1]["umbraMetadata"] = {**told, **metadata(emissions, head["system_fingerprint"])}
        if chunks:
            yield b"".join(map(event, chunks))
        if error is not None:
            raise error
    emissions = [ended[index] for index in range(call.choices)]
    notes.update(outcome(emissions))
    if call.include_usage:
        yield event({**head, "choices": [], "usage": usage(emissions, call.n)})
    yield b"data: [DONE]\n\n"


def usage(emissions: Sequence[Emission], n: int) -> dict[str, Any]:
    """Tokens of a request, from the last emission of each choice: every prompt counts once, however many choices (`n`)
    it has; every output token counts, and so do, as the protocol has it, tokens of a prediction that did not come
    true."""
    finished = [emission.usage or Usage(0, 0) for emission in emissions]
    prompts = finished[::n]
    prompt = sum(one.prompt_tokens for one in prompts)
    rejected = sum(one.rejected_prediction_tokens for one in finished)
    completion = sum(one.completion_tokens for one in finished) + rejected
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.thought_tokens for one in finished),
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(one.accepted_prediction_tokens for one in finished),
            "rejected_prediction_tokens": rejected,
        },
    }


def _ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Names of unknown keys, at most ten, reduced to characters that may stand in a header."""
    names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:40] for name in ignored[:10]]
    return {"x-umbra-ignored": ",".join(names)} if names else {}
