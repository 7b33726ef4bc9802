"""Bodies of the OpenAI protocol: their types, and what a body that does not fit is told.

Types are strict (no string becomes a number) and numbers finite. Unknown keys are kept: the protocol wants them
ignored, but `openai_options.py` refuses those that would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .body import json_type
from .errors import ApiError, bad_request


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


T = TypeVar("T")

Array = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check ends at the first element that does not fit: a body may hold millions."""


MAX_TEMPERATURE = 2.0
"""In all protocols; the engine takes more."""


class StreamOptions(_Body):
    include_usage: bool | None = None


class SamplingBody(_Body):
    """What both endpoints share. Keys that OpenAI does not have: top_k, min_p, repetition_penalty, stop_token_ids,
    ignore_eos, level, guided_json, guided_regex, guided_choice, guided_grammar."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | Array[str] | None = None
    stop_token_ids: Array[int] | None = None
    ignore_eos: bool | None = None
    level: str | None = None
    guided_json: dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Array[str] | None = None
    guided_grammar: str | None = None


class Part(_Body):
    """Piece of a message. Only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(_Body):
    """`tool_calls` of an assistant's message; `tool_call_id` of a tool's. `function_call`: the only call of a message,
    of the older kind, whose result has the role `function` and the function's name."""

    role: str
    content: str | Array[Part] | None = None
    name: str | None = None
    tool_calls: Array[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None


class ReasoningOptions(_Body):
    """`max_tokens`: a thinking budget."""

    effort: str | None = None
    max_tokens: int | None = None


class ThinkingOptions(_Body):
    """`type`: enabled, disabled or adaptive."""

    type: str
    budget_tokens: int | None = None


class Prediction(_Body):
    """What the answer may say, most of it probably: of `type` content."""

    type: str
    content: str | Array[Part]


class ChatBody(SamplingBody):
    """`thinking_budget`, our own: tokens of thought, 0 for none, -1 for as many as the request seems to need.
    `functions` and `function_call` are what `tools` and `tool_choice` were called before answers had several calls."""

    messages: Annotated[Array[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    thinking_budget: int | None = None
    tools: Array[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Array[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    prediction: Prediction | None = None


class CompletionBody(SamplingBody):
    """`prompt`: a string, a list of strings, a list of token ids, or a list of such lists."""

    prompt: str | Array[str] | Array[int] | Array[Array[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    parse_special: bool | None = None
    """Our own: names of special tokens in a text prompt become those tokens."""


class EmbeddingBody(_Body):
    """`input`: like `prompt` of completions. `dimensions`: the first so many."""

    model: str
    input: str | Array[str] | Array[int] | Array[Array[int]]
    encoding_format: str | None = None
    dimensions: int | None = None


M = TypeVar("M", bound=BaseModel)


def parse(schema: type[M], data: dict[str, Any]) -> M:
    """`data` as `schema`; an `ApiError` that names the parameter if it does not fit."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data) from None
    except (OverflowError, RecursionError) as error:
        raise bad_request(f"The JSON body cannot be understood: {error}") from None


_EXPECTED = {
    "string": "a string",
    "float": "a decimal",
    "int": "an integer",
    "bool": "a boolean",
    "list": "an array",
    "dict": "an object",
    "model": "an object",
}


def _explain(error: ValidationError, data: dict[str, Any]) -> ApiError:
    """One of pydantic's findings in OpenAI's words. Alternatives of a union are reported by the one that got
    furthest; those that got equally far are named together."""
    found = [(_path(item["loc"], data), item) for item in error.errors(include_url=False, include_context=False)]
    first = found[0][1]["loc"][0]
    depth, (path, item) = max(
        ((len(path), (path, item)) for path, item in found if item["loc"][0] == first), key=lambda pair: pair[0]
    )
    param = _dotted(path)
    if item["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    got = item["input"]
    if item["type"] == "too_short":
        message = f"Invalid '{param}': empty array. Expected an array with minimum length 1."
        return bad_request(message, param, "empty_array")
    if item["type"] == "finite_number":
        return bad_request(f"Invalid '{param}': expected a finite number, but got {got}.", param, "invalid_value")
    wanted = [_expected(i["type"]) for p, i in found if p == path and _expected(i["type"])]
    if wanted:
        names = " or ".join(dict.fromkeys(name for name in wanted if name))
        message = f"Invalid type for '{param}': expected {names}, but got {json_type(got)} instead."
        return bad_request(message, param, "invalid_type")
    return bad_request(f"Invalid '{param}': {item['msg']}.", param, "invalid_value")


def _expected(kind: str) -> str | None:
    if kind == "int_from_float":
        return "an integer"
    return _EXPECTED.get(kind.removesuffix("_type")) if kind.endswith("_type") else None


def _path(loc: tuple[int | str, ...], data: Any) -> list[int | str]:
    """`loc` without the names of union members that pydantic puts between keys."""
    path: list[int | str] = []
    value = data
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(value, list):
            path.append(part)
            value = value[part] if part < len(value) else None
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or i == len(loc) - 1):
            path.append(part)
            value = value.get(part)
    return path


def _dotted(path: list[int | str]) -> str:
    """`["messages", 0, "role"]` as `messages[0].role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
