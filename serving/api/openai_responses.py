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

from ...cache.database import NotFound
from ...cache.interactions import Interaction
from ..effort import Effort, Prepared, ask
from ..engine.grammar import Grammar
from ..engine.request import SamplingParams, TokenLogprob
from .answer_form import answer_grammar
from .body import read_json
from .conversation import Conversation, check_model
from .errors import ApiError, bad_request, context_exceeded, stopping, unsupported
from .eventlog import EventLog
from .logprobs import aligner, finite, token_bytes
from .middleware import request_info
from .openai_format import asked_form
from .openai_options import check_logprobs, check_options, out_of_range, sampling_params
from .openai_tools import flat_tools
from .reporting import effort_notes, outcome, timing_headers
from .responses_body import ResponsesBody, input_items, messages_of
from .responses_events import Listed, ResponseWriter, encode, failed
from .run import Plan, Reader
from .schemas import parse
from .service import Loaded, Service
from .stored import Stored, find, record, thinking_of, turn_of
from .stored import tools_of as stored_tools
from .stream import KEEP_ALIVE, EventStream, Watch
from .tool_calls import Tools, tool_format
from .turns import Turn, conversation_of

API = "responses"

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

    id: str
    body: ResponsesBody
    loaded: Loaded
    conversation: Conversation
    params: SamplingParams
    effort: Effort
    tools: Tools | None
    turn: Turn | None
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]  # the new ones
    names: dict[str, str]
    ignored: list[str]
    ttl: float

    def plan(self) -> Plan:
        body = self.body
        return Plan(
            api=API,
            id=self.id,
            model=self.loaded.name,
            prepare=self.prepare,
            writer=self._writer,
            request=self._request,
            parent=body.previous_response_id,
            stored=body.store is not False,
            background=bool(body.background),
            ttl=self.ttl,
        )

    def prepare(self) -> Prepared:
        """For a worker."""
        return self.conversation.prepare(self.loaded, self.params, self.effort)

    @property
    def _summary(self) -> bool:
        reasoning = self.body.reasoning
        return reasoning is not None and (reasoning.model_extra or {}).get("summary") is not None

    def _writer(self, prepared: Prepared) -> ResponseWriter:
        return ResponseWriter(
            self._response(),
            thinks=prepared.params.thinking is not None,
            summary=self._summary,
            tools=self.tools,
            listed=_listing(self.loaded, prepared.params) if self.params.logprobs is not None else None,
        )

    def _request(self, prepared: Prepared) -> dict[str, Any]:
        return record(
            API, prepared, turn=self.turn, messages=self.messages, system=self.body.instructions or "",
            tools=self.tools, names=self.names, shown=self._summary, items=self.items,
        )  # fmt: skip

    def _response(self) -> dict[str, Any]:
        body, params, reasoning = self.body, self.params, self.body.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(body.background),
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


def revive(loaded: Loaded, row: Interaction) -> ResponseWriter:
    """A writer for a stored response."""
    response = {**row.request["resource"], "output": []}
    thinks = thinking_of(row) is not None
    tools = stored_tools(loaded, row)
    return ResponseWriter(response, thinks=thinks, summary=row.request["shown"], tools=tools, listed=None)


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
    query = request.query_params
    streamed = query.get("stream", "false").lower() == "true"
    run = service.runs.find(request_info(request.scope).tenant, response_id, API)
    if run is not None and run.plan.stored:
        if not streamed:
            return JSONResponse(await run.snapshot())
        return _stream(request, service, run.reader(_after(request, run.log)), {})
    stored = await _stored(request, service, response_id)
    if not streamed:
        return JSONResponse(stored.resource)
    data = b"".join(stored.log.after(_after(request, stored.log)))
    return Response(data, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _after(request: Request, log: EventLog) -> int:
    number = _number(request.query_params.get("starting_after", "-1"), "starting_after", -1, log.next - 1)
    if not log.has(number):
        raise bad_request("What follows this event is not kept any more.", "starting_after", "invalid_value")
    return number


async def delete_response(request: Request, service: Service, response_id: str) -> Response:
    tenant = request_info(request.scope).tenant
    run = service.runs.find(tenant, response_id, API)
    if run is None or not run.plan.stored:
        await _stored(request, service, response_id)
    try:
        await service.runs.delete(tenant, response_id)
    except NotFound:
        raise _not_found(response_id) from None
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request, service: Service, response_id: str) -> Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    run = service.runs.find(request_info(request.scope).tenant, response_id, API)
    if run is not None and not run.plan.stored:
        run = None
    resource = run.resource if run is not None else (await _stored(request, service, response_id)).resource
    if not resource["background"]:
        raise bad_request("Only background responses can be cancelled.", "response_id")
    if run is not None:
        run.stop("cancelled")
        await run.done()
    return JSONResponse(resource)


