"""`POST /v1/chat/completions`."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from ..effort import Effort, Prepared
from ..engine.request import Emission, SamplingParams, TokenLogprob
from ..engine.thoughts import Thinking
from .answer_form import answer_grammar
from .answer_pieces import Pieces
from .body import read_json
from .conversation import Conversation
from .errors import bad_request, context_exceeded, unsupported
from .logprobs import TextAligner, aligner, finite, token_bytes
from .openai import FINISH, Call, respond
from .openai_effort import effort_of
from .openai_format import asked_form
from .openai_messages import content_text, template_messages
from .openai_options import check_logprobs, check_options, sampling_params
from .openai_tools import nested_tools, old_functions
from .schemas import ChatBody, parse
from .service import Loaded, Service
from .tool_calls import ToolCall, Tools, tool_format


async def chat_completions(request: Request, service: Service) -> Response:
    loaded = service.loaded
    call = await read_json(request, service, lambda data: _call(data, service, loaded))
    return await respond(request, service, call)


def _call(data: dict[str, Any], service: Service, loaded: Loaded) -> Call:
    check_count(data.get("messages"), loaded)
    body = parse(ChatBody, data)
    ignored = check_options(body, service, loaded)
    messages = template_messages(body.messages)
    form = tool_format(loaded.model.chat_template)
    old = bool(body.functions) or body.function_call is not None
    if old and (body.tools or body.tool_choice is not None):
        message = "'functions' and 'function_call' are an older form of 'tools' and 'tool_choice'; send one of the two"
        raise bad_request(message, "functions", "invalid_value")
    if old:
        tools = old_functions(body.functions, body.function_call, form)
    else:
        tools = nested_tools(body.tools, body.tool_choice, form, parallel=body.parallel_tool_calls)
    grammar = answer_grammar(tools, asked_form(body, body.response_format, "response_format"))
    predicted = _prediction(body)
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
        grammar=grammar,
    )
    return Call(
        body=body,
        loaded=loaded,
        shape=_ChatShape(loaded, params.logprobs is not None, tools, old=old),
        prepare=lambda: [_prepare(loaded, messages, tools, _predicting(params, predicted, loaded), effort)],
        prompts=1,
        prompt_param="messages",
        ignored=ignored,
    )


def check_count(messages: Any, loaded: Loaded) -> None:
    """Refuse more messages than the context has tokens before time is spent on each: a message takes at least one."""
    context = loaded.engine.context_length
    if isinstance(messages, list) and len(messages) > context:
        raise context_exceeded("messages", f"at least {len(messages)}", context)


def _prepare(
    loaded: Loaded, messages: list[dict[str, Any]], tools: Tools | None, params: SamplingParams, effort: Effort
) -> Prepared:
    """Token ids of a conversation and the start of the model's turn; how much is thought depends on them."""
    described = None if tools is None else tools.descriptions
    conversation = Conversation(messages, described, field="messages", thinking_field="reasoning_effort")
    return conversation.prepare(loaded, params, effort)


def _prediction(body: ChatBody) -> str:
    """The text that the answer may be; empty: none is given."""
    given = body.prediction
    if given is None:
        return ""
    if given.type != "content":
        text = f"'prediction.type': {given.type[:40]!r} is not supported; supported: 'content'"
        raise unsupported("prediction.type", text)
    return content_text(given.content, "prediction")


def _predicting(params: SamplingParams, text: str, loaded: Loaded) -> SamplingParams:
    """`params` with the tokens of `text` to draft from. Takes time: for a worker."""
    tokenizer = loaded.model.tokenizer
    if not text or tokenizer is None:
        return params
    loaded.check_length((text,), "prediction")
    return dataclasses.replace(params, prediction=tuple(tokenizer.encode(text)))


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

    def __init__(self, loaded: Loaded, logprobs: bool, tools: Tools | None, *, old: bool = False) -> None:
        """`old`: a call is told in the form from before answers had several."""
        self._loaded = loaded
        self._logprobs = logprobs
        self._tools = tools
        self._old = old
        self._aligners: dict[int, TextAligner] = {}
        self._split: dict[int, Pieces] = {}
        self._called: Counter[int] = Counter()  # calls that the client was told of
        self.thinking: Thinking | None = None

    def whole(self, index: int, emission: Emission) -> dict[str, Any]:
        made = self._made(index, emission)
        text = "".join(piece for piece in made if isinstance(piece, str))
        calls = [self._told(index, piece) for piece in made if isinstance(piece, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message |= {"function_call": calls[0]["function"]} if self._old else {"tool_calls": calls}
        if emission.thought:
            message["reasoning_content"] = emission.thought
        return {
            "index": index,
            "message": message,
            "logprobs": self._listed(index, emission),
            "finish_reason": self._finish(index, emission),
        }

    def pieces(self, index: int, emission: Emission) -> list[dict[str, Any]]:
        out = []
        if index not in self._aligners:
            self._aligners[index] = aligner(self._loaded, self.thinking)
            must_call = self._tools is not None and self._tools.mode == "required"
            out.append(_piece(index, {"role": "assistant", "content": None if must_call else ""}))
        if emission.thought:
            out.append(_piece(index, {"reasoning_content": emission.thought}))
        listed = self._listed(index, emission)
        made = self._made(index, emission)
        if listed and listed["content"] and not (made and isinstance(made[0], str)):
            made.insert(0, "")
        for piece in made:
            if isinstance(piece, str):
                out.append(_piece(index, {"content": piece}, logprobs=listed))
                listed = None if listed is None else {**listed, "content": []}
            else:
                out += self._call_pieces(index, piece)
        if emission.finish_reason is not None:
            out.append(_piece(index, {}, finish=self._finish(index, emission)))
        return out

    def _made(self, index: int, emission: Emission) -> list[str | ToolCall]:
        """The text and the calls that have come with an emission."""
        return self._split.setdefault(index, Pieces(self._tools, most=1 if self._old else None)).take(emission)

    def _told(self, index: int, call: ToolCall) -> dict[str, Any]:
        self._called[index] += 1
        function = {"name": call.name, "arguments": to_json(call.arguments).decode()}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}

    def _call_pieces(self, index: int, call: ToolCall) -> list[dict[str, Any]]:
        """A call as a stream tells it: its name, then its arguments."""
        place = self._called[index]
        told = self._told(index, call)
        arguments = told["function"]["arguments"]
        if self._old:
            parts = {"name": call.name, "arguments": ""}, {"arguments": arguments}
            return [_piece(index, {"function_call": part}) for part in parts]
        head = {"index": place, **told, "function": {"name": call.name, "arguments": ""}}
        rest = {"index": place, "function": {"arguments": arguments}}
        return [_piece(index, {"tool_calls": [head]}), _piece(index, {"tool_calls": [rest]})]

    def _finish(self, index: int, emission: Emission) -> str | None:
        reason = FINISH.get(emission.finish_reason) if emission.finish_reason is not None else None
        if self._called[index] and reason == "stop":
            return "function_call" if self._old else "tool_calls"
        return reason

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
