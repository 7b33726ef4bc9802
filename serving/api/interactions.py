"""The Interactions API: answers on their own account, which can be gone on with, read again and cancelled."""

from __future__ import annotations

import base64
import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from ...cache.database import NotFound
from .body import read_json
from .errors import ApiError, bad_request, stopping
from .gemini_schemas import invalid
from .interaction_call import API, Call, new_call, not_found, parse_body, revive
from .interaction_errors import interaction_body
from .interaction_events import DONE, checkpoint, event_number, named
from .interaction_schemas import InteractionBody
from .middleware import request_info
from .reporting import effort_notes, google_headers, outcome, timing_headers
from .run import Reader, Run
from .service import Service
from .stored import Stored, find
from .stream import KEEP_ALIVE, EventStream, Watch


async def create_interaction(request: Request, service: Service) -> Response:
    loaded, tenant = service.loaded, request_info(request.scope).tenant
    body = await read_json(request, service, lambda data: parse_body(data, loaded))
    if body.continuation_token is not None:
        return await _go_on(request, service, body)
    call = await new_call(service, tenant, body)
    return await _run(request, service, call)


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
    if run.ending == "stopped":
        raise stopping()
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
        raise not_found(id) from None
    return JSONResponse({})


async def _stored(request: Request, service: Service, id: str) -> Stored:
    stored = await find(service, request_info(request.scope).tenant, id, API, revive)
    if stored is None:
        raise not_found(id)
    return stored


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise bad_request(f"'{name}' must be true or false, got {value[:40]!r}", name)
    return value == "true"


def _unknown_event(event_id: str) -> ApiError:
    message = f"'last_event_id': the interaction has no event {event_id[:40]!r}, or none after it is kept"
    return bad_request(message, "last_event_id")
