"""Bodies of the Gemini protocol: their types, and what a body that does not fit is told.

They follow the JSON form of protocol buffers, as the protocol does: every field may be spelled in camelCase or in
snake_case, `null` is a field that is not there, one object stands for a list of one, a whole number may be written with
a decimal point, and a field that does not exist is an error. Keys inside a caller's own data (arguments, results,
schemas, labels) are data and stay as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from .body import json_type
from .errors import ApiError, bad_request


class Message(BaseModel):
    """A message of the protocol. Field names are snake_case here and camelCase in errors and descriptions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, alias_generator=to_camel, populate_by_name=True
    )
    spellings: ClassVar[dict[str, str]] = {}
    """Every accepted spelling of every field."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.spellings = {spelling: name for name in cls.model_fields for spelling in (name, to_camel(name))}

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields: dict[str, Any] = {}
        for key, value in data.items():
            name = cls.spellings.get(key)
            if name is None:
                raise PydanticCustomError("unknown_field", "{name}", {"name": str(key)[:60]})
            if value is None:
                continue
            if name in fields:
                raise PydanticCustomError("field_twice", "{name}", {"name": to_camel(name)})
            fields[name] = value
        return fields


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


T = TypeVar("T")
Int = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int | float)]
Array = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check ends at the first element that does not fit: a body may hold millions."""
Messages = Annotated[Array[T], BeforeValidator(_listed)]
Anything = dict[str, Any]
"""The caller's own data, or a message of something that is not supported: its content is not looked at."""


class FunctionCall(Message):
    id: str | None = None
    name: str | None = None
    args: Anything | None = None
    partial_args: list[Any] | None = None
    will_continue: bool | None = None


class FunctionResponse(Message):
    id: str | None = None
    name: str | None = None
    response: Anything | None = None
    parts: list[Any] | None = None
    scheduling: str | None = None
    will_continue: bool | None = None


class Part(Message):
    """Piece of a turn: exactly one kind of data, and notes on it."""

    text: str | None = None
    inline_data: Anything | None = None
    file_data: Anything | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: Anything | None = None
    code_execution_result: Anything | None = None
    tool_call: Anything | None = None
    tool_response: Anything | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    part_metadata: Anything | None = None
    video_metadata: Anything | None = None
    audio_metadata: Anything | None = None
    speech_metadata: Anything | None = None
    document_metadata: Anything | None = None
    spreadsheet_metadata: Anything | None = None
    audio_transcription: Anything | None = None
    media_resolution: Any = None
    media_processing: Any = None


class Content(Message):
    """One turn, or a piece of one. No role: the user's."""

    role: str | None = None
    parts: Messages[Part] | None = None


class FunctionDeclaration(Message):
    name: str
    description: str | None = None
    parameters: Anything | None = None
    parameters_json_schema: Any = None
    response: Anything | None = None
    response_json_schema: Any = None
    behavior: str | None = None


class Tool(Message):
    function_declarations: Messages[FunctionDeclaration] | None = None
    google_search: Any = None
    google_search_retrieval: Any = None
    google_maps: Any = None
    code_execution: Any = None
    computer_use: Any = None
    enterprise_web_search: Any = None
    exa_ai_search: Any = None
    file_search: Any = None
    mcp_servers: Any = None
    parallel_ai_search: Any = None
    retrieval: Any = None
    url_context: Any = None


class FunctionCallingConfig(Message):
    mode: str | None = None
    allowed_function_names: Array[str] | None = None
    stream_function_call_arguments: bool | None = None


class ToolConfig(Message):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Anything | None = None
    include_server_side_tool_invocations: bool | None = None


class SafetySetting(Message):
    category: str | None = None
    threshold: str | None = None
    method: str | None = None


class ThinkingConfig(Message):
    include_thoughts: bool | None = None
    thinking_budget: Int | None = None
    thinking_level: str | None = None


