"""Bodies of the Interactions API. Names are in snake_case; what is refused is named so."""

from __future__ import annotations

from typing import Any, TypeVar

from .errors import ApiError
from .gemini_schemas import Anything, Array, Int, Message, SafetySetting
from .gemini_schemas import parse as parse_message


class InteractionConfig(Message):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop_sequences: Array[str] | None = None
    max_output_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    thinking_level: str | None = None
    thinking_budget: Int | None = None
    thinking_summaries: str | None = None
    tool_choice: str | Anything | None = None
    speech_config: Any = None
    image_config: Any = None
    video_config: Any = None


class InteractionBody(Message):
    """Body of a new interaction. `input`: a text, contents, or steps."""

    model: str | None = None
    input: str | list[Any] | dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_interaction_id: str | None = None
    system_instruction: str | None = None
    generation_config: InteractionConfig | None = None
    tools: Array[Anything] | None = None
    response_format: Any = None
    response_mime_type: str | None = None
    response_modalities: Array[str] | None = None
    cached_content: str | None = None
    labels: Anything | None = None
    service_tier: str | None = None
    safety_settings: Array[SafetySetting] | None = None
    continuation_token: str | None = None
    agent: Any = None
    agent_config: Any = None
    webhook_config: Any = None
    environment: Any = None


M = TypeVar("M", bound=Message)


def parse(schema: type[M], data: dict[str, Any]) -> M:
    """`data` as `schema`; an `ApiError` that names the field if it does not fit."""
    try:
        return parse_message(schema, data)
    except ApiError as error:
        raise in_snake_case(error) from None


def in_snake_case(error: ApiError) -> ApiError:
    """A refusal in the words of the Gemini protocol with the names of this one."""
    if error.param is None:
        return error
    param = "".join(f"_{c.lower()}" if c.isupper() else c for c in error.param)
    message = error.message.replace(error.param, param)
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers)
