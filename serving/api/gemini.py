"""The Gemini protocol's methods of a model: `generateContent`, `streamGenerateContent`, `countTokens`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from ..effort import Effort, Prepared
from ..engine.request import Emission, Keep, SamplingParams
from .body import read_json
from .cached_contents import find_beginning
from .conversation import Conversation, check_model
from .errors import ApiError, bad_request, model_not_found, unsupported
from .gemini_answers import Candidate, text_tokens, usage_metadata
from .gemini_contents import check_count, messages_of
from .gemini_options import (
    answer_form,
    candidates_of,
    check_body,
    check_output,
    effort_of,
    sampling_params,
    tools_of,
)
from .gemini_schemas import BESIDE, CountBody, GenerateBody, GenerationConfig, invalid, parse
from .gemini_stream import Form, JsonArray, Sse, Stream, identity
from .middleware import request_info
from .reporting import effort_notes, google_headers, outcome, timing_headers
from .service import Loaded, Service, failure, gather
from .stream import EventStream, Watch
from .tool_calls import Tools
from .turns import declared_tools
from .wishes import FIELDS, from_body

EMBEDDING = ("embedContent", "batchEmbedContents")
METHODS = ("generateContent", "streamGenerateContent", "countTokens", *EMBEDDING)
"""What can be asked of a model."""

_REFUSED_QUERY = ("fields", "$fields", "callback", "$callback")
"""Parameters of Google's APIs that would change the form of an answer."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that has been checked and only needs running."""

    loaded: Loaded
    conversation: Conversation
    params: SamplingParams
    effort: Effort
    candidates: int
    show_thoughts: bool
    tools: Tools | None
    keep: Keep = "blocks"
    """What may outlive the request: KV in all tiers, unless it says that nothing is to be stored."""
    cached: int = 0
    """Tokens of the cached content that the prompt begins with."""

    def prepare(self) -> Prepared:
        """For a worker."""
        return self.conversation.prepare(self.loaded, self.params, self.effort)

    def new_candidates(self, params: SamplingParams) -> list[Candidate]:
        """`params` are the prepared ones."""
        shape = functools.partial(
            Candidate,
            loaded=self.loaded,
            show_thoughts=self.show_thoughts,
            logprobs=params.logprobs is not None,
            thinking=params.thinking,
            tools=self.tools,
        )
        return [shape(index) for index in range(self.candidates)]


async def generate_content(request: Request, service: Service, model: str) -> Response:
    if _alt(request) != "json":
        raise bad_request("'alt=sse' is an option of streamGenerateContent", "alt")
    call = await _read_call(request, service, model)
    return await _run(request, service, call, None)


async def stream_generate_content(request: Request, service: Service, model: str) -> Response:
    form: Form = Sse() if _alt(request) == "sse" else JsonArray()
    call = await _read_call(request, service, model)
    return await _run(request, service, call, form)


async def count_tokens(request: Request, service: Service, model: str) -> Response:
    """The tokens that the same contents, instructions and tools would have as a prompt."""
    _alt(request)
    loaded = _find(service, model)

    tenant = request_info(request.scope).tenant

    def counted(data: dict[str, Any]) -> CountBody:
        check_count(data.get("contents"), loaded)
        return parse(CountBody, data)

    body = await read_json(request, service, counted)

    def prepared() -> tuple[Call, int]:
        call = _counted(body, service, loaded, model, tenant)
        return call, len(call.prepare().prompt)

    call, total = await service.offload(prepared)
    request_info(request.scope).notes["prompt_tokens"] = total
    answer = {"totalTokens": total, "promptTokensDetails": text_tokens(total), "cachedContentTokenCount": call.cached}
    return JSONResponse(answer)


async def unknown_method(request: Request, service: Service, model: str) -> Response:
    """A method that models do not have, or not here."""
    name, _, method = model.rpartition(":")
    if not name:
        raise ApiError(404, f"POST needs a method: models/{model[:100]}:METHOD; supported: {', '.join(METHODS)}")
    _find(service, name)
    raise ApiError(404, f"models/{name} is not supported for {method[:60]}; supported: {', '.join(METHODS)}")


def _find(service: Service, model: str) -> Loaded:
    """The model that a path names, as `models/ID` or bare."""
    loaded = service.loaded
    name = model.removeprefix("models/")
    if name not in (loaded.name, loaded.model.name):
        raise model_not_found(name[:100], loaded.name)
    check_model(loaded)
    return loaded


def _alt(request: Request) -> str:
    """The form of the answer, `json` or `sse`, from the query."""
    query = request.query_params
    for name in _REFUSED_QUERY:
        if name in query:
            raise unsupported(name, f"the query parameter '{name}' is not supported; leave it out")
    alt = query.get("alt") or query.get("$alt") or "json"
    if alt not in ("json", "sse"):
        raise invalid("alt", f"got {alt[:40]!r}; supported: json, sse")
    return alt


