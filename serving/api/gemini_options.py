"""Options of Gemini requests: what they mean to the engine, and which are refused with what is supported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.alias_generators import to_camel

from ..effort import Effort, ask
from ..engine.grammar import Grammar
from ..engine.request import MAX_TOP_LOGPROBS, SamplingParams
from .answer_form import answer_grammar
from .body import json_type
from .errors import from_value_error, unsupported
from .gemini_schemas import (
    FunctionDeclaration,
    GenerateBody,
    GenerationConfig,
    ThinkingConfig,
    Tool,
    ToolConfig,
    invalid,
)
from .json_schema import schema_grammar
from .openai_options import TINY_TOP_P
from .schema_dialect import json_schema
from .schemas import MAX_TEMPERATURE
from .service import Loaded, Service
from .tool_calls import Mode, Tools, tool_format

DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 0.95
DEFAULT_TOP_K = 64

_CONFIG = "generationConfig"

_UNSUPPORTED: dict[str, str] = {
    # field of generationConfig: what is supported
    "image_config": "images are not supported; supported: text",
    "speech_config": "speech is not supported; supported: text",
    "audio_timestamp": "audio is not supported; supported: text",
    "audio_transcription_config": "audio is not supported; supported: text",
    "translation_config": "translation is not supported; leave it out",
    "enable_affective_dialog": "it is not supported; leave it out",
    "enable_enhanced_civic_answers": "it is not supported; leave it out",
    "model_selection_config": "the model is chosen by the path; leave it out",
    "routing_config": "the model is chosen by the path; leave it out",
}

_OTHER_TOOLS = (
    "google_search",
    "google_search_retrieval",
    "google_maps",
    "code_execution",
    "computer_use",
    "enterprise_web_search",
    "exa_ai_search",
    "file_search",
    "mcp_servers",
    "parallel_ai_search",
    "retrieval",
    "url_context",
)


def check_body(body: GenerateBody, where: str = "") -> None:
    """Refuse fields beside the contents and the configuration that cannot be honoured. Safety settings, labels and
    the service tier change nothing in an answer and are accepted."""
    if body.cached_content is not None:
        name = f"{where}cachedContent"
        for field in ("system_instruction", "tools", "tool_config"):
            if getattr(body, field) is not None:
                raise invalid(f"{where}{to_camel(field)}", f"it cannot be given with {name}: it belongs to the content")
    if body.continuation_token is not None:
        name = f"{where}continuationToken"
        raise unsupported(name, f"'{name}': this server has given out no such token; leave it out")


def check_output(config: GenerationConfig, where: str = _CONFIG) -> None:
    """Refuse outputs other than text."""
    for field, message in _UNSUPPORTED.items():
        if getattr(config, field) not in (None, False, {}):
            name = f"{where}.{to_camel(field)}"
            raise unsupported(name, f"'{name}': {message}")
    if any(kind.upper() != "TEXT" for kind in config.response_modalities or ()):
        name = f"{where}.responseModalities"
        raise unsupported(name, f"'{name}': only text is supported; supported: TEXT")


def answer_form(config: GenerationConfig, tools: Tools | None, where: str = _CONFIG) -> Grammar | None:
    """The form that the answer must have: that of its text, of its calls, or of either; None for any."""
    return answer_grammar(tools, structured_output(config, where))


def structured_output(config: GenerationConfig, where: str = _CONFIG) -> Grammar | None:
    """The form that the text of the answer must have."""
    kind = config.response_mime_type or ""
    if kind not in ("", "text/plain", "application/json", "text/x.enum"):
        supported = "text/plain, application/json, text/x.enum"
        raise invalid(f"{where}.responseMimeType", f"got {kind[:40]!r}; supported: {supported}")
    fields = ("response_schema", "response_json_schema", "response_format")
    given = [name for name in fields if getattr(config, name) is not None]
    if len(given) > 1:
        raise invalid(f"{where}.{to_camel(given[1])}", f"it cannot be given together with {to_camel(given[0])}")
    if given == ["response_format"]:
        return response_format(config.response_format, f"{where}.responseFormat")
    field = f"{where}.{to_camel(given[0])}" if given else f"{where}.responseMimeType"
    if given and kind == "text/plain":
        raise invalid(f"{where}.responseMimeType", "a schema needs application/json or text/x.enum")
    schema = getattr(config, given[0]) if given else None
    if given == ["response_schema"]:
        schema = json_schema(schema, field)
    if kind == "text/x.enum":
        return _one_of(schema, field)
    if schema is not None:
        return schema_grammar(schema, field)
    return Grammar.json_schema({"type": ["object", "array"]}).named(field) if kind == "application/json" else None


def _one_of(schema: Any, where: str) -> Grammar:
    """A bare string out of the schema's."""
    texts = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise invalid(where, "text/x.enum needs a schema of type STRING with an enum of texts")
    return Grammar.choice(texts).named(where)


