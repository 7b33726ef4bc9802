"""Generation for a list of prompts, without a server: many requests in flight, answers as they end."""

from __future__ import annotations

import dataclasses
import queue
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..configs.prompt_sets import Prompt
from ..model.thinking import Thinker
from .effort import EXACT, Effort, Policy, Prepared, at_level, prepare
from .engine.request import Emission, SamplingParams, Sink, Timings, Usage

if TYPE_CHECKING:
    from ..model.load import Model


class Submits(Protocol):
    """What is needed of an engine."""

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, sink: Sink) -> str: ...
    def cancel(self, request_id: str) -> None: ...


class Encodes(Protocol):
    """Token ids of a conversation, the template's start of the answer included."""

    def __call__(self, messages: list[dict[str, str]]) -> list[int]: ...


class Prepares(Protocol):
    """What the engine gets for a conversation."""

    def __call__(self, messages: list[dict[str, str]]) -> Prepared: ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of one turn. `thought` is what the model wrote for itself before `text`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings | None  # None when the request was refused
    first_tokens: int  # tokens of the first emission, which decode speed leaves out
    digests: tuple[int, ...]
    error: str | None
    thought: str = ""

    @property
    def tokens_per_pass(self) -> float | None:
        return len(self.token_ids) / self.timings.passes if self.timings and self.timings.passes else None

    @property
    def tok_s(self) -> float | None:
        """Tokens after the first emission over the time after it."""
        rest = len(self.token_ids) - self.first_tokens
        return rest / self.timings.decode if self.timings and rest > 0 and self.timings.decode > 0 else None


def encoder(model: Model) -> Encodes:
    """How `model` turns a conversation into token ids.

    A random trunk has no tokenizer: four bytes of text become one id, so that tests can run prompts through it.
    """
    tokenizer, template = model.tokenizer, model.chat_template
    if tokenizer is None:

        def encode_bytes(messages: list[dict[str, str]]) -> list[int]:
            data = "\n".join(f"{message['role']}\n{message['content']}" for message in messages).encode()
            return [zlib.crc32(data[i : i + 4]) % model.config.vocab_size for i in range(0, len(data), 4)]

        return encode_bytes
    if template is None:
        raise ValueError(f"the model {model.name} has no chat template, so conversations cannot be encoded for it")
    return lambda messages: template.encode(tokenizer, messages)


def preparer(
    model: Model, context_length: int, params: SamplingParams, effort: Effort, policies: Mapping[str, Policy] = EXACT
) -> Prepares:
    """How conversations of `model` go to the engine, at a level and with thoughts. Raises `ValueError` for thoughts of
    a model that has no words for them."""
    if model.tokenizer is None or model.chat_template is None:
        if effort.budget:
            raise ValueError(f"the model {model.name} has no chat template, so it cannot think")
        encode, leveled = encoder(model), at_level(params, effort.level, policies)
        return lambda messages: Prepared(encode(messages), leveled)
    thinker = Thinker(model.tokenizer, model.chat_template)
    return lambda messages: prepare(thinker, context_length, messages, params, effort, policies=policies)


@dataclasses.dataclass
class _Conversation:
    """A prompt on its way: what was said so far, and the emissions of the turn that is running."""

    index: int
    prompt: Prompt
    messages: list[dict[str, str]]
    answers: list[Answer] = dataclasses.field(default_factory=list)
    emissions: list[Emission] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0


