"""The Live session of the Gemini protocol, for text: turns in one connection, interruption, resumption, going away.

One task reads the client's frames, another sends the model's turn. A turn that is interrupted stays in the history as
far as it came.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import re
import uuid
from typing import Any

from pydantic.alias_generators import to_camel
from starlette.websockets import WebSocket

from ...cache.interactions import Interaction
from ..effort import Effort
from .conversation import Conversation, check_model
from .errors import ApiError, bad_request, model_not_found, unsupported
from .gemini_contents import messages_of
from .gemini_options import answer_form, check_output, effort_of, sampling_params, tools_of
from .gemini_schemas import Content, GenerationConfig, Part, invalid, parse
from .live_events import LiveWriter
from .live_schemas import ClientContent, ClientFrame, RealtimeInput, Setup, ToolResponse
from .run import Plan, Run
from .service import Loaded, Service
from .sockets import Sessions, Socket, frame
from .stored import find, record, thinking_of, turn_of
from .stored import tools_of as stored_tools
from .tool_calls import Tools
from .turns import Turn, conversation_of

API = "live"
PATH = re.compile(
    r"google\.ai\.generativelanguage\.v1(?:beta|alpha)?\.GenerativeService\.BidiGenerateContent(Constrained)?"
)
RESUMABLE = 24 * 3600.0
"""Seconds for which a session can be resumed."""

_UNSUPPORTED = {
    "context_window_compression": "the context is not compressed; leave it out",
    "input_audio_transcription": "only text is supported; leave it out",
    "output_audio_transcription": "only text is supported; leave it out",
    "proactivity": "it is not supported; leave it out",
    "explicit_vad_signal": "only text is supported; leave it out",
    "avatar_config": "only text is supported; leave it out",
}


_HANDLINGS = ("ACTIVITY_HANDLING_UNSPECIFIED", "START_OF_ACTIVITY_INTERRUPTS", "NO_INTERRUPTION")
_COVERAGES = ("TURN_COVERAGE_UNSPECIFIED", "TURN_INCLUDES_ONLY_ACTIVITY", "TURN_INCLUDES_ALL_INPUT")
"""All text is activity, so that these are the same."""


async def live(websocket: WebSocket, sessions: Sessions, service: Service) -> None:
    def leave(left: str) -> bytes:
        return frame({"goAway": {"timeLeft": left}})

    async with sessions.session(websocket, leave) as socket:
        first = parse(ClientFrame, await socket.receive(service.config.body_timeout))
        if first.setup is None:
            raise bad_request("the first frame must hold 'setup'", "setup", "missing_field")
        session = await service.offload(lambda: LiveSession(socket, service, first.setup or Setup()))
        await session.resume()
        await socket.send(frame({"setupComplete": {"sessionId": uuid.uuid4().hex}}))
        try:
            while True:
                await session.take(parse(ClientFrame, await socket.receive()))
        finally:
            await session.end()


class LiveSession:
    """One session after its setup. Raises an `ApiError` for a setup that cannot be."""

    def __init__(self, socket: Socket, service: Service, setup: Setup) -> None:
        self._socket, self._service, self._setup = socket, service, setup
        self._loaded = loaded = service.loaded
        _check_setup(setup, loaded)
        config = setup.generation_config or GenerationConfig()
        where = "setup.generationConfig"
        check_output(config, where)
        if config.candidate_count not in (None, 1) or config.response_logprobs:
            raise unsupported(where, f"'{where}': one candidate without log-probabilities is supported")
        self._tools: Tools | None = tools_of(setup.tools, None, loaded, "setup.")
        params = sampling_params(config, service, loaded, where)
        self._params = dataclasses.replace(params, grammar=answer_form(config, self._tools, where))
        thinking = config.thinking_config
        self._effort: Effort = effort_of(thinking, service.config.level, f"{where}.thinkingConfig")
        self._show_thoughts = thinking is not None and bool(thinking.include_thoughts)
        self._system = _system_text(setup)
        self._resumable = setup.session_resumption is not None
        realtime = setup.realtime_input_config
        self._patient = realtime is not None and realtime.activity_handling == "NO_INTERRUPTION"
        history = setup.history_config
        self._history_first = history is not None and bool(history.initial_history_in_client_content)
        self._contents: list[Content] = []  # of the user's turn so far, after what is history
        self._active = False  # between the marks of an activity
        self._turn: Turn | None = None
        self._waiting: dict[str, str] = {}  # calls without a result: functions by id
        self._results: list[dict[str, Any]] = []
        self._run: Run | None = None
        self._speaking: asyncio.Task[None] | None = None

    async def resume(self) -> None:
        """Go on with the session that the setup names, if it does."""
        resumption = self._setup.session_resumption
        if resumption is None or not resumption.handle:
            return
        id = _read_handle(resumption.handle)
        stored = await find(self._service, self._socket.tenant, id, API, revive)
        if stored is None:
            raise ApiError(404, "'setup.sessionResumption.handle': there is no such session, or it has expired")
        self._turn = turn_of(stored, self._service.conversations, self._socket.tenant)
        calls = stored.output["messages"][-1].get("tool_calls", ())
        self._waiting = {call["id"]: call["function"]["name"] for call in calls}

    # ---- what the client says

    async def take(self, given: ClientFrame) -> None:
        kinds = [name for name in ClientFrame.model_fields if getattr(given, name) is not None]
        if len(kinds) != 1 or given.setup is not None:
            raise bad_request("a frame holds one of clientContent, realtimeInput and toolResponse", None)
        if given.client_content is not None:
            await self._take_content(given.client_content)
        elif given.realtime_input is not None:
            await self._take_realtime(given.realtime_input)
        elif given.tool_response is not None:
            await self._take_results(given.tool_response)

    async def _take_content(self, given: ClientContent) -> None:
        await self._interrupt()
        self._contents += given.turns or []
        if given.turn_complete and self._history_first:
            self._history_first = False
        elif given.turn_complete and self._contents:
            await self._answer_contents()

    async def _take_realtime(self, given: RealtimeInput) -> None:
        for name in ("audio", "video", "media_chunks"):
            if getattr(given, name) is not None:
                raise unsupported(f"realtimeInput.{name}", f"'realtimeInput.{name}' is not supported; supported: text")
        if self._history_first:
            message = "'realtimeInput': the initial history comes first, as clientContent that ends with turnComplete"
            raise bad_request(message, "realtimeInput", "failed_precondition")
        if given.activity_start is not None:
            await self._make_way()
            self._active = True
        if given.text:
            await self._make_way()
            self._contents.append(Content(role="user", parts=[Part(text=given.text)]))
        if given.activity_end is not None:
            self._active = False
        if self._contents and not self._active and (given.text or given.activity_end is not None):
            await self._answer_contents()

    async def _take_results(self, given: ToolResponse) -> None:
        for i, result in enumerate(given.function_responses or ()):
            where = f"toolResponse.functionResponses[{i}]"
            if result.id not in self._waiting:
                raise invalid(f"{where}.id", f"no call waits under the id {str(result.id)[:60]!r}")
            name = self._waiting.pop(result.id)
            content = frame(result.response or {}).decode()
            self._results.append({"role": "tool", "name": name, "content": content, "tool_call_id": result.id})
        if self._results and not self._waiting:
            results, self._results = self._results, []
            await self._answer(results)

    # ---- turns of the model

    async def _answer_contents(self) -> None:
        contents, self._contents = self._contents, []
        await self._answer(messages_of(contents, None, where="clientContent.turns"))

    async def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Let the model have its turn."""
        await self._finish_speaking()
        tools, turn = self._tools, self._turn
        names = dict(turn.names) if turn is not None else {}
        conversation = conversation_of(
            self._loaded,
            turn,
            messages,
            self._system,
            None if tools is None else tools.descriptions,
            field="clientContent.turns",
            thinking_field="setup.generationConfig.thinkingConfig",
        )
        plan = self._plan(conversation, turn, messages, names)
        self._run = run = await self._service.runs.start(plan, self._socket.tenant)
        self._speaking = asyncio.create_task(self._speak(run, messages, names))

    def _plan(
        self, conversation: Conversation, turn: Turn | None, messages: list[dict[str, Any]], names: dict[str, str]
    ) -> Plan:
        id = f"live_{uuid.uuid4().hex}"
        handle = _handle(id) if self._resumable else None
        tools, loaded, shown = self._tools, self._loaded, self._show_thoughts
        return Plan(
            api=API,
            id=id,
            model=loaded.name,
            prepare=lambda: conversation.prepare(loaded, self._params, self._effort),
            writer=lambda prepared: LiveWriter(id, show_thoughts=shown, tools=tools, handle=handle),
            request=lambda prepared: record(
                API, prepared, turn=turn, messages=messages, system=self._system, tools=tools, names=names, shown=shown
            ),
            parent=turn.id if turn is not None and self._resumable else None,
            stored=self._resumable,
            background=True,
            ttl=RESUMABLE,
            param="clientContent.turns",
        )

    async def _speak(self, run: Run, messages: list[dict[str, Any]], names: dict[str, str]) -> None:
        """Send the turn of a run as it comes."""
        reader = run.reader()
        try:
            while (frames := await reader.take(None)) is not None:
                if run.ended:
                    self._said(run, messages, names)
                for one in frames:
                    await self._socket.send(one)
            if run.error is not None:
                await self._socket.close(1011, run.error.message)
        finally:
            reader.close()

    def _said(self, run: Run, messages: list[dict[str, Any]], names: dict[str, str]) -> None:
        """The turn is over, and is what the next one goes on from."""
        writer, before = run.writer, self._turn
        assert isinstance(writer, LiveWriter)
        answer, called = writer.told()
        earlier = before.messages if before is not None else None
        self._turn = Turn(
            run.id,
            [*map(int, run.prepared.prompt), *run.tokens],
            self._system,
            None if self._tools is None else self._tools.descriptions,
            {**names, **called},
            lambda: [*(earlier() if earlier is not None else ()), *messages, *answer],
            before.number + 1 if before is not None else 0,
        )
        self._waiting = {call["id"]: call["name"] for call in writer.calls}

    async def _make_way(self) -> None:
        """Something is said while the model may have its turn."""
        if self._patient:
            await self._finish_speaking()
        else:
            await self._interrupt()

    async def _interrupt(self) -> None:
        """End the model's turn, also one that waits for results."""
        if self._run is not None:
            self._run.stop("cancelled")
        await self._finish_speaking()
        if self._waiting:
            ids, self._waiting, self._results = list(self._waiting), {}, []
            await self._socket.send(frame({"toolCallCancellation": {"ids": ids}}))

    async def _finish_speaking(self) -> None:
        if self._speaking is not None:
            await self._speaking
            self._speaking = None

    async def end(self) -> None:
        """The session is over."""
        if self._run is not None:
            self._run.stop("incomplete")
            await self._run.done()
        if self._speaking is not None:
            self._speaking.cancel()
            await asyncio.gather(self._speaking, return_exceptions=True)