class GenerationConfig(Message):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    candidate_count: Int | None = None
    max_output_tokens: Int | None = None
    stop_sequences: Array[str] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = None
    logprobs: Int | None = None
    thinking_config: ThinkingConfig | None = None
    response_mime_type: str | None = None
    response_schema: Anything | None = None
    response_json_schema: Any = None
    response_format: Any = None
    response_modalities: Array[str] | None = None
    media_resolution: Any = None
    audio_timestamp: bool | None = None
    audio_transcription_config: Any = None
    enable_affective_dialog: bool | None = None
    enable_enhanced_civic_answers: bool | None = None
    image_config: Any = None
    model_selection_config: Any = None
    routing_config: Any = None
    speech_config: Any = None
    translation_config: Any = None


class GenerateBody(Message):
    """Body of `generateContent` and `streamGenerateContent`."""

    contents: Messages[Content] | None = None
    model: str | None = None
    system_instruction: Content | None = None
    tools: Messages[Tool] | None = None
    tool_config: ToolConfig | None = None
    safety_settings: Messages[SafetySetting] | None = None
    cached_content: str | None = None
    generation_config: GenerationConfig | None = None
    labels: Anything | None = None
    service_tier: str | None = None
    store: bool | None = None
    continuation_token: str | None = None
    priority: str | None = None
    context_policy: str | None = None
    client_features: str | list[str] | None = None
    """Our own, as their headers are (serving/api/wishes.py)."""


class CachedBody(Message):
    """Body of a new cached content: the beginning of a prompt."""

    model: str | None = None
    contents: Messages[Content] | None = None
    system_instruction: Content | None = None
    tools: Messages[Tool] | None = None
    tool_config: ToolConfig | None = None
    display_name: str | None = None
    ttl: str | None = None
    expire_time: str | None = None


class ExpiryBody(Message):
    """Body of a change of a cached content. The name may be repeated."""

    ttl: str | None = None
    expire_time: str | None = None
    name: str | None = None


class CountBody(Message):
    """Body of `countTokens`: the contents, with the rest of a request beside them or around them."""

    contents: Messages[Content] | None = None
    generate_content_request: GenerateBody | None = None
    model: str | None = None
    system_instruction: Content | None = None
    tools: Messages[Tool] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None


BESIDE = ("contents", "system_instruction", "tools", "tool_config", "generation_config")
"""What may stand beside the contents to be counted."""

GenerationConfig.spellings["_responseJsonSchema"] = "response_json_schema"  # an older name of the protocol


M = TypeVar("M", bound=Message)


def parse(schema: type[M], data: dict[str, Any]) -> M:
    """`data` as `schema`; an `ApiError` that names the field if it does not fit."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from None
    except (OverflowError, RecursionError) as error:
        raise bad_request(f"The JSON body cannot be understood: {error}") from None


def invalid(field: str, message: str) -> ApiError:
    """A refusal of the value of `field`; the message says what is wrong with it."""
    return bad_request(f"Invalid value at '{field}': {message}", field, "invalid_value")


_EXPECTED = {
    "string_type": "a string",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


def _explain(error: ValidationError) -> ApiError:
    """The first of pydantic's findings in the protocol's words."""
    item = error.errors(include_url=False)[0]
    where, kind = dotted(item["loc"]), item["type"]
    if kind == "unknown_field":
        place = f" at '{where}'" if where else ""
        name = item["ctx"]["name"]
        message = f'Invalid JSON payload received. Unknown name "{name}"{place}: Cannot find field.'
        return bad_request(message, where or name, "unknown_field")
    if kind == "field_twice":
        return invalid(where, f"'{item['ctx']['name']}' is given in both of its spellings")
    if kind == "missing":
        return bad_request(f"Missing required field: '{where}'", where, "missing_field")
    if kind in _EXPECTED:
        return invalid(where, f"expected {_EXPECTED[kind]}, got {json_type(item['input'])}")
    if kind == "finite_number":
        return invalid(where, f"expected a finite number, got {item['input']}")
    return invalid(where, item["msg"])


def dotted(path: tuple[int | str, ...]) -> str:
    """`("system_instruction", "parts", 0)` as `systemInstruction.parts[0]`."""
    text = ""
    for part in path:
        name = part if isinstance(part, int) else to_camel(part)
        text += f"[{name}]" if isinstance(part, int) else f".{name}" if text else str(name)
    return text
