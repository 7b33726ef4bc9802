"""A client that sends requests at their times and notes when the pieces of each answer arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from .arrivals import Arrival


@dataclasses.dataclass
class Outcome:
    """One request. Times are seconds after its arrival, so waiting for a place under the cap counts."""

    arrival: Arrival
    pieces: list[float] = dataclasses.field(default_factory=list)  # when each piece of the answer came
    tokens: int = 0
    prompt_tokens: int | None = None  # None: the server does not say
    cached_tokens: int | None = None
    end: float = 0.0
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def tok_s(self) -> float | None:
        span = self.pieces[-1] - self.pieces[0] if self.pieces else 0.0
        return (self.tokens - 1) / span if span > 0 else None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where to send requests. `ids` are the token ids of each text, for a model without a tokenizer."""

    url: str
    model: str
    suppress: Sequence[int]  # token ids that must not be chosen: the model's ends, so that lengths are as asked for
    ids: dict[str, list[int]] | None = None

    def request(self, arrival: Arrival, system: str | None = None) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": arrival.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.suppress:
            body["logit_bias"] = {str(token): -100 for token in self.suppress}
        if self.ids is not None:  # such a model emits no text; log-probabilities make its tokens visible
            return "/v1/completions", {**body, "prompt": self.ids[arrival.text], "logprobs": 0}
        messages = [{"role": "user", "content": arrival.text}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return "/v1/chat/completions", {**body, "messages": messages}


async def replay(
    target: Target, arrivals: Sequence[Arrival], concurrency: int, *, closed: bool = False, system: str | None = None
) -> tuple[list[Outcome], float]:
    """Send every request at its time, at most `concurrency` open at once. Gives outcomes and the seconds it took.

    `closed`: a request's time begins when there is a place for it, not when it arrives. `system`: the system prompt
    of all conversations.
    """
    places = asyncio.Semaphore(concurrency)
    outcomes = [Outcome(arrival) for arrival in arrivals]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=target.url, timeout=httpx.Timeout(600.0), limits=limits) as http:
        began = time.perf_counter()
        await asyncio.gather(*(_one(http, target, outcome, began, places, closed, system) for outcome in outcomes))
        return outcomes, time.perf_counter() - began


async def _one(
    http: httpx.AsyncClient, target: Target, outcome: Outcome, began: float, places: asyncio.Semaphore, closed: bool,
    system: str | None,
) -> None:  # fmt: skip
    arrived = began + outcome.arrival.at
    await asyncio.sleep(max(0.0, arrived - time.perf_counter()))
    async with places:
        arrived = time.perf_counter() if closed else arrived
        try:
            await _stream(http, target, outcome, arrived, system)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:200]
        outcome.end = time.perf_counter() - arrived


async def _stream(
    http: httpx.AsyncClient, target: Target, outcome: Outcome, arrived: float, system: str | None
) -> None:
    path, body = target.request(outcome.arrival, system)
    finished = False
    async with http.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            outcome.error = f"status {response.status_code}: {' '.join(text.split())}"[:200]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                outcome.error = f"in the stream: {event['error']}"[:200]
                return
            if _has_tokens(event):
                outcome.pieces.append(time.perf_counter() - arrived)
            finished = finished or any(choice.get("finish_reason") for choice in event.get("choices", ()))
            if usage := event.get("usage"):
                outcome.tokens, outcome.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.tokens = outcome.tokens or len(outcome.pieces)
    if not finished:
        outcome.error = "the stream ended without a finish reason"


def _has_tokens(event: dict[str, Any]) -> bool:
    """Whether an event carries a piece of the answer."""
    for choice in event.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            return True
        if (choice.get("logprobs") or {}).get("tokens"):
            return True
    return False
