"""The Interactions API: answers on their own account, which can be gone on with, read again and cancelled."""

from __future__ import annotations

import base64
import dataclasses
import time
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from ...cache.database import NotFound
from ...cache.interactions import Interaction
from ..effort import Effort, Prepared
from ..engine.grammar import Grammar
from ..engine.request import SamplingParams
from .answer_form import answer_grammar
from .body import read_json
from .bridge import failure
from .conversation import Conversation, check_model
from .errors import ApiError, bad_request, context_exceeded, model_not_found, unsupported
from .gemini_options import answer_form, check_output, effort_of, response_format, sampling_params, tools_of
from .gemini_schemas import (
    FunctionCallingConfig,
    FunctionDeclaration,
    GenerationConfig,
    ThinkingConfig,
    Tool,
    ToolConfig,
    invalid,
)
from .interaction_errors import interaction_body
from .interaction_events import DONE, InteractionWriter, checkpoint, event_number, named, timestamp
from .interaction_input import messages_of, steps_of
from .interaction_schemas import InteractionBody, InteractionConfig, in_snake_case, parse
from .middleware import request_info
from .reporting import effort_notes, google_headers, outcome, timing_headers
from .runs import Plan, Reader, Run
from .service import Loaded, Service
from .stored import Stored, find, record, thinking_of, turn_of
from .stored import tools_of as stored_tools
from .stream import KEEP_ALIVE, EventStream, Watch
from .tool_calls import Tools
from .turns import Turn, conversation_of

API = "interactions"