class OfflineRun:
    """Answers `prompts` with at most `in_flight` requests at once.

    Iterating gives (index of the prompt, its answers: one, or one per turn with `all_turns`) in the order in which
    conversations end. A turn that is refused or fails ends its conversation with an answer whose `error` says why.
    `tokens` counts what was emitted so far. Leaving the iteration early cancels what is running.
    """

    def __init__(
        self,
        engine: Submits,
        prepare: Prepares,
        prompts: Sequence[Prompt],
        *,
        in_flight: int = 1,
        all_turns: bool = False,
        only: Sequence[int] | None = None,
    ) -> None:
        self._engine, self._prepare = engine, prepare
        self._in_flight, self._all_turns = in_flight, all_turns
        self._prompts = [(index, prompts[index]) for index in (range(len(prompts)) if only is None else only)]
        self._inbox: queue.SimpleQueue[Sequence[tuple[str, Emission]]] = queue.SimpleQueue()
        self._running: dict[str, _Conversation] = {}
        self.tokens = 0

    def __iter__(self) -> Iterator[tuple[int, list[Answer]]]:
        waiting = iter(self._prompts)
        try:
            while True:
                yield from self._fill(waiting)
                if not self._running:
                    return
                for request_id, emission in self._inbox.get():
                    ended = self._take(request_id, emission)
                    if ended is not None:
                        yield ended.index, ended.answers
        finally:
            for request_id in self._running:
                self._engine.cancel(request_id)

    def _fill(self, waiting: Iterator[tuple[int, Prompt]]) -> Iterator[tuple[int, list[Answer]]]:
        """Start conversations until `in_flight` are running; gives those that were refused at once."""
        while len(self._running) < self._in_flight:
            following = next(waiting, None)
            if following is None:
                return
            conversation = _Conversation(*following, messages=[])
            if not self._start_turn(conversation):
                yield conversation.index, conversation.answers

    def _start_turn(self, conversation: _Conversation) -> bool:
        """Submit the next user message; False when the engine refuses it (the conversation then has its error)."""
        turn = conversation.prompt.turns[len(conversation.answers)]
        conversation.messages.append({"role": "user", "content": turn})
        conversation.emissions = []
        conversation.prompt_tokens = 0
        try:
            made = self._prepare(conversation.messages)
            conversation.prompt_tokens = len(made.prompt)
            self._running[self._engine.submit(made.prompt, made.params, sink=self._inbox.put)] = conversation
        except ValueError as error:
            usage = Usage(conversation.prompt_tokens, 0)
            conversation.answers.append(Answer("", (), "error", usage, None, 0, (), str(error)))
            return False
        return True

    def _take(self, request_id: str, emission: Emission) -> _Conversation | None:
        """Add an emission to its conversation; gives the conversation when that was its end."""
        conversation = self._running.get(request_id)
        if conversation is None:
            return None
        self.tokens += len(emission.token_ids)
        conversation.emissions.append(emission)
        if emission.finish_reason is None:
            return None
        del self._running[request_id]
        answer = _answer(conversation.emissions, conversation.prompt_tokens)
        conversation.answers.append(answer)
        conversation.messages.append({"role": "assistant", "content": answer.text})
        more = self._all_turns and answer.error is None and len(conversation.answers) < len(conversation.prompt.turns)
        return None if more and self._start_turn(conversation) else conversation


def _answer(emissions: Sequence[Emission], prompt_tokens: int) -> Answer:
    last = emissions[-1]
    ids = tuple(token for emission in emissions for token in emission.token_ids)
    first = next((len(emission.token_ids) for emission in emissions if emission.token_ids), 0)
    return Answer(
        text="".join(emission.text for emission in emissions),
        token_ids=ids,
        finish_reason=last.finish_reason or "error",
        usage=last.usage or Usage(prompt_tokens, len(ids)),
        timings=last.timings,
        first_tokens=first,
        digests=tuple(crc for emission in emissions for crc in emission.digests),
        error=last.error,
        thought="".join(emission.thought for emission in emissions),
    )


def answer_row(prompt: Prompt, answers: Sequence[Answer], *, all_turns: bool, digest: bool) -> dict[str, Any]:
    """One prompt's line of output. With `all_turns` it tells of the whole conversation, and `turns` of each answer."""
    row: dict[str, Any] = {"id": prompt.id, "category": prompt.category, **_measures(answers, digest=digest)}
    if all_turns:
        row["turns"] = [_measures([answer], digest=digest) for answer in answers]
    return row


def _measures(answers: Sequence[Answer], *, digest: bool) -> dict[str, Any]:
    tokens = sum(len(answer.token_ids) for answer in answers)
    passes = sum(answer.timings.passes for answer in answers if answer.timings)
    timed = [answer for answer in answers if answer.tok_s is not None and answer.timings is not None]
    seconds = sum(answer.timings.decode for answer in timed if answer.timings)
    rest = sum(len(answer.token_ids) - answer.first_tokens for answer in timed)
    ttft = answers[0].timings.ttft if answers[0].timings and tokens else None
    row: dict[str, Any] = {
        "text": "\n\n".join(answer.text for answer in answers),
        "token_ids": [token for answer in answers for token in answer.token_ids],
        "finish_reason": answers[-1].finish_reason,
        "usage": {
            key: sum(getattr(answer.usage, key) for answer in answers)
            for key in ("prompt_tokens", "completion_tokens", "thought_tokens", "cached_tokens")
        },
        "tokens_per_pass": round(tokens / passes, 4) if passes else None,
        "shadow_share": round(1 - passes / tokens, 4) if passes and tokens else None,
        "ttft_ms": round(ttft * 1e3, 3) if ttft is not None else None,
        "tok_s": round(rest / seconds, 3) if seconds > 0 else None,
    }
    if any(answer.thought for answer in answers):
        row["thought"] = "\n\n".join(answer.thought for answer in answers)
    if digest:
        row["digest"] = [crc for answer in answers for crc in answer.digests]
    if answers[-1].error is not None:
        row["error"] = answers[-1].error
    return row
