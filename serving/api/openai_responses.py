"""`/v1/responses`: answers that are kept, so that a conversation can go on from them."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from ..effort import Effort, Prepared, ask
from ..engine.grammar import Grammar
from ..engine.request import Emission, SamplingParams, TokenLogprob
from .answer_form import answer_grammar
from .body import read_json
from .bridge import Reply
from .conversation import Conversation, check_model
from .errors import ApiError, bad_request, context_exceeded, unsupported
from .logprobs import aligner, finite, token_bytes
from .middleware import request_info
from .openai_format import asked_form
from .openai_options import check_logprobs, check_options, out_of_range, sampling_params
from .openai_tools import flat_tools
from .reporting import effort_notes, outcome, timing_headers
from .responses_body import ResponsesBody, input_items, messages_of
from .responses_events import Event, Listed, ResponseWriter, answer_messages, encode
from .responses_store import StoredResponse
from .schemas import parse
from .service import Loaded, Service, failure, gather
from .stream import KEEP_ALIVE, EventStream, Watch
from .tool_calls import Tools, tool_format

_INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_PAGE = 20
_MAX_PAGE = 100


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that has been checked and only needs running."""

    body: ResponsesBody
    loaded: Loaded
    conversation: Conversation
    params: SamplingParams
    effort: Effort
    tools: Tools | None
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]  # of the conversation, without instructions
    names: dict[str, str]
    ignored: list[str]

    def prepare(self) -> Prepared:
        """For a worker."""
        return self.conversation.prepare(self.loaded, self.params, self.effort)

    def writer(self, prepared: Prepared) -> ResponseWriter:
        reasoning = self.body.reasoning
        summary = (reasoning.model_extra or {}).get("summary") if reasoning is not None else None
        thinking = prepared.params.thinking
        return ResponseWriter(
            self._response(),
            thinks=thinking is not None,
            summary=summary is not None,
            tools=self.tools,
            listed=_listing(self.loaded, prepared.params) if self.params.logprobs is not None else None,
        )

    def _response(self) -> dict[str, Any]:
        body, params, reasoning = self.body, self.params, self.body.reasoning
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.loaded.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": (reasoning.model_extra or {}).get("summary") if reasoning is not None else None,
            },
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


async def create_response(request: Request, service: Service) -> Response:
    call = await _read_call(request, service)
    return await _run(request, service, call)


async def count_input_tokens(request: Request, service: Service) -> Response:
    """`/v1/responses/input_tokens`: the tokens that a request's input would have."""
    call = await _read_call(request, service)
    prepared = await service.offload(call.prepare)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prepared.prompt)})


async def retrieve_response(request: Request, service: Service, response_id: str) -> Response:
    """The response, or with `stream=true` its events again, those after `starting_after`."""
    stored = _stored(request, service, response_id)
    query = request.query_params
    if query.get("stream", "false").lower() != "true":
        return JSONResponse(stored.response)
    after = _number(query.get("starting_after", "-1"), "starting_after", -1, len(stored.events) - 1)
    data = b"".join(stored.events[after + 1 :])
    return Response(data, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def delete_response(request: Request, service: Service, response_id: str) -> Response:
    if not service.responses.delete(request_info(request.scope).tenant, response_id):
        raise _not_found(response_id)
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request, service: Service, response_id: str) -> Response:
    """Responses run only while their client waits, and that is how they are cancelled."""
    _stored(request, service, response_id)
    raise bad_request("Only background responses can be cancelled; this one has ended.", "response_id")


async def list_input_items(request: Request, service: Service, response_id: str) -> Response:
    items = _stored(request, service, response_id).input_items
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("Invalid 'order': supported values are 'asc' and 'desc'.", "order", "invalid_value")
    size = _number(query.get("limit", str(_PAGE)), "limit", 1, _MAX_PAGE)
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((i for i, item in enumerate(listed) if item["id"] == after), None)
        if at is None:
            raise bad_request(f"Invalid 'after': no item has the id '{after[:60]}'.", "after", "invalid_value")
        listed = listed[at + 1 :]
    page = listed[:size]
    ids = [item["id"] for item in page]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(listed) > size,
        }
    )