_CHOICES = ("auto", "any", "none", "validated")
_UNSUPPORTED = {
    "agent": "agents are not supported; supported: model",
    "agent_config": "agents are not supported; supported: model",
    "webhook_config": "it is not supported; supported: to ask for the interaction",
    "cached_content": "it is not supported here; supported: previous_interaction_id",
    "environment": "it is not supported; leave it out",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A new interaction that has been checked and only needs running."""

    id: str
    body: InteractionBody
    loaded: Loaded
    conversation: Conversation
    params: SamplingParams
    effort: Effort
    tools: Tools | None
    turn: Turn | None
    messages: list[dict[str, Any]]
    names: dict[str, str]
    summary: bool
    linger: float
    ttl: float

    @property
    def stored(self) -> bool:
        return self.body.store is not False

    def plan(self) -> Plan:
        body = self.body
        return Plan(
            api=API,
            id=self.id,
            model=self.loaded.name,
            prepare=lambda: self.conversation.prepare(self.loaded, self.params, self.effort),
            writer=self._writer,
            request=self._request,
            parent=body.previous_interaction_id,
            stored=self.stored,
            background=bool(body.background),
            linger=self.linger if body.stream else 0.0,
            ttl=self.ttl,
        )

    def _writer(self, prepared: Prepared) -> InteractionWriter:
        thinks = prepared.params.thinking is not None
        return InteractionWriter(self._resource(), thinks=thinks, summary=self.summary, tools=self.tools)

    def _request(self, prepared: Prepared) -> dict[str, Any]:
        return record(
            API, prepared, turn=self.turn, messages=self.messages, system=self.body.system_instruction or "",
            tools=self.tools, names=self.names, shown=self.summary, input=self.body.input,
        )  # fmt: skip

    def _resource(self) -> dict[str, Any]:
        body, now = self.body, timestamp(time.time())
        optional = {
            "previous_interaction_id": body.previous_interaction_id,
            "labels": body.labels,
            "service_tier": body.service_tier,
        }
        return {
            "id": self.id,
            "object": "interaction",
            "model": self.loaded.name,
            "status": "in_progress",
            "created": now,
            "updated": now,
            "role": "model",
            **{name: value for name, value in optional.items() if value is not None},
            "steps": [],
        }


def revive(loaded: Loaded, row: Interaction) -> InteractionWriter:
    """A writer for a stored interaction."""
    resource = {**row.request["resource"], "steps": []}
    thinks = thinking_of(row) is not None
    return InteractionWriter(resource, thinks=thinks, summary=row.request["shown"], tools=stored_tools(loaded, row))


_SAME_OPTIONS = (
    "temperature", "top_p", "top_k", "seed", "stop_sequences", "max_output_tokens", "presence_penalty",
    "frequency_penalty", "speech_config", "image_config",
)  # fmt: skip
"""Options that the Gemini protocol has by the same name."""


# ---- creating


async def create_interaction(request: Request, service: Service) -> Response:
    loaded, tenant = service.loaded, request_info(request.scope).tenant
    body = await read_json(request, service, lambda data: _parse(data, loaded))
    if body.continuation_token is not None:
        return await _go_on(request, service, body)
    call = await new_call(service, tenant, body)
    return await _run(request, service, call)


def _parse(data: dict[str, Any], loaded: Loaded) -> InteractionBody:
    given, context = data.get("input"), loaded.engine.context_length
    if isinstance(given, list) and len(given) > context:
        raise context_exceeded("input", f"at least {len(given)}", context)
    return parse(InteractionBody, data)


async def new_call(service: Service, tenant: str, body: InteractionBody) -> Call:
    """Check a body. Raises an `ApiError` that says what is wrong with it."""
    loaded = service.loaded
    _check_body(body, loaded)
    turn = None
    if body.previous_interaction_id is not None:
        turn = await previous_turn(service, tenant, body.previous_interaction_id)
    try:
        return await service.offload(lambda: _call(service, loaded, body, turn))
    except ApiError as error:
        raise in_snake_case(error) from None


async def previous_turn(service: Service, tenant: str, id: str) -> Turn:
    """The turn that a new interaction goes on from."""
    run = service.runs.find(tenant, id, API)
    if run is not None and run.plan.stored and not run.ended:
        message = f"Interaction '{id[:80]}' is still in progress; wait for its end, or cancel it"
        raise ApiError(400, message, param="previous_interaction_id", code="failed_precondition")
    stored = await find(service, tenant, id, API, revive)
    if stored is None:
        raise _not_found(id, "previous_interaction_id")
    return turn_of(stored, service.conversations, tenant)


def _check_body(body: InteractionBody, loaded: Loaded) -> None:
    for name, message in _UNSUPPORTED.items():
        if getattr(body, name) is not None:
            raise unsupported(name, f"'{name}': {message}")
    if not body.model:
        raise bad_request("'model' is required", "model", "missing_field")
    if body.model.removeprefix("models/") not in (loaded.name, loaded.model.name):
        raise model_not_found(body.model[:100], loaded.name)
    check_model(loaded)
    if body.input is None:
        raise bad_request("'input' is required: a text, contents or steps", "input", "missing_field")
    if body.background and body.store is False:
        raise bad_request("'background' needs the interaction to be stored; 'store' is false", "background")


def _call(service: Service, loaded: Loaded, body: InteractionBody, turn: Turn | None) -> Call:
    """In a worker."""
    given = body.generation_config or InteractionConfig()
    where = "generation_config"
    config = _as_gemini(body, given)
    check_output(config, where)
    tools = tools_of(_tools(body.tools), _tool_config(given.tool_choice), loaded)
    grammar = _grammar(body, config, tools, where)
    names = dict(turn.names) if turn is not None else {}
    messages = messages_of(steps_of(body.input), names=names)
    conversation = conversation_of(
        loaded,
        turn,
        messages,
        body.system_instruction or "",
        None if tools is None else tools.descriptions,
        field="input",
        thinking_field=f"{where}.thinking_level",
    )
    return Call(
        id=f"v1_{uuid.uuid4().hex}",
        body=body,
        loaded=loaded,
        conversation=conversation,
        params=dataclasses.replace(sampling_params(config, service, loaded, where), grammar=grammar),
        effort=effort_of(config.thinking_config, service.config.level, where),
        tools=tools,
        turn=turn,
        messages=messages,
        names=names,
        summary=_summaries(given),
        linger=service.config.resume_grace,
        ttl=service.config.retention,
    )


def _summaries(config: InteractionConfig) -> bool:
    if config.thinking_summaries not in (None, "auto", "none"):
        raise invalid("generation_config.thinking_summaries", "supported: auto, none")
    return config.thinking_summaries == "auto"


def _as_gemini(body: InteractionBody, config: InteractionConfig) -> GenerationConfig:
    """The options in the form of the Gemini protocol."""
    options = {name: getattr(config, name) for name in _SAME_OPTIONS}
    if config.video_config is not None:
        raise unsupported("generation_config.video_config", "'generation_config.video_config': supported: text")
    thinking = None
    if config.thinking_level is not None or config.thinking_budget is not None:
        thinking = ThinkingConfig(thinking_level=config.thinking_level, thinking_budget=config.thinking_budget)
    return GenerationConfig.model_construct(
        **options, thinking_config=thinking, response_mime_type=body.response_mime_type,
        response_modalities=body.response_modalities,
    )  # fmt: skip


def _grammar(body: InteractionBody, config: GenerationConfig, tools: Tools | None, where: str) -> Grammar | None:
    """The form that the answer must have."""
    if body.response_format in (None, []):
        return answer_form(config, tools, where)
    return answer_grammar(tools, response_format(body.response_format, "response_format"))


def _tools(given: list[dict[str, Any]] | None) -> list[Tool]:
    declarations = []
    for i, tool in enumerate(given or ()):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind != "function":
            raise unsupported(
                where, f"'{where}': tools of type {str(kind)[:40]!r} are not supported; supported: function"
            )
        name, parameters = tool.get("name"), tool.get("parameters")
        if not isinstance(name, str):
            raise bad_request(f"Missing required field: '{where}.name'", f"{where}.name", "missing_field")
        description = str(tool.get("description") or "")
        declarations.append(
            FunctionDeclaration(name=name, description=description, parameters_json_schema=parameters or None)
        )
    return [Tool(function_declarations=declarations)] if declarations else []


def _tool_config(choice: str | dict[str, Any] | None) -> ToolConfig | None:
    if choice is None:
        return None
    where = "generation_config.tool_choice"
    mode: Any = choice
    names = None
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict):
            raise invalid(where, f"supported: {', '.join(_CHOICES)}, or an object with allowed_tools")
        mode, names = allowed.get("mode", "any"), allowed.get("tools")
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise invalid(f"{where}.allowed_tools.tools", "expected a list of names")
    if not isinstance(mode, str) or mode.lower() not in _CHOICES:
        raise invalid(where, f"got {str(mode)[:40]!r}; supported: {', '.join(_CHOICES)}")
    return ToolConfig(
        function_calling_config=FunctionCallingConfig(mode=mode.upper(), allowed_function_names=names or None)
    )


# ---- answering


async def _run(request: Request, service: Service, call: Call) -> Response:
    info = request_info(request.scope)
    run = await service.runs.start(call.plan(), info.tenant)
    told = effort_notes(run.prepared)
    info.notes.update(prompt_tokens=len(run.prepared.prompt), **told)
    headers = {f"x-umbra-{name}": value for name, value in told.items()}
    headers["x-umbra-prompt-tokens"] = str(len(run.prepared.prompt))
    if call.body.stream:
        elapsed = time.perf_counter() - info.started
        headers |= google_headers(elapsed, len(run.prepared.prompt))
        return _stream(request, service, run.reader(), headers, resumable=not call.body.background)
    if call.body.background:
        return _json(run.resource, headers)
    await _ended(request, run)
    assert run.last is not None
    info.notes.update(outcome([run.last]))
    if run.ending != "finished" and (error := failure(run.last)) is not None:
        raise error
    usage, times = run.resource["usage"], run.last.timings
    headers |= timing_headers(run.last) | google_headers(times.total if times else 0.0, usage["total_tokens"])
    return _json(run.resource, headers)


async def _ended(request: Request, run: Run) -> None:
    """Wait for the end of a run. It ends when the client goes."""
    reader = run.reader()
    watch = Watch(request, reader)
    try:
        await reader.end()
    finally:
        await watch.stop()
        reader.close()


def _stream(
    request: Request, service: Service, reader: Reader, headers: dict[str, str], *, resumable: bool
) -> EventStream:
    """`resumable`: checkpoints are told, from which a client goes on by itself when it loses the connection."""
    id = reader.run.id

    def mark(number: int) -> bytes:
        return checkpoint(id, _token(id, number), number)

    return EventStream(
        reader.pieces(service.config.heartbeat, KEEP_ALIVE, checkpoint=mark if resumable else None, end=DONE),
        reply=reader,
        watch=Watch(request, reader),
        error_event=_error_event,
        send_timeout=service.config.send_timeout,
        headers=headers,
    )


def _error_event(error: ApiError) -> bytes:
    return named({"event_type": "error", **interaction_body(error)}) + DONE


def _json(resource: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(resource), media_type="application/json", headers=headers)


# ---- going on with a stream that broke


def _token(id: str, number: int) -> str:
    return base64.urlsafe_b64encode(f"{id}:{number}".encode()).decode().rstrip("=")


def _read_token(token: str) -> tuple[str, int]:
    try:
        text = base64.urlsafe_b64decode(token.encode() + b"=" * (-len(token) % 4)).decode()
        id, _, number = text.rpartition(":")
        return id, int(number)
    except ValueError:
        raise invalid("continuation_token", "this server has given out no such token") from None


async def _go_on(request: Request, service: Service, body: InteractionBody) -> Response:
    """What followed the moment of a token, and what follows."""
    token = body.continuation_token or ""
    id, number = _read_token(token)
    if body.previous_interaction_id not in (None, id) and body.input is None:
        raise invalid("continuation_token", "it belongs to another interaction than previous_interaction_id")
    run = service.runs.find(request_info(request.scope).tenant, id, API)
    if run is None:
        stored = await _stored(request, service, id)
        if not stored.log.has(number):
            message = f"'continuation_token': the interaction '{id}' was cut off; go on with previous_interaction_id"
            raise ApiError(400, message, param="continuation_token", code="failed_precondition")
        if not body.stream:
            return _json(stored.resource)
        return _replay(stored, number)
    if not body.stream:
        await _ended(request, run)
        return _json(run.resource)
    if not run.log.has(number):
        raise invalid("continuation_token", "what followed it is not kept any more")
    return _stream(request, service, run.reader(number), {}, resumable=True)


# ---- stored ones


async def get_interaction(request: Request, service: Service, id: str) -> Response:
    """The interaction, or with `stream=true` its events, those after `last_event_id`."""
    query = request.query_params
    streamed, with_input = _flag(request, "stream"), _flag(request, "include_input")
    last = query.get("last_event_id")
    number = -1
    if last is not None:
        if not streamed:
            raise bad_request("'last_event_id' needs stream=true", "last_event_id")
        found = event_number(last)
        if found is None:
            raise _unknown_event(last)
        number = found
    run = service.runs.find(request_info(request.scope).tenant, id, API)
    if run is not None and run.plan.stored:
        if not streamed:
            resource = await run.snapshot()
            if with_input:
                resource = {**resource, "input": run.plan.request(run.prepared)["input"]}
            return _json(resource)
        if not run.log.has(number):
            raise _unknown_event(last or "")
        return _stream(request, service, run.reader(number), {}, resumable=False)
    stored = await _stored(request, service, id)
    if not streamed:
        return _json({**stored.resource, "input": stored.row.request["input"]} if with_input else stored.resource)
    if not stored.log.has(number):
        raise _unknown_event(last or "")
    return _replay(stored, number)


def _replay(stored: Stored, number: int) -> Response:
    data = b"".join(stored.log.after(number)) + DONE
    return Response(data, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def cancel_interaction(request: Request, service: Service, id: str) -> Response:
    """End an interaction in progress; one that has ended stays as it is."""
    run = service.runs.find(request_info(request.scope).tenant, id, API)
    if run is not None and run.plan.stored:
        run.stop("cancelled")
        await run.done()
        return _json(run.resource)
    return _json((await _stored(request, service, id)).resource)


async def delete_interaction(request: Request, service: Service, id: str) -> Response:
    tenant = request_info(request.scope).tenant
    run = service.runs.find(tenant, id, API)
    if run is None or not run.plan.stored:
        await _stored(request, service, id)
    try:
        await service.runs.delete(tenant, id)
    except NotFound:
        raise _not_found(id) from None
    return JSONResponse({})


async def _stored(request: Request, service: Service, id: str) -> Stored:
    stored = await find(service, request_info(request.scope).tenant, id, API, revive)
    if stored is None:
        raise _not_found(id)
    return stored


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise bad_request(f"'{name}' must be true or false, got {value[:40]!r}", name)
    return value == "true"


def _unknown_event(event_id: str) -> ApiError:
    message = f"'last_event_id': the interaction has no event {event_id[:40]!r}, or none after it is kept"
    return bad_request(message, "last_event_id")


def _not_found(id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"Interaction '{id[:80]}' not found", param=param, code="not_found")
