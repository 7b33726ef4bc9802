"""Options of OpenAI requests: what they mean to the engine, and which are refused.

An option works or is refused with what is supported. Keys that nobody knows are ignored, as the protocol wants, and
named in the reply's `x-umbra-ignored` header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..engine.grammar import Grammar
from ..engine.request import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, SamplingParams
from .body import json_type
from .errors import ApiError, bad_request, from_value_error, model_not_found, unsupported
from .schemas import MAX_TEMPERATURE, SamplingBody
from .service import Loaded, Service
from .wishes import FIELDS, from_body

TINY_TOP_P = 1e-6
"""Stands for OpenAI's top_p = 0, which means the most likely token alone."""

_EMPTY: tuple[Any, ...] = (None, [], {}, "", False)

_NO_THOUGHTS = "only conversations (/v1/chat/completions) have thoughts"

_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    # parameter: (values that change nothing, what is supported)
    "tools": (_EMPTY, "tool calling is not supported; supported: no tools"),
    "tool_choice": ((*_EMPTY, "none", "auto"), "tool calling is not supported; supported: 'none', 'auto'"),
    "functions": (_EMPTY, "function calling is not supported; supported: no functions"),
    "function_call": ((*_EMPTY, "none", "auto"), "function calling is not supported; supported: 'none', 'auto'"),
    "response_format": (_EMPTY, "here the form of the text stands in 'text.format'; leave it out"),
    "modalities": ((*_EMPTY, ["text"]), 'only text is supported; supported: ["text"]'),
    "audio": (_EMPTY, "audio is not supported; supported: text"),
    "prediction": (_EMPTY, "only chat completions have predicted outputs; leave it out"),
    "reasoning_effort": ((*_EMPTY, "none"), f"{_NO_THOUGHTS}; supported: 'none'"),
    "reasoning": (_EMPTY, f"{_NO_THOUGHTS}; leave it out"),
    "thinking": ((*_EMPTY, {"type": "disabled"}), f'{_NO_THOUGHTS}; supported: {{"type": "disabled"}}'),
    "thinking_budget": ((None, 0), f"{_NO_THOUGHTS}; supported: 0"),
    "verbosity": ((*_EMPTY, "medium"), "verbosity is not supported; supported: 'medium'"),
    "web_search_options": ((None,), "web search is not supported; leave it out"),
}

_HARMLESS = {
    "user",
    "metadata",
    "store",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "parallel_tool_calls",
}  # keys that do not change the answer


def check_options(body: SamplingBody, service: Service, loaded: Loaded) -> list[str]:
    """Refuse what cannot be honoured; the keys that are unknown and therefore ignored."""
    check_model_named(body.model, loaded)
    extra = body.model_extra or {}
    from_body(extra)
    for name, (harmless, message) in _UNSUPPORTED.items():
        if name in extra and not any(type(extra[name]) is type(v) and extra[name] == v for v in harmless):
            raise unsupported(name, f"Unsupported parameter: '{name}': {message}")
    if body.stream_options is not None and not body.stream:
        raise bad_request("The 'stream_options' parameter is only allowed when 'stream' is true.", "stream_options")
    n = choices_of(body)
    most = loaded.max_choices(service.config)
    if not 1 <= n <= most:
        raise out_of_range("n", 1, most, n)
    if len(stops(body)) > service.config.max_stop:
        message = f"Invalid 'stop': at most {service.config.max_stop} sequences are supported, got {len(stops(body))}."
        raise bad_request(message, "stop", "array_above_max_length")
    known = (*_UNSUPPORTED, *_HARMLESS, *FIELDS)
    return [name for name in extra if name not in known]


def check_model_named(name: str, loaded: Loaded) -> None:
    """The model of a body must be the one that is served."""
    if name not in (loaded.name, loaded.model.name):
        if not name:
            raise bad_request("you must provide a model parameter", "model", "missing_required_parameter")
        raise model_not_found(name[:100], loaded.name)


def check_logprobs(count: int | None, name: str) -> int | None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise out_of_range(name, 0, MAX_TOP_LOGPROBS, count)
    return count


def out_of_range(name: str, low: int, high: int, got: int) -> ApiError:
    side = "below minimum" if got < low else "above maximum"
    message = (
        f"Invalid '{name}': integer {side} value. Expected a value between {low} and {high}, but got {_short(got)}."
    )
    return bad_request(message, name, f"integer_{side.replace(' ', '_').removesuffix('imum')}_value")


def _short(number: int) -> str:
    """The number, or its size if it is too long to print."""
    return str(number) if number.bit_length() < 128 else f"an integer of {number.bit_length()} bits"


def choices_of(body: SamplingBody) -> int:
    return 1 if body.n is None else body.n


def stops(body: SamplingBody) -> tuple[str, ...]:
    return () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def sampling_params(
    body: SamplingBody,
    loaded: Loaded,
    *,
    max_tokens: int | None,
    max_name: str,
    logprobs: int | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The options as the engine wants them; OpenAI's defaults (temperature 1) where nothing is said."""
    if max_tokens is not None and max_tokens < 1:
        raise out_of_range(max_name, 1, loaded.engine.context_length, max_tokens)
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise bad_request(f"Invalid 'seed': expected 64 bits, but got {_short(body.seed)}.", "seed", "invalid_value")
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:  # the engine would take more
        message = f"Invalid 'temperature': decimal above maximum value. Expected a value <= {MAX_TEMPERATURE:g}."
        raise bad_request(message, "temperature", "decimal_above_max_value")
    vocab = loaded.vocab_size
    try:
        return SamplingParams(
            temperature=_or(body.temperature, 1.0),
            top_p=TINY_TOP_P if body.top_p == 0 else _or(body.top_p, 1.0),
            top_k=0 if body.top_k == -1 else min(_or(body.top_k, 0), vocab),
            min_p=_or(body.min_p, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            logit_bias=_logit_bias(body.logit_bias, vocab),
            seed=body.seed,
            max_tokens=None if max_tokens is None else min(max_tokens, loaded.engine.context_length),
            stop=stops(body),
            stop_token_ids=tuple(check_ids(body.stop_token_ids or (), vocab, "stop_token_ids")),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            grammar=grammar,
        )
    except ValueError as error:
        raise from_value_error(error) from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _logit_bias(bias: dict[str, Any] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    if bias is not None and len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            f"Invalid 'logit_bias': at most {MAX_LOGIT_BIAS} tokens are supported, got {len(bias)}.", "logit_bias"
        )
    for key, value in (bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab:
            message = f"Invalid key in 'logit_bias': {key[:40]!r}. Expected a token id from 0 to {vocab - 1}."
            raise bad_request(message, "logit_bias", "invalid_value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"Invalid type for 'logit_bias.{key}': expected a decimal, but got {json_type(value)} instead."
            raise bad_request(message, f"logit_bias.{key}", "invalid_type")
        if not -100 <= value <= 100:  # also refuses NaN, and integers too large for a float
            message = f"Invalid 'logit_bias.{key}': expected a decimal from -100 to 100."
            raise bad_request(message, "logit_bias", "invalid_value")
        pairs.append((int(key), float(value)))
    return tuple(pairs)


def check_ids(ids: Sequence[int], vocab: int, param: str) -> Sequence[int]:
    """`ids` if all of them are tokens of the vocabulary."""
    for i, token in enumerate(ids):
        if not 0 <= token < vocab:
            message = f"Invalid '{param}[{i}]': expected a token id from 0 to {vocab - 1}, but got {_short(token)}."
            raise bad_request(message, f"{param}[{i}]", "invalid_value")
    return ids
