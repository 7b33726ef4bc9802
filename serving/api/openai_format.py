"""The form of an answer as OpenAI requests ask for it."""

from __future__ import annotations

from typing import Any

from ..engine.grammar import Grammar
from .body import json_type
from .errors import ApiError, bad_request
from .json_schema import schema_grammar
from .schemas import SamplingBody

_KINDS = "'text', 'json_object', 'json_schema'"
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields for the forms that OpenAI does not have, in the names that vLLM gave them."""


def asked_form(body: SamplingBody, response_format: Any, where: str) -> Grammar | None:
    """The grammar of a request that says it in the field `where` (with the value `response_format`) or in one of
    `GUIDED`; None: free text."""
    given = [name for name in GUIDED if getattr(body, name) is not None]
    form = _format(response_format, where)
    names = given if form is None else [where, *given]
    if len(names) > 1:
        message = f"Invalid '{names[1]}': it cannot be given together with '{names[0]}'."
        raise bad_request(message, names[1], "invalid_value")
    return _guided(given[0], getattr(body, given[0])) if given else form


def _guided(name: str, value: Any) -> Grammar:
    if name == "guided_json":
        return schema_grammar(value, name)
    try:
        if name == "guided_choice":
            return Grammar.choice(value).named(name)
        return (Grammar.regex if name == "guided_regex" else Grammar.grammar)(value).named(name)
    except ValueError as error:
        raise bad_request(f"Invalid '{name}': {error}.", name, "invalid_value") from None


def _format(value: Any, where: str) -> Grammar | None:
    """`{"type": "json_schema", ...}` with the schema in `json_schema`, as chat completions have it, or beside the type,
    as responses have it."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _no_object(where, value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object().named(where)
    if kind != "json_schema":
        shown = repr(kind[:40]) if isinstance(kind, str) else json_type(kind)
        message = f"Invalid value: {shown}. Supported values are: {_KINDS}."
        raise bad_request(message, f"{where}.type", "invalid_value")
    place, inner = (f"{where}.json_schema", value["json_schema"]) if "json_schema" in value else (where, value)
    if not isinstance(inner, dict):
        raise _no_object(place, inner)
    if inner.get("schema") is None:
        name = f"{place}.schema"
        raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return schema_grammar(inner["schema"], f"{place}.schema")


def _no_object(param: str, got: Any) -> ApiError:
    message = f"Invalid type for '{param}': expected an object, but got {json_type(got)} instead."
    return bad_request(message, param, "invalid_type")