def _stored(request: Request, service: Service, response_id: str) -> StoredResponse:
    stored = service.responses.get(request_info(request.scope).tenant, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:80]}' not found.", param="response_id", code="not_found")


def _number(text: str, name: str, low: int, high: int) -> int:
    try:
        number = int(text[:20])
    except ValueError:
        raise bad_request(f"Invalid '{name}': expected an integer.", name, "invalid_type") from None
    if not low <= number <= high:
        raise out_of_range(name, low, high, number)
    return number


async def _read_call(request: Request, service: Service) -> Call:
    loaded, tenant = service.loaded, request_info(request.scope).tenant

    def stored(response_id: str) -> StoredResponse:
        found = service.responses.get(tenant, response_id)
        if found is None:
            message = f"Previous response with id '{response_id[:80]}' not found."
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        return found

    def call(data: dict[str, Any]) -> Call:
        body = _parse(data, loaded)
        previous = stored(body.previous_response_id) if body.previous_response_id is not None else None
        return _call(body, service, loaded, previous)

    return await read_json(request, service, call)


def _parse(data: dict[str, Any], loaded: Loaded) -> ResponsesBody:
    given, context = data.get("input"), loaded.engine.context_length
    if isinstance(given, list) and len(given) > context:
        raise context_exceeded("input", f"at least {len(given)}", context)
    return parse(ResponsesBody, data)


def _call(body: ResponsesBody, service: Service, loaded: Loaded, previous: StoredResponse | None) -> Call:
    ignored = check_options(body, service, loaded)
    _check_supported(body)
    check_model(loaded)
    form = tool_format(loaded.model.chat_template)
    tools = flat_tools(body.tools, body.tool_choice, form, parallel=body.parallel_tool_calls)
    names = dict(previous.names) if previous is not None else {}
    items = input_items(body.input)
    told = [
        *(previous.messages if previous is not None else ()),
        *messages_of(items, names=names),
    ]
    if not told:
        raise bad_request("Invalid 'input': it must not be empty.", "input", "empty_array")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    text = asked_form(body, (body.text or {}).get("format"), "text.format")
    return Call(
        body=body,
        loaded=loaded,
        conversation=Conversation(
            [*system, *told],
            None if tools is None else tools.descriptions,
            field="input",
            thinking_field="reasoning.effort",
        ),
        params=_params(body, loaded, answer_grammar(tools, text)),
        effort=_effort(body, service.config.level),
        tools=tools,
        items=items,
        messages=told,
        names=names,
        ignored=[name for name in ignored if name not in _HARMLESS],
    )


_HARMLESS = {"max_tool_calls"}


def _params(body: ResponsesBody, loaded: Loaded, grammar: Grammar | None) -> SamplingParams:
    wanted = "message.output_text.logprobs" in (body.include or ())
    count = check_logprobs(body.top_logprobs, "top_logprobs")
    logprobs = count or 0 if wanted or count else None
    limit = body.max_output_tokens
    return sampling_params(
        body, loaded, max_tokens=limit, max_name="max_output_tokens", logprobs=logprobs, grammar=grammar
    )


def _effort(body: ResponsesBody, default_level: str) -> Effort:
    reasoning = body.reasoning
    try:
        if reasoning is None:
            return ask(default_level, level=body.level)
        return ask(default_level, level=body.level, effort=reasoning.effort, budget=reasoning.max_tokens)
    except ValueError as error:
        raise bad_request(f"Invalid value: {error}", "reasoning.effort", "invalid_value") from None


