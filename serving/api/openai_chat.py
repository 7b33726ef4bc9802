"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ...model.chat_template import ChatTemplateError
from ..effort import Effort, Prepared, prepare
from ..engine.request import Emission, SamplingParams, TokenLogprob
from ..engine.thoughts import Thinking
from .body import json_type, read_json
from .errors import bad_request, context_exceeded, unsupported
from .logprobs import TextAligner, aligner, finite, token_bytes
from .openai import FINISH, Call, respond
from .openai_effort import effort_of
from .openai_options import check_logprobs, check_options, sampling_params
from .schemas import ChatBody, ChatMessage, parse
from .service import Loaded, Service

ROLES = ("system", "developer", "user", "assistant")


async def chat_completions(request: Request, service: Service) -> Response:
    loaded = service.loaded
    call = await read_json(request, service, lambda data: _call(data, service, loaded))
    return await respond(request, service, call)


def _call(data: dict[str, Any], service: Service, loaded: Loaded) -> Call:
    check_count(data.get("messages"), loaded)
    body = parse(ChatBody, data)
    ignored = check_options(body, service, loaded)
    messages = template_messages(body.messages)
    effort = effort_of(body, service.config.level)
    if loaded.thinker is None:
        message = f"The model '{loaded.name}' has no chat template; use /v1/completions"
        raise bad_request(message, "model", "unsupported_model")
    max_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    params = sampling_params(
        body,
        loaded,
        max_tokens=getattr(body, max_name),
        max_name=max_name,
        logprobs=_logprobs(body),
    )
    return Call(
        body=body,
        loaded=loaded,
        shape=_ChatShape(loaded, params.logprobs is not None),
        prepare=lambda: [_prepare(loaded, messages, params, effort)],
        prompts=1,
        prompt_param="messages",
        ignored=ignored,
    )


def check_count(messages: Any, loaded: Loaded) -> None:
    """Refuse more messages than the context has tokens before time is spent on each: a message takes at least one."""
    context = loaded.engine.context_length
    if isinstance(messages, list) and len(messages) > context:
        raise context_exceeded("messages", f"at least {len(messages)}", context)


def _prepare(loaded: Loaded, messages: list[dict[str, Any]], params: SamplingParams, effort: Effort) -> Prepared:
    """Token ids of a conversation and the start of the model's turn; how much is thought depends on them."""
    assert loaded.thinker is not None
    texts = (text for message in messages for text in (message["content"], message.get("reasoning_content", "")))
    loaded.check_length(texts, "messages")
    try:
        return prepare(loaded.thinker, loaded.engine.context_length, messages, params, effort, policies=loaded.policies)
    except ChatTemplateError as error:
        raise bad_request(f"The model's chat template refused the messages: {error}", "messages") from None
    except ValueError as error:
        raise unsupported("reasoning_effort", f"Thinking is not possible: {error}") from None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text content; `developer` is the newer name of `system`."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    extra = message.model_extra or {}
    if message.role in ("tool", "function") or extra.get("tool_calls") or extra.get("function_call"):
        raise unsupported(f"{where}.role", f"'{where}': tool calls are not supported; supported: text messages")
    if message.role not in ROLES:
        supported = ", ".join(f"'{role}'" for role in ROLES)
        text = f"Invalid value: {message.role[:40]!r}. Supported values are: {supported}."
        raise bad_request(text, f"{where}.role", "invalid_value")
    if extra.get("audio"):
        raise unsupported(f"{where}.audio", f"'{where}.audio': audio is not supported; supported: text")
    role = "system" if message.role == "developer" else message.role
    fields = {"name": message.name, "reasoning_content": _reasoning(message, where)}
    return {"role": role, "content": _text(message, where), **{key: value for key, value in fields.items() if value}}


def _reasoning(message: ChatMessage, where: str) -> str | None:
    """Thoughts that come back with an answer of the model; its template says which of them it sees again."""
    thoughts = (message.model_extra or {}).get("reasoning_content")
    if thoughts is None or message.role != "assistant":
        return None
    if not isinstance(thoughts, str):
        text = (
            f"Invalid type for '{where}.reasoning_content': expected a string, but got {json_type(thoughts)} instead."
        )
        raise bad_request(text, f"{where}.reasoning_content", "invalid_type")
    return thoughts


def _text(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        text = f"Invalid value for '{where}.content': expected a string or an array of text parts, but got null."
        raise bad_request(text, f"{where}.content", "invalid_value")
    texts = []
    for i, part in enumerate(content):
        param = f"{where}.content[{i}]"
        if part.type not in ("text", "refusal"):
            raise unsupported(
                f"{param}.type", f"'{param}': parts of type {part.type[:40]!r} are not supported; supported: 'text'"
            )
        piece = part.text if part.type == "text" else (part.model_extra or {}).get("refusal")
        if not isinstance(piece, str):
            name = f"{param}.{part.type}"
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        texts.append(piece)
    return "".join(texts)


def _logprobs(body: ChatBody) -> int | None:
    """The engine's `logprobs`: None for no, else the number of alternatives."""
    if body.logprobs:
        return check_logprobs(body.top_logprobs or 0, "top_logprobs")
    if body.top_logprobs:
        raise bad_request("Invalid value: 'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_value")
    return None


class _ChatShape:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, loaded: Loaded, logprobs: bool) -> None:
        self._loaded = loaded
        self._logprobs = logprobs
        self._aligners: dict[int, TextAligner] = {}
        self.thinking: Thinking | None = None

    def whole(self, index: int, emission: Emission) -> dict[str, Any]:
        thoughts = {"reasoning_content": emission.thought} if emission.thought else {}
        return {
            "index": index,
            "message": {"role": "assistant", "content": emission.text, "refusal": None, **thoughts},
            "logprobs": self._listed(index, emission),
            "finish_reason": _finish(emission),
        }

    def pieces(self, index: int, emission: Emission) -> list[dict[str, Any]]:
        out = []
        if index not in self._aligners:
            self._aligners[index] = aligner(self._loaded, self.thinking)
            out.append(_piece(index, {"role": "assistant", "content": ""}))
        if emission.thought:
            out.append(_piece(index, {"reasoning_content": emission.thought}))
        listed = self._listed(index, emission)
        if emission.text or (listed and listed["content"]):
            out.append(_piece(index, {"content": emission.text}, logprobs=listed))
        if emission.finish_reason is not None:
            out.append(_piece(index, {}, finish=_finish(emission)))
        return out

    def _listed(self, index: int, emission: Emission) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        held = self._aligners.setdefault(index, aligner(self._loaded, self.thinking))
        return {"content": [self._token(item) for item, _ in held.take(emission)], "refusal": None}

    def _token(self, item: TokenLogprob) -> dict[str, Any]:
        return {
            **self._entry(item.token_id, item.logprob),
            "top_logprobs": [self._entry(token, logprob) for token, logprob in item.top],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(self._loaded, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def _piece(index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _finish(emission: Emission) -> str | None:
    return FINISH.get(emission.finish_reason) if emission.finish_reason is not None else None
