"""Requests for new interactions: their bodies, checked, as plans of runs."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from ...cache.interactions import Interaction
from ..effort import Effort, Prepared
from ..engine.grammar import Grammar
from ..engine.request import SamplingParams
from .answer_form import answer_grammar
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
from .interaction_events import InteractionWriter, timestamp
from .interaction_input import messages_of, steps_of
from .interaction_schemas import InteractionBody, InteractionConfig, in_snake_case, parse
from .run import Plan
from .service import Loaded, Service
from .stored import find, record, thinking_of, turn_of
from .stored import tools_of as stored_tools
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


def parse_body(data: dict[str, Any], loaded: Loaded) -> InteractionBody:
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
        raise not_found(id, "previous_interaction_id")
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


def not_found(id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"Interaction '{id[:80]}' not found", param=param, code="not_found")
