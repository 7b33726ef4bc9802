"""Stored answers as they come back: to be shown, replayed and gone on with.

An answer whose process died has only its token ids. From those it is made again, as an answer that was cut off, and
stored so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ...cache.database import NotFound, Unavailable, Unreadable
from ...cache.interactions import Interaction
from ..effort import Prepared
from ..engine.request import Emission, Usage
from ..engine.thoughts import Channels, Thinking
from .conversation import Messages
from .conversations import Conversations, answer_ids, pack_events, unpack_events
from .errors import ApiError, unavailable
from .eventlog import EventLog
from .runs import REPLAY_BYTES, Writer
from .service import Loaded, Service
from .tool_calls import Tools
from .turns import Turn, declared_tools

Revive = Callable[[Loaded, Interaction], Writer]
"""A protocol's writer for a stored answer, as it was when the answer began."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """An answer that is not being made any more, at least not by this process."""

    row: Interaction
    resource: dict[str, Any]
    output: dict[str, Any]

    @functools.cached_property
    def log(self) -> EventLog:
        """Its events, with the numbers they had."""
        log = EventLog(lambda event, number: b"", lambda first, second: None, REPLAY_BYTES)
        log.restore(self.output["numbers"], unpack_events(self.output["events"]))
        return log


def record(
    api: str,
    prepared: Prepared,
    *,
    turn: Turn | None,
    messages: Messages,
    system: str,
    tools: Tools | None,
    names: dict[str, str],
    shown: bool,
    **more: Any,
) -> dict[str, Any]:
    """What is stored with a prompt, beside the resource. `messages` are those that were new, `shown`: whether
    thoughts are."""
    thinking = prepared.params.thinking
    return {
        "api": api,
        "messages": messages,
        "system": system,
        "tools": None if tools is None else tools.descriptions,
        "names": names,
        "number": 0 if turn is None else turn.number + 1,
        "shown": shown,
        "thinking": None if thinking is None else dataclasses.asdict(thinking),
        **more,
    }


async def find(service: Service, tenant: str, id: str, api: str, revive: Revive) -> Stored | None:
    """A stored answer of `api`; None if there is none. Raises an `ApiError` if it cannot be read."""
    loaded = service.loaded
    return await service.in_storage(lambda: load(loaded, service.conversations, tenant, id, api, revive))


def load(loaded: Loaded, conversations: Conversations, tenant: str, id: str, api: str, revive: Revive) -> Stored | None:
    """`find`, in a worker."""
    try:
        row = conversations.get(tenant, id)
        if not isinstance(row.request, dict) or row.request.get("api") != api:
            return None
        output = row.output
        if output is None:
            output = _made_again(loaded, row, revive(loaded, row))
            if row.status == "incomplete":
                usage = output["resource"].get("usage")
                conversations.finish(id, (), status="incomplete", output=output, usage=usage)
        return Stored(row, output["resource"], output)
    except NotFound:
        return None
    except Unreadable as error:
        raise ApiError(500, f"'{id}' was damaged: {error}", kind="server_error", code="damaged") from None
    except Unavailable:
        raise unavailable("Stored conversations cannot be read now", "storage_unavailable", 10.0) from None


def turn_of(stored: Stored, conversations: Conversations, tenant: str) -> Turn:
    """What goes on from a stored answer. Raises an `ApiError` while another process is making it."""
    row, request = stored.row, stored.row.request
    if row.status == "in_progress":
        message = f"'{row.id}' is still in progress, on another server"
        raise ApiError(400, message, code="failed_precondition")
    return Turn(
        row.id,
        row.token_ids.tolist(),
        request["system"],
        request["tools"],
        {**request["names"], **stored.output["names"]},
        lambda: _messages(conversations, tenant, row),
        request["number"],
    )


def _messages(conversations: Conversations, tenant: str, row: Interaction) -> Messages:
    """All messages of a conversation but the system text, in a worker."""
    turns = conversations.lineage(tenant, row.id)
    if len(turns) != row.request["number"] + 1 or any(output is None for _, output in turns):
        message = (
            f"Earlier turns of '{row.id}' were deleted: it can be gone on with only with the instructions and tools "
            "that it had"
        )
        raise ApiError(400, message, code="failed_precondition")
    return [message for request, output in turns for message in [*request["messages"], *output["messages"]]]


def tools_of(loaded: Loaded, row: Interaction) -> Tools | None:
    """The tools that a stored answer could call."""
    return declared_tools(row.request["tools"], loaded)


def thinking_of(row: Interaction) -> Thinking | None:
    given = row.request["thinking"]
    if given is None:
        return None
    return Thinking(given["budget"], tuple(map(tuple, given["close"])), tuple(given["conclude"]))


def _made_again(loaded: Loaded, row: Interaction, writer: Writer) -> dict[str, Any]:
    """The output of an answer that has only its ids."""
    log = EventLog(writer.encode, writer.merge, REPLAY_BYTES)
    emission = _whole_emission(loaded, row)
    log.add(writer.begin())
    log.add(writer.push(emission))
    log.add(writer.end(emission, "incomplete"))
    if row.status == "in_progress":  # by another process
        writer.resource["status"] = "in_progress"
    messages, names = writer.told()
    numbers, events = log.entries
    return {
        "resource": writer.resource, "messages": messages, "names": names, "numbers": numbers,
        "events": pack_events(events),
    }  # fmt: skip


def _whole_emission(loaded: Loaded, row: Interaction) -> Emission:
    """A stored answer as one emission that was cut off."""
    ids, thinking = answer_ids(row), thinking_of(row)
    channels = Channels(loaded.model.tokenizer.token_bytes, (), thinking)
    ends = frozenset(getattr(loaded.model, "eos_ids", ()))
    thought, text, _ = channels.push(ids[:-1] if ids and ids[-1] in ends else ids)
    more_thought, more_text = channels.finish()
    used = Usage(row.prompt_tokens, len(ids), thought_tokens=channels.thought_tokens)
    return Emission(text + more_text, tuple(ids), thought=thought + more_thought, finish_reason="cancelled", usage=used)
