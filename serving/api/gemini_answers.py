"""Answers of the Gemini protocol: candidates, log-probabilities, usage.

Whole answers and pieces of a stream look alike: a piece holds what is new.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Sequence
from typing import Any

from ..engine.request import Emission, Usage
from ..engine.thoughts import Thinking, ThoughtEnd
from .logprobs import finite, token_bytes
from .service import Loaded
from .tool_calls import BadCall, CallParser, Piece, ToolCall, Tools

FINISH = {"stop_token": "STOP", "stop_string": "STOP", "max_tokens": "MAX_TOKENS", "context_length": "MAX_TOKENS"}
"""The engine's reasons in Gemini's words; the others are errors."""


class Candidate:
    """One candidate of a request as its emissions come, in order."""

    def __init__(
        self,
        index: int,
        *,
        loaded: Loaded,
        show_thoughts: bool,
        logprobs: bool,
        thinking: Thinking | None,
        tools: Tools | None,
    ) -> None:
        """`thinking` is how the candidate thinks."""
        self._index = index
        self._show_thoughts = show_thoughts
        self._logprobs = _Logprobs(loaded, thinking) if logprobs else None
        self._calls = CallParser(tools.form) if tools is not None else None
        self._names = tools.names if tools is not None else frozenset()
        self._bad: str | None = None

    def whole(self, emission: Emission) -> dict[str, Any]:
        """The finished candidate. Without content if it ended before there was any."""
        return self._make(emission, self._parts(emission))

    def piece(self, emission: Emission) -> dict[str, Any] | None:
        """What `emission` adds; None for nothing. A piece always has a part, as clients drop a turn without one."""
        parts = self._parts(emission)
        if not parts and emission.finish_reason is None and not (self._logprobs and emission.logprobs):
            return None
        return self._make(emission, parts or [{"text": ""}])

    def empty(self) -> dict[str, Any]:
        """A piece that says nothing."""
        return {"index": self._index, "content": {"role": "model", "parts": [{"text": ""}]}}

    def _make(self, emission: Emission, parts: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {"index": self._index}
        said_all = emission.finish_reason in ("stop_token", "stop_string") and self._bad is None
        if said_all and all("thought" in part for part in parts):
            parts = [*parts, {"text": ""}]  # an answer that is empty is still one
        if parts:
            out["content"] = {"role": "model", "parts": parts}
        if self._logprobs is not None:
            out.update(self._logprobs.take(emission))
        if emission.finish_reason is not None:
            out["finishReason"] = FINISH[emission.finish_reason]
            if self._bad is not None:
                out |= {"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": self._bad}
            if emission.usage is not None:
                out["tokenCount"] = emission.usage.completion_tokens - emission.usage.thought_tokens
        return out

    def _parts(self, emission: Emission) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if self._show_thoughts and emission.thought:
            parts.append({"text": emission.thought, "thought": True})
        pieces: list[Piece] = [emission.text] if emission.text else []
        if self._calls is not None:
            pieces = self._calls.push(emission.text)
            if emission.finish_reason is not None:
                pieces += self._calls.finish()
        return parts + [part for piece in _joined(pieces) if (part := self._part(piece)) is not None]

    def _part(self, piece: Piece) -> dict[str, Any] | None:
        if isinstance(piece, str):
            return {"text": piece}
        if isinstance(piece, ToolCall) and piece.name in self._names:
            return {"functionCall": {"id": f"call_{uuid.uuid4().hex}", "name": piece.name, "args": piece.arguments}}
        reason = piece.reason if isinstance(piece, BadCall) else f"no function {piece.name[:60]!r} is declared"
        self._bad = self._bad or f"The model's function call cannot be used: {reason}"
        return None


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


class _Logprobs:
    """Log-probabilities of a candidate's tokens, thoughts left out.

    Every token that counts as output is listed. The token that ends a turn has no text, nor has white space after the
    thoughts, and of the tokens that share a character the last has it: the tokens' texts make up the text.
    """

    def __init__(self, loaded: Loaded, thinking: Thinking | None) -> None:
        self._loaded = loaded
        self._thoughts = ThoughtEnd(thinking.close) if thinking is not None else None
        self._skip_space = thinking is not None  # between the thoughts and the answer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sum = 0.0
        self._count = 0

    def take(self, emission: Emission) -> dict[str, Any]:
        """The fields of a candidate for the tokens of `emission`."""
        items = [item for item in emission.logprobs if not self._is_thought(item.token_id)]
        last = emission.finish_reason is not None
        chosen = [
            {
                "token": self._text(item.token_id, final=last and i == len(items) - 1),
                "tokenId": item.token_id,
                "logProbability": finite(item.logprob),
            }
            for i, item in enumerate(items)
        ]
        out: dict[str, Any] = {}
        if items:
            out["logprobsResult"] = {
                "topCandidates": [{"candidates": [self._entry(pair) for pair in item.top]} for item in items],
                "chosenCandidates": chosen,
                "logProbabilitySum": sum(finite(item.logprob) for item in items),
            }
        for item in items:
            self._sum += finite(item.logprob)
        self._count += len(items)
        if last and self._count:
            out["avgLogprobs"] = self._sum / self._count
        return out

    def _is_thought(self, token: int) -> bool:
        """Called once for every token, in order."""
        if self._thoughts is None or self._thoughts.ended:
            return False
        self._thoughts.push(token)
        return True

    def _text(self, token: int, *, final: bool) -> str:
        tokenizer = self._loaded.model.tokenizer
        text = self._decoder.decode(tokenizer.token_bytes(token) if tokenizer is not None else b"", final)
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        return text

    def _entry(self, pair: tuple[int, float]) -> dict[str, Any]:
        token, logprob = pair
        text = token_bytes(self._loaded, token).decode("utf-8", "replace")
        return {"token": text, "tokenId": token, "logProbability": finite(logprob)}


def usage_metadata(emissions: Sequence[Emission], content: int = 0) -> dict[str, Any]:
    """Tokens of a request, from the last emission of each candidate. The prompt counts once. Thoughts are counted
    beside the candidates, and the total is the sum of the three. `content`: tokens of the cached content that the
    prompt begins with, which count as cached."""
    used = [emission.usage or Usage(0, 0) for emission in emissions]
    prompt, cached = used[0].prompt_tokens, max(used[0].cached_tokens, content)
    thoughts = sum(one.thought_tokens for one in used)
    candidates = sum(one.completion_tokens for one in used) - thoughts
    out: dict[str, Any] = {"promptTokenCount": prompt}
    if cached:
        out |= {"cachedContentTokenCount": cached, "cacheTokensDetails": text_tokens(cached)}
    out["candidatesTokenCount"] = candidates
    if thoughts:
        out["thoughtsTokenCount"] = thoughts
    return {
        **out,
        "totalTokenCount": prompt + candidates + thoughts,
        "promptTokensDetails": text_tokens(prompt),
        "candidatesTokensDetails": text_tokens(candidates),
    }


def text_tokens(count: int) -> list[dict[str, Any]]:
    """A count by modality."""
    return [{"modality": "TEXT", "tokenCount": count}]