def revive(loaded: Loaded, row: Interaction) -> LiveWriter:
    """A writer for a stored turn."""
    tools, handle = stored_tools(loaded, row), _handle(row.id)
    return LiveWriter(row.id, show_thoughts=thinking_of(row) is not None, tools=tools, handle=handle)


def _check_setup(setup: Setup, loaded: Loaded) -> None:
    for name, message in _UNSUPPORTED.items():
        if getattr(setup, name) not in (None, {}, False):
            raise unsupported(f"setup.{name}", f"'setup.{name}': {message}")
    if not setup.model:
        raise bad_request("Missing required field: 'setup.model'", "setup.model", "missing_field")
    if setup.model.removeprefix("models/") not in (loaded.name, loaded.model.name):
        raise model_not_found(setup.model[:100], loaded.name)
    check_model(loaded)
    resumption, realtime = setup.session_resumption, setup.realtime_input_config
    if resumption is not None and resumption.transparent:
        raise unsupported(
            "setup.sessionResumption.transparent", "'setup.sessionResumption.transparent': supported: false"
        )
    for name, supported in (("activity_handling", _HANDLINGS), ("turn_coverage", _COVERAGES)):
        value = getattr(realtime, name, None)
        if value is not None and value not in supported:
            where = f"setup.realtimeInputConfig.{to_camel(name)}"
            raise unsupported(where, f"'{where}': {value[:60]!r} is not supported; supported: {', '.join(supported)}")


def _system_text(setup: Setup) -> str:
    if setup.system_instruction is None:
        return ""
    messages = messages_of([Content(parts=[Part(text="-")])], setup.system_instruction, where="contents")
    return messages[0]["content"] if messages[0]["role"] == "system" else ""


def _handle(id: str) -> str:
    return base64.urlsafe_b64encode(id.encode()).decode().rstrip("=")


def _read_handle(handle: str) -> str:
    try:
        return base64.urlsafe_b64decode(handle.encode() + b"=" * (-len(handle) % 4)).decode()
    except ValueError:
        raise invalid("setup.sessionResumption.handle", "this server has given out no such handle") from None