def response_format(value: Any, where: str) -> Grammar | None:
    """The newer form: `{"type": "text", "mime_type": "application/json", "schema": {...}}`, a list of one such, or the
    bare JSON Schema."""
    if isinstance(value, list):
        if len(value) > 1:
            raise unsupported(where, f"'{where}': several forms are not supported; supported: one, of the type text")
        value = value[0] if value else {"type": "text"}
    if not isinstance(value, dict):
        raise invalid(where, f"expected an object, got {json_type(value)}")
    if value.get("type") != "text":
        if value.get("type") in ("image", "audio", "video"):
            raise unsupported(f"{where}.type", f"'{where}.type': only text is supported; supported: text")
        return schema_grammar(value, where)
    kind = value.get("mime_type", value.get("mimeType"))
    if kind not in (None, "text/plain", "application/json"):
        raise invalid(f"{where}.mimeType", "supported: text/plain, application/json")
    schema = value.get("schema")
    if kind == "application/json" or schema is not None:
        return schema_grammar({"type": ["object", "array"]} if schema is None else schema, f"{where}.schema")
    return None


_LEVELS = ("minimal", "low", "medium", "high", "xhigh")


def effort_of(config: ThinkingConfig | None, default_level: str, where: str = f"{_CONFIG}.thinkingConfig") -> Effort:
    """The level and the thinking budget that a request asks for; a budget goes before that of its level."""
    if config is None:
        return ask(default_level)
    level = config.thinking_level.lower() if config.thinking_level is not None else None
    if level == "thinking_level_unspecified":
        level = None
    if level is not None and level not in _LEVELS:
        supported = ", ".join(name.upper() for name in _LEVELS)
        raise invalid(f"{where}.thinkingLevel", f"got {str(config.thinking_level)[:40]!r}; supported: {supported}")
    try:
        return ask(default_level, effort=level, budget=config.thinking_budget)
    except ValueError as error:
        raise invalid(f"{where}.thinkingBudget", str(error)) from None


def sampling_params(config: GenerationConfig, service: Service, loaded: Loaded, where: str = _CONFIG) -> SamplingParams:
    """The options as the engine wants them."""
    _between(f"{where}.temperature", config.temperature, 0, MAX_TEMPERATURE)
    _between(f"{where}.topP", config.top_p, 0, 1)
    _between(f"{where}.presencePenalty", config.presence_penalty, -2, 2)
    _between(f"{where}.frequencyPenalty", config.frequency_penalty, -2, 2)
    _at_least(f"{where}.topK", config.top_k, 0)
    _at_least(f"{where}.maxOutputTokens", config.max_output_tokens, 1)
    if config.seed is not None and not -(2**63) <= config.seed < 2**64:
        raise invalid(f"{where}.seed", "expected 64 bits")
    limit = config.max_output_tokens
    try:
        return SamplingParams(
            temperature=DEFAULT_TEMPERATURE if config.temperature is None else config.temperature,
            top_p=DEFAULT_TOP_P if config.top_p is None else config.top_p or TINY_TOP_P,
            top_k=min(DEFAULT_TOP_K if config.top_k is None else config.top_k, loaded.vocab_size),
            presence_penalty=config.presence_penalty or 0.0,
            frequency_penalty=config.frequency_penalty or 0.0,
            seed=config.seed,
            max_tokens=None if limit is None else min(limit, loaded.engine.context_length),
            stop=_stops(config.stop_sequences or (), service.config.max_stop, where),
            logprobs=_logprobs(config, where),
        )
    except ValueError as error:
        raise from_value_error(error) from None


def candidates_of(config: GenerationConfig, service: Service, loaded: Loaded, where: str = _CONFIG) -> int:
    count = 1 if config.candidate_count is None else config.candidate_count
    most = loaded.max_choices(service.config)
    if not 1 <= count <= most:
        raise invalid(f"{where}.candidateCount", f"expected a number from 1 to {most}")
    return count


def _between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(name, f"expected a number from {low:g} to {high:g}, got {value:g}")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise invalid(name, f"expected an integer of at least {low}")