def _check_supported(body: ResponsesBody) -> None:
    """Refuse what would change the answer and cannot be honoured."""
    extra, text = body.model_extra or {}, body.text or {}
    if body.background:
        raise unsupported("background", "'background' is not supported; supported: false")
    if body.n not in (None, 1):
        raise unsupported("n", "'n' is not supported; supported: 1")
    if body.max_tokens is not None:
        raise unsupported("max_tokens", "'max_tokens' is not supported; supported: 'max_output_tokens'")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "'truncation' is not supported; supported: 'disabled'")
    for name in ("conversation", "prompt"):
        if extra.get(name) is not None:
            raise unsupported(name, f"'{name}' is not supported; supported: 'input' and 'previous_response_id'")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", "'text.verbosity' is not supported; supported: 'medium'")
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            message = f"Invalid value: {name[:60]!r}. Supported values are: {', '.join(_INCLUDABLE)}."
            raise bad_request(message, f"include[{i}]", "invalid_value")
    reasoning = (body.reasoning.model_extra or {}) if body.reasoning is not None else {}
    for name, value in reasoning.items():
        supported = (None, "auto", "concise", "detailed") if name in ("summary", "generate_summary") else ()
        if value not in supported:
            message = f"'reasoning.{name[:40]}' is not supported; supported: effort, summary 'auto'"
            raise unsupported(f"reasoning.{name[:40]}", message)


def _listing(loaded: Loaded, params: SamplingParams) -> Listed:
    held = aligner(loaded, params.thinking)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(loaded, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def one(item: TokenLogprob) -> dict[str, Any]:
        return {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}

    return lambda emission: [one(item) for item, _ in held.take(emission)]


async def _run(request: Request, service: Service, call: Call) -> Response:
    """Run the request and answer it, streamed or whole. The engine's work ends when the client goes."""
    reply = service.new_reply()
    watch = Watch(request, reply)
    info = request_info(request.scope)
    handed_over = False
    try:
        (prepared,) = await service.submit(reply, lambda: [call.prepare()], 1, "input")
        told = effort_notes(prepared)
        info.notes.update(prompt_tokens=len(prepared.prompt), **told)
        headers = {f"x-umbra-{name}": value for name, value in told.items()}
        headers["x-umbra-prompt-tokens"] = str(len(prepared.prompt))
        writer = call.writer(prepared)
        run = _Run(service, call, writer, info.tenant, info.notes)
        if not call.body.stream:
            (emission,) = await gather(reply, 1)
            run.take(writer.begin() + writer.push(emission) + writer.end(emission))
            run.finish(emission)
            headers |= timing_headers(emission)
            return Response(to_json(writer.response), media_type="application/json", headers=headers)
        handed_over = True
        return EventStream(
            run.stream(reply, service.config.heartbeat),
            reply=reply,
            watch=watch,
            error_event=lambda error: b"".join(encode(event) for event in writer.fail(error)),
            send_timeout=service.config.send_timeout,
            headers=headers,
        )
    finally:
        if not handed_over:
            reply.close()
            await watch.stop()


class _Run:
    """A response while it is made; stored when it is complete, if its client wants that."""

    def __init__(
        self, service: Service, call: Call, writer: ResponseWriter, tenant: str, notes: dict[str, Any]
    ) -> None:
        self._service, self._call, self._writer, self._tenant, self._notes = service, call, writer, tenant, notes
        self._events: list[bytes] = []

    def take(self, events: list[Event]) -> bytes:
        encoded = [encode(event) for event in events]
        self._events += encoded
        return b"".join(encoded)

    async def stream(self, reply: Reply, heartbeat: float) -> AsyncIterator[bytes]:
        """The events; what one step emitted goes out as one write."""
        writer = self._writer
        yield self.take(writer.begin())
        while True:
            batch = await reply.take(heartbeat)
            if not batch:
                yield KEEP_ALIVE
                continue
            ((_, emission),) = batch
            if (error := failure(emission)) is not None:
                rest = self.take(writer.push(dataclasses.replace(emission, finish_reason=None)))
                if rest:
                    yield rest
                raise error
            out = self.take(writer.push(emission))
            if emission.finish_reason is not None:
                out += self.take(writer.end(emission))
                self.finish(emission)
                yield out
                return
            if out:
                yield out

    def finish(self, emission: Emission) -> None:
        self._notes.update(outcome([emission]))
        call, response = self._call, self._writer.response
        if call.body.store is False:
            return
        answers, called = answer_messages(response["output"])
        messages = [*call.messages, *answers]
        stored = StoredResponse(response, messages, {**call.names, **called}, call.items, self._events)
        size = sum(map(len, self._events)) + len(to_json(messages)) + len(to_json(call.items))
        self._service.responses.put(self._tenant, stored, size)