async def _read_call(request: Request, service: Service, model: str) -> Call:
    loaded, tenant = _find(service, model), request_info(request.scope).tenant

    def call(data: dict[str, Any]) -> Call | GenerateBody:
        check_count(data.get("contents"), loaded)
        body = parse(GenerateBody, data)
        return _call(body, service, loaded, model, tenant) if body.cached_content is None else body

    found = await read_json(request, service, call)
    if isinstance(found, Call):
        return found
    body = found
    return await service.offload(lambda: _call(body, service, loaded, model, tenant))


def _call(body: GenerateBody, service: Service, loaded: Loaded, model: str, tenant: str, where: str = "") -> Call:
    """`where` is the prefix of the body's fields in errors. For a worker if there is cached content."""
    _check_named(body.model, model)
    from_body({name: getattr(body, name) for name in FIELDS})
    check_body(body, where)
    config = body.generation_config or GenerationConfig()
    name = f"{where}generationConfig"
    check_output(config, name)
    tools = tools_of(body.tools, body.tool_config, loaded, where)
    field, thinking = f"{where}contents", config.thinking_config
    messages = messages_of(body.contents, body.system_instruction, where=field)
    thinking_field = f"{name}.thinkingConfig"
    cached = 0
    if body.cached_content is not None:
        beginning = find_beginning(service, loaded, tenant, body.cached_content, f"{where}cachedContent")
        tools, cached = declared_tools(beginning.tools, loaded), len(beginning.ids)
        conversation = beginning.followed_by(messages, field=field, thinking_field=thinking_field)
    else:
        conversation = Conversation(messages, None if tools is None else tools.descriptions, field, thinking_field)
    return Call(
        loaded=loaded,
        conversation=conversation,
        cached=cached,
        params=dataclasses.replace(
            sampling_params(config, service, loaded, name), grammar=answer_form(config, tools, name)
        ),
        effort=effort_of(thinking, service.config.level, thinking_field),
        candidates=candidates_of(config, service, loaded, name),
        show_thoughts=thinking is not None and bool(thinking.include_thoughts),
        tools=tools,
        keep="nothing" if body.store is False else "blocks",
    )


def _counted(body: CountBody, service: Service, loaded: Loaded, model: str, tenant: str) -> Call:
    _check_named(body.model, model)
    whole = body.generate_content_request
    beside = {name: getattr(body, name) for name in BESIDE}
    if whole is None:
        return _call(GenerateBody.model_construct(**beside), service, loaded, model, tenant)
    if any(value is not None for value in beside.values()):
        raise invalid("generateContentRequest", "it cannot be given together with contents or other parts of a request")
    return _call(whole, service, loaded, model, tenant, "generateContentRequest.")


def _check_named(named: str | None, model: str) -> None:
    """A body may repeat the model of the path."""
    if named and named.removeprefix("models/") != model.removeprefix("models/"):
        raise invalid("model", f"{named[:60]!r} is not the model of the path, {model[:60]!r}")


async def _run(request: Request, service: Service, call: Call, form: Form | None) -> Response:
    """Run the request and answer it, whole or (in a `form`) streamed. The engine's work ends when the client goes.

    A stream begins when there is something to say, so that a refusal or failure before has its own status; or, so that
    the connection shows life, after the time of a heartbeat.
    """
    reply = service.new_reply()
    watch = Watch(request, reply)
    info = request_info(request.scope)
    handed_over = False
    try:
        (prepared,) = await service.submit(reply, lambda: [call.prepare()], call.candidates, "contents", call.keep)
        prompt_tokens = len(prepared.prompt)
        told = effort_notes(prepared)
        info.notes.update(prompt_tokens=prompt_tokens, **told)
        headers = {f"x-umbra-{name}": value for name, value in told.items()}
        headers["x-umbra-prompt-tokens"] = str(prompt_tokens)
        candidates = call.new_candidates(prepared.params)
        if form is None:
            emissions = await gather(reply, call.candidates)
            info.notes.update(outcome(emissions))
            return _whole(call, candidates, emissions, headers)
        first = await reply.take(service.config.heartbeat)
        for _, emission in first:
            if not emission.token_ids and (error := failure(emission)) is not None:
                raise error
        elapsed = time.perf_counter() - info.started
        headers |= {"content-type": form.media_type, **google_headers(elapsed, prompt_tokens)}
        handed_over = True
        stream = Stream(call.loaded, candidates, form, service.config.heartbeat, told, info.notes, call.cached)
        return EventStream(
            stream.events(reply, first),
            reply=reply,
            watch=watch,
            error_event=form.failed,
            send_timeout=service.config.send_timeout,
            headers=headers,
        )
    finally:
        if not handed_over:
            reply.close()
            await watch.stop()


def _whole(
    call: Call, candidates: Sequence[Candidate], emissions: Sequence[Emission], headers: dict[str, str]
) -> Response:
    usage = usage_metadata(emissions, call.cached)
    shown = [one.whole(emission) for one, emission in zip(candidates, emissions, strict=True)]
    latency = max(one.timings.total if one.timings is not None else 0.0 for one in emissions)
    answer = {"candidates": shown, "usageMetadata": usage, **identity(call.loaded)}
    headers |= timing_headers(emissions[0]) | google_headers(latency, usage["totalTokenCount"])
    return Response(to_json(answer), media_type="application/json", headers=headers)
