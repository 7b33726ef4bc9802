"""Cached contents: beginnings of prompts that are kept ready, and prompts that begin with one."""

from __future__ import annotations

import dataclasses
import datetime
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...cache.contents import CachedContent, Expired, QuotaExceeded
from ...cache.database import NotFound, Unavailable, Unreadable
from ...model.chat_template import ChatTemplateError, Known
from ..effort import Prepared
from ..engine.request import SamplingParams
from .body import read_json
from .conversation import Conversation, Messages, check_model
from .errors import ApiError, bad_request, context_exceeded, model_not_found, unavailable
from .gemini_contents import check_count, messages_of, system_text
from .gemini_options import tools_of
from .gemini_schemas import CachedBody, ExpiryBody, invalid, parse
from .interaction_events import timestamp
from .middleware import request_info
from .service import Loaded, Service, gather

PREFIX = "cachedContents/"
DEFAULT_TTL = 3600.0
MAX_TTL = 366 * 86_400.0
_PAGE, _MAX_PAGE = 100, 1000

_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)s")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Beginning:
    """A prompt's beginning, whose ids are known."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    ids: Sequence[int]

    def followed_by(self, new: Messages, *, field: str, thinking_field: str) -> Conversation:
        """The conversation that goes on from here. A turn of the same role is the same turn."""
        mark = new_mark()
        shown = [{**message, "content": ""} for message in self.messages]
        shown[-1] = {**shown[-1], "content": mark}
        return Conversation(
            joined(shown, new),
            self.tools,
            field,
            thinking_field,
            Known(self.ids, mark),
            lambda: joined(self.messages, new),
        )


def joined(messages: Messages, new: Messages) -> Messages:
    """`messages`, then `new`; two turns of one role in a row are one."""
    last, first = messages[-1], new[0] if new else None
    if first is None or last["role"] != first["role"] or last["role"] == "tool":
        return [*messages, *new]
    both = {**last, **first, "content": last["content"] + first["content"]}
    return [*messages[:-1], both, *new[1:]]


def new_mark() -> str:
    """A text that is in no message."""
    return f"mark{uuid.uuid4().hex}"


# ---- as parts of other requests


def find_beginning(service: Service, loaded: Loaded, tenant: str, name: str, field: str) -> Beginning:
    """The beginning that a request names in `field`. In a worker; raises an `ApiError` if there is no such content."""
    if not name.startswith(PREFIX):
        raise invalid(field, f"expected '{PREFIX}ID'")
    content = _reported(lambda: service.conversations.contents.get(service.conversations.space(tenant), name))
    if content.model not in (loaded.name, loaded.model.name):
        raise invalid(field, f"{name} belongs to the model {content.model!r}")
    return Beginning(content.body["messages"], content.body["tools"], content.token_ids.tolist())


# ---- the resource


async def create_content(request: Request, service: Service) -> Response:
    """Keep a beginning, and compute what a model needs of it, so that requests that begin with it start fast."""
    loaded, tenant = service.loaded, request_info(request.scope).tenant

    def checked(data: dict[str, Any]) -> tuple[CachedBody, Conversation, str]:
        check_count(data.get("contents"), loaded)
        body = parse(CachedBody, data)
        return body, *_conversation(body, loaded)

    body, conversation, mark = await read_json(request, service, checked)
    expires = _expiry(body.ttl, body.expire_time) or time.time() + DEFAULT_TTL
    ids = await service.offload(lambda: _ids(conversation, loaded, mark))
    kept = {"messages": conversation.messages, "tools": conversation.tools}
    contents, space = service.conversations.contents, service.conversations.space(tenant)

    def create() -> CachedContent:
        return contents.create(space, ids, expires=expires, body=kept, display_name=body.display_name or "")

    content = await service.in_storage(lambda: _reported(create))
    try:
        await _compute(service, ids)
    except BaseException:
        await service.in_storage(lambda: contents.delete(space, content.name))
        raise
    return JSONResponse(_shown(content, loaded))


async def get_content(request: Request, service: Service, id: str) -> Response:
    loaded = service.loaded
    return JSONResponse(_shown(await _call(request, service, lambda all, space: all.get(space, PREFIX + id)), loaded))


async def list_contents(request: Request, service: Service) -> Response:
    """What has not expired, oldest first."""
    loaded, query = service.loaded, request.query_params
    size = _page_size(query.get("pageSize") or query.get("page_size"))
    token = query.get("pageToken") or query.get("page_token")
    after = PREFIX + token if token else None
    try:
        found = await _call(request, service, lambda all, space: all.page(space, limit=size + 1, after=after))
    except ApiError as error:
        if error.status == 404:
            raise invalid("pageToken", "no page begins there") from None
        raise
    answer: dict[str, Any] = {"cachedContents": [_shown(content, loaded) for content in found[:size]]}
    if len(found) > size:
        answer["nextPageToken"] = found[size - 1].name.removeprefix(PREFIX)
    return JSONResponse(answer)


async def patch_content(request: Request, service: Service, id: str) -> Response:
    """Change until when it is kept; nothing else of it can be changed."""
    loaded = service.loaded
    mask = request.query_params.get("updateMask") or request.query_params.get("update_mask") or ""
    for field in filter(None, mask.split(",")):
        if field not in ("ttl", "expireTime", "expire_time"):
            raise invalid("updateMask", f"{field[:40]!r} cannot be changed; supported: ttl, expireTime")
    body = await read_json(request, service, lambda data: parse(ExpiryBody, data))
    expires = _expiry(body.ttl, body.expire_time)
    if expires is None:
        raise bad_request("Missing required field: 'ttl' or 'expireTime'", "ttl", "missing_field")
    content = await _call(request, service, lambda all, space: all.patch(space, PREFIX + id, expires=expires))
    return JSONResponse(_shown(content, loaded))


async def delete_content(request: Request, service: Service, id: str) -> Response:
    _ = service.loaded
    await _call(request, service, lambda all, space: all.delete(space, PREFIX + id))
    return JSONResponse({})


async def _call(request: Request, service: Service, work: Callable[[Any, bytes], T]) -> T:
    """`work` with the contents and the caller's namespace, in a worker."""
    conversations, tenant = service.conversations, request_info(request.scope).tenant
    return await service.in_storage(
        lambda: _reported(lambda: work(conversations.contents, conversations.space(tenant)))
    )