async def list_input_items(request: Request, service: Service, response_id: str) -> Response:
    run = service.runs.find(request_info(request.scope).tenant, response_id, API)
    if run is not None and run.plan.stored:
        items = run.plan.request(run.prepared)["items"]
    else:
        items = (await _stored(request, service, response_id)).row.request["items"]
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


async def _stored(request: Request, service: Service, response_id: str) -> Stored:
    stored = await find(service, request_info(request.scope).tenant, response_id, API, revive)
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
    body = await read_json(request, service, lambda data: _parse(data, loaded))
    turn = None
    if body.previous_response_id is not None:
        turn = await _previous_turn(service, tenant, body.previous_response_id)
    return await service.offload(lambda: _call(body, service, loaded, turn))


async def _previous_turn(service: Service, tenant: str, response_id: str) -> Turn:
    param = "previous_response_id"
    run = service.runs.find(tenant, response_id, API)
    if run is not None and run.plan.stored and not run.ended:
        message = f"Previous response with id '{response_id[:80]}' is still in progress."
        raise bad_request(message, param, "previous_response_in_progress")
    stored = await find(service, tenant, response_id, API, revive)
    if stored is None:
        message = f"Previous response with id '{response_id[:80]}' not found."
        raise bad_request(message, param, "previous_response_not_found")
    return turn_of(stored, service.conversations, tenant)


def _parse(data: dict[str, Any], loaded: Loaded) -> ResponsesBody:
    given, context = data.get("input"), loaded.engine.context_length
    if isinstance(given, list) and len(given) > context:
        raise context_exceeded("input", f"at least {len(given)}", context)
    return parse(ResponsesBody, data)


def _call(body: ResponsesBody, service: Service, loaded: Loaded, turn: Turn | None) -> Call:
    """In a worker."""
    ignored = check_options(body, service, loaded)
    _check_supported(body)
    check_model(loaded)
    form = tool_format(loaded.model.chat_template)
    tools = flat_tools(body.tools, body.tool_choice, form, parallel=body.parallel_tool_calls)
    names = dict(turn.names) if turn is not None else {}
    items = input_items(body.input)
    told = messages_of(items, names=names)
    if not told:
        raise bad_request("Invalid 'input': it must not be empty.", "input", "empty_array")
    text = asked_form(body, (body.text or {}).get("format"), "text.format")
    return Call(
        id=f"resp_{uuid.uuid4().hex}",
        body=body,
        loaded=loaded,
        conversation=conversation_of(
            loaded,
            turn,
            told,
            body.instructions or "",
            None if tools is None else tools.descriptions,
            field="input",
            thinking_field="reasoning.effort",
        ),
        params=_params(body, loaded, answer_grammar(tools, text)),
        effort=_effort(body, service.config.level),
        tools=tools,
        turn=turn,
        items=items,
        messages=told,
        names=names,
        ttl=service.config.retention,
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
    if body.background and body.store is False:
        raise bad_request("Background responses must be stored: 'store' is false.", "background", "invalid_value")
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
    """Run the request and answer it, streamed or whole. The engine's work ends when the client goes, unless it was
    asked for in the background."""
    info = request_info(request.scope)
    run = await service.runs.start(call.plan(), info.tenant)
    told = effort_notes(run.prepared)
    info.notes.update(prompt_tokens=len(run.prepared.prompt), **told)
    headers = {f"x-umbra-{name}": value for name, value in told.items()}
    headers["x-umbra-prompt-tokens"] = str(len(run.prepared.prompt))
    if call.body.stream:
        return _stream(request, service, run.reader(), headers)
    if call.body.background:
        return Response(to_json(run.resource), media_type="application/json", headers=headers)
    reader = run.reader()
    watch = Watch(request, reader)
    try:
        await reader.end()
    finally:
        await watch.stop()
        reader.close()
    assert run.last is not None
    info.notes.update(outcome([run.last]))
    if run.ending == "stopped":
        raise stopping()
    return Response(to_json(run.resource), media_type="application/json", headers=headers | timing_headers(run.last))


def _stream(request: Request, service: Service, reader: Reader, headers: dict[str, str]) -> EventStream:
    run = reader.run
    info = request_info(request.scope)

    async def events() -> AsyncIterator[bytes]:
        async for piece in reader.pieces(service.config.heartbeat, KEEP_ALIVE):
            yield piece
        if run.last is not None:
            info.notes.update(outcome([run.last]))

    return EventStream(
        events(),
        reply=reader,
        watch=Watch(request, reader),
        error_event=lambda error: encode(failed(error) | {"sequence_number": reader.number + 1}),
        send_timeout=service.config.send_timeout,
        headers=headers,
    )
