"""The Interactions socket: turns of an interaction over one connection.

A client connects to an interaction, or creates one, and says something; every turn is stored as an interaction that
goes on from the one before. What the model says comes as the steps that a stream has.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.websockets import WebSocket

from .errors import ApiError, bad_request
from .interaction_errors import interaction_error
from .interaction_schemas import InteractionBody, parse
from .interactions import API, new_call, revive
from .run import Run
from .service import Service
from .sockets import Sessions, Socket, close_code, frame
from .stored import find
from .stream import event_data

_STEPS = ("step.start", "step.delta", "step.stop", "error")
_CLIENT = ("interaction.create", "interaction.connect", "input", "interaction.complete", "interaction.cancel",
           "interaction.disconnect")  # fmt: skip


async def interaction_socket(websocket: WebSocket, sessions: Sessions, service: Service) -> None:
    def leave(left: str) -> bytes | None:
        return None  # the protocol has no such event; the client connects again when it is closed

    async with sessions.session(websocket, leave) as socket:
        session = InteractionSession(socket, service)
        try:
            while not session.over:
                given = await socket.receive(service.config.body_timeout if session.id is None else None)
                events = given.get("events") if isinstance(given.get("events"), list) else [given]
                for event in events or ():
                    await session.take(event)
        except ApiError as error:
            await socket.send(frame({"event_type": "error", "error": interaction_error(error)}))
            await socket.close(close_code(error), error.message)
        finally:
            await session.end()


class InteractionSession:
    def __init__(self, socket: Socket, service: Service) -> None:
        self._socket, self._service = socket, service
        self.id: str | None = None
        """The interaction that is gone on with."""
        self.over = False
        self._body: dict[str, Any] = {}
        self._steps = 0
        self._run: Run | None = None
        self._speaking: asyncio.Task[None] | None = None
        self._resource: dict[str, Any] = {}

    async def take(self, event: Any) -> None:
        kind = event.get("event_type") if isinstance(event, dict) else None
        if kind not in _CLIENT:
            raise bad_request(f"got event_type {str(kind)[:40]!r}; supported: {', '.join(_CLIENT)}", "event_type")
        if kind in ("interaction.create", "interaction.connect"):
            if self.id is not None:
                raise bad_request("this socket has its interaction already", "event_type")
            await (self._create(event) if kind == "interaction.create" else self._connect(event))
            return
        if self.id is None:
            raise bad_request("the first event must be interaction.connect or interaction.create", "event_type")
        if kind == "input":
            await self._input(event)
        elif kind == "interaction.disconnect":
            self.over = True
        else:
            await self._end_interaction(kind)

    async def _create(self, event: dict[str, Any]) -> None:
        allowed = ("model", "previous_interaction_id", "store", "system_instruction", "tools", "generation_config")
        self._body = {name: event[name] for name in allowed if event.get(name) is not None}
        if unknown := sorted(event.keys() - {*allowed, "event_type"}):
            raise bad_request(f"Unknown name {unknown[0][:60]!r}: cannot find field", unknown[0][:60], "unknown_field")
        parse(InteractionBody, self._body)  # refused here, not when something is said
        self.id = self._body.pop("previous_interaction_id", None) or ""
        await self._socket.send(frame({"event_type": "interaction.created", "interaction_id": self.id}))

    async def _connect(self, event: dict[str, Any]) -> None:
        id = event.get("id")
        if not isinstance(id, str) or not id:
            raise bad_request("'id' is required", "id", "missing_field")
        tenant = self._socket.tenant
        run = self._service.runs.find(tenant, id, API)
        if run is not None and run.plan.stored and not run.ended:
            self._resource, request = run.resource, run.plan.request(run.prepared)
        else:
            run = None
            stored = await find(self._service, tenant, id, API, revive)
            if stored is None:
                raise ApiError(404, f"Interaction '{id[:80]}' not found", code="not_found")
            self._resource, request = stored.resource, stored.row.request
        self.id = id
        self._body = {"model": self._service.loaded.name}
        if request["system"]:
            self._body["system_instruction"] = request["system"]
        if request["tools"]:
            self._body["tools"] = [{"type": "function", **tool["function"]} for tool in request["tools"]]
        await self._socket.send(frame({"event_type": "interaction.connected", "interaction_id": id}))
        if run is not None:
            self._listen(run)

    async def _input(self, event: dict[str, Any]) -> None:
        content = event.get("content")
        await self._finish_speaking()
        body = parse(InteractionBody, {**self._body, "input": content if content is not None else []})
        body.previous_interaction_id = self.id or None
        body.stream = True
        call = await new_call(self._service, self._socket.tenant, body)
        run = await self._service.runs.start(call.plan(), self._socket.tenant)
        if call.stored:
            self.id = run.id
        self._listen(run)

    def _listen(self, run: Run) -> None:
        self._run, self._resource = run, run.resource
        self._speaking = asyncio.create_task(self._speak(run))

    async def _speak(self, run: Run) -> None:
        """Send the steps of a run as they come; they are numbered through the whole session."""
        reader, first = run.reader(), self._steps
        try:
            while (events := await reader.take(None)) is not None:
                for one in map(event_data, events):
                    if one["event_type"] not in _STEPS:
                        continue
                    if "index" in one:
                        one["index"] += first
                        self._steps = one["index"] + 1
                    if one["event_type"] == "step.start":
                        one["interaction_id"] = run.id
                    await self._socket.send(frame(one))
        finally:
            reader.close()

    async def _finish_speaking(self) -> None:
        if self._speaking is not None:
            await self._speaking
            self._speaking = None

    async def _end_interaction(self, kind: str) -> None:
        """Complete it, when all has been said, or cancel it at once."""
        if kind == "interaction.cancel" and self._run is not None:
            self._run.stop("cancelled")
            await self._run.done()
        await self._finish_speaking()
        told = {key: value for key, value in self._resource.items() if key != "steps"}
        usage = {"usage": told["usage"]} if "usage" in told else {}
        if kind == "interaction.cancel":
            event = {"event_type": "interaction.cancelled", "interaction_id": self.id, **usage}
        else:
            times: dict[str, Any] = {name: told[name] for name in ("created", "updated") if name in told}
            event = {"event_type": "interaction.completed", "interaction": told, **times, **usage}
        self.over = True
        await self._socket.send(frame(event))

    async def end(self) -> None:
        """The connection is over; what runs goes on by itself."""
        if self._speaking is not None:
            self._speaking.cancel()
            await asyncio.gather(self._speaking, return_exceptions=True)