def _reported(work: Callable[[], T]) -> T:
    """What the store says, as a refusal."""
    try:
        return work()
    except NotFound as error:
        raise ApiError(404, f"Cached content not found: {error}", code="not_found") from None
    except Expired as error:
        raise ApiError(404, f"Cached content has expired: {error}; create it again", code="expired") from None
    except QuotaExceeded as error:
        message = f"Cached content cannot be kept: {error}; delete some, or let it expire"
        raise ApiError(429, message, kind="rate_limit_error", code="quota_exceeded") from None
    except Unreadable as error:
        raise ApiError(500, f"Cached content was damaged: {error}", kind="server_error", code="damaged") from None
    except Unavailable:
        raise unavailable("Cached contents cannot be stored or read now", "storage_unavailable", 10.0) from None
    except ValueError as error:
        raise invalid("expireTime", str(error)) from None


def _conversation(body: CachedBody, loaded: Loaded) -> tuple[Conversation, str]:
    """What is to be kept, and the mark for its end."""
    if not body.model:
        raise bad_request("Missing required field: 'model'", "model", "missing_field")
    if body.model.removeprefix("models/") not in (loaded.name, loaded.model.name):
        raise model_not_found(body.model[:100], loaded.name)
    check_model(loaded)
    tools = tools_of(body.tools, body.tool_config, loaded)
    if body.contents:
        messages = messages_of(body.contents, body.system_instruction, where="contents")
    else:
        text = system_text(body.system_instruction, "systemInstruction") if body.system_instruction else ""
        if not text:
            raise bad_request("* contents: there is nothing to be kept", "contents", "missing_field")
        messages = [{"role": "system", "content": text}]
    return Conversation(messages, None if tools is None else tools.descriptions, "contents", ""), new_mark()


def _ids(conversation: Conversation, loaded: Loaded, mark: str) -> list[int]:
    """The ids up to the end of the last message, in a worker."""
    last = conversation.messages[-1]
    messages = [*conversation.messages[:-1], {**last, "content": last["content"] + mark}]
    if last["role"] != "user":
        messages.append({"role": "user", "content": "-"})
    try:
        ids = dataclasses.replace(conversation, messages=messages).until(loaded, mark)
    except ChatTemplateError as error:
        message = f"The model's chat template cannot have this as a beginning: {error}"
        raise bad_request(message, "contents") from None
    if len(ids) >= loaded.engine.context_length:
        raise context_exceeded("contents", str(len(ids)), loaded.engine.context_length)
    return ids


async def _compute(service: Service, ids: Sequence[int]) -> None:
    """Let the engine run over a beginning, which leaves its blocks in the cache."""
    reply = service.new_reply()
    try:
        prepared = Prepared(ids, SamplingParams(max_tokens=1, draft="off"))
        await service.submit(reply, lambda: [prepared], 1, "contents", keep="conversation")
        await gather(reply, 1)
    finally:
        reply.close()


def _shown(content: CachedContent, loaded: Loaded) -> dict[str, Any]:
    return {
        "name": content.name,
        "model": f"models/{loaded.name}",
        "displayName": content.display_name,
        "createTime": timestamp(content.created),
        "updateTime": timestamp(content.updated),
        "expireTime": timestamp(content.expires),
        "usageMetadata": {"totalTokenCount": len(content.token_ids)},
    }


def _expiry(ttl: str | None, expire_time: str | None) -> float | None:
    """Seconds since 1970 until which something is kept; None if nothing is said."""
    if ttl is not None and expire_time is not None:
        raise invalid("expireTime", "it cannot be given together with ttl")
    if ttl is not None:
        match = _DURATION.fullmatch(ttl)
        if match is None or not 0 < float(match[1]) <= MAX_TTL:
            raise invalid("ttl", f"got {ttl[:40]!r}; expected seconds, like '300s', at most {MAX_TTL:.0f}s")
        return time.time() + float(match[1])
    if expire_time is None:
        return None
    try:
        when = datetime.datetime.fromisoformat(expire_time)
    except ValueError:
        raise invalid("expireTime", f"got {expire_time[:40]!r}; expected RFC 3339") from None
    if when.tzinfo is None:
        raise invalid("expireTime", "the time zone is missing")
    if not 0 < when.timestamp() - time.time() <= MAX_TTL:
        raise invalid("expireTime", "it must be in the future, and within a year")
    return when.timestamp()


def _page_size(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise invalid("pageSize", f"expected a number, got {text[:40]!r}")
    return min(int(text), _MAX_PAGE) or _PAGE