def _stops(texts: Sequence[str], most: int, where: str) -> tuple[str, ...]:
    name = f"{where}.stopSequences"
    if len(texts) > most:
        raise invalid(name, f"at most {most} sequences are supported, got {len(texts)}")
    for i, text in enumerate(texts):
        if not text:
            raise invalid(f"{name}[{i}]", "a stop sequence must not be empty")
    return tuple(texts)


def _logprobs(config: GenerationConfig, where: str) -> int | None:
    """The engine's `logprobs`: None for no, else the number of alternatives."""
    name, count = f"{where}.logprobs", config.logprobs
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise invalid(name, f"expected a number from 0 to {MAX_TOP_LOGPROBS}")
    if not config.response_logprobs:
        if count:
            raise invalid(name, "it needs responseLogprobs to be true")
        return None
    return count or 0


def tools_of(tools: Sequence[Tool] | None, config: ToolConfig | None, loaded: Loaded, where: str = "") -> Tools | None:
    """The tools of a request; None if there are none or the model must not call any."""
    declared = _declarations(tools or (), where)
    mode = _calling_mode(config, bool(declared), where)
    if not declared or mode is None:
        return None
    calling = config.function_calling_config if config is not None else None
    allowed = frozenset(calling.allowed_function_names or ()) if calling is not None else frozenset()
    unknown = sorted(allowed - {one["function"]["name"] for one in declared})
    if unknown:
        name = f"{where}toolConfig.functionCallingConfig.allowedFunctionNames"
        raise invalid(name, f"no function {unknown[0][:60]!r} is declared")
    return Tools(tool_format(loaded.model.chat_template), declared, mode=mode, allowed=allowed or None)


def _declarations(tools: Sequence[Tool], where: str) -> list[dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        for kind in _OTHER_TOOLS:
            if getattr(tool, kind) is not None:
                name = f"{where}tools[{i}].{to_camel(kind)}"
                raise unsupported(name, f"'{name}' is not supported; supported: functionDeclarations")
        for j, declaration in enumerate(tool.function_declarations or ()):
            name = f"{where}tools[{i}].functionDeclarations[{j}]"
            if declaration.name in out:
                raise invalid(f"{name}.name", f"the function {declaration.name[:60]!r} is declared twice")
            out[declaration.name] = _description(declaration, name)
    return list(out.values())


_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")
_MAX_NAME = 128


def _description(declaration: FunctionDeclaration, where: str) -> dict[str, Any]:
    name = declaration.name
    if (
        not name
        or len(name) > _MAX_NAME
        or not _NAME_CHARACTERS.issuperset(name)
        or not (name[0].isalpha() or name[0] == "_")
    ):
        raise invalid(
            f"{where}.name",
            f"expected a letter or '_', then letters, digits and '_.:-', at most {_MAX_NAME} in all; got {name[:60]!r}",
        )
    if declaration.behavior not in (None, "UNSPECIFIED", "BLOCKING"):
        raise unsupported(f"{where}.behavior", f"'{where}.behavior' is not supported; supported: BLOCKING")
    if declaration.parameters is not None and declaration.parameters_json_schema is not None:
        raise invalid(where, "only one of parameters and parametersJsonSchema can be set")
    parameters: Any = declaration.parameters_json_schema
    if declaration.parameters is not None:
        parameters = json_schema(declaration.parameters, f"{where}.parameters")
    elif parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.parametersJsonSchema", "expected a schema (an object)")
    function = {
        "name": name,
        "description": declaration.description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


_MODES: dict[str, Mode | None] = {
    "MODE_UNSPECIFIED": "auto",
    "AUTO": "auto",
    "ANY": "required",
    "VALIDATED": "validated",
    "NONE": None,
}


def _calling_mode(config: ToolConfig | None, declared: bool, where: str) -> Mode | None:
    """None for no calls."""
    calling = config.function_calling_config if config is not None else None
    place = f"{where}toolConfig.functionCallingConfig"
    mode = (calling.mode or "AUTO").upper() if calling is not None else "AUTO"
    if mode not in _MODES:
        raise invalid(f"{place}.mode", f"got {mode[:40]!r}; supported: AUTO, ANY, VALIDATED, NONE")
    if calling is not None and calling.allowed_function_names and mode not in ("ANY", "VALIDATED"):
        raise invalid(f"{place}.allowedFunctionNames", "it needs the mode ANY or VALIDATED")
    if calling is not None and calling.stream_function_call_arguments:
        name = f"{place}.streamFunctionCallArguments"
        raise unsupported(name, f"'{name}' is not supported; supported: whole calls")
    if mode in ("ANY", "VALIDATED") and not declared:
        raise invalid(f"{place}.mode", f"the mode {mode} needs functionDeclarations")
    return _MODES[mode]
