"""JSON Schemas of requests, on their way to a grammar: what is left out and what is closed."""

from __future__ import annotations

from typing import Any

from ..engine.grammar import Grammar
from .body import json_type
from .errors import bad_request

MAX_DEPTH = 64

_COMBINED = ("allOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties")
"""Keywords under which closing an object may leave nothing that matches."""
_LEFT_OUT = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_NUMBER_FORMATS = ("int32", "int64", "float", "double", "enum", "byte", "binary", "password")
"""Formats of OpenAPI that say nothing about the text of a value."""


def schema_grammar(schema: Any, where: str) -> Grammar:
    """The grammar of the JSON Schema in the field `where`.

    An object whose properties are named has no others unless the schema says so: that is valid too, and a model does
    not go on to invent some. Annotations are left out. Raises `ApiError` when it is no schema.
    """
    if not isinstance(schema, dict | bool):
        message = (
            f"Invalid type for '{where}': expected a JSON schema (an object), but got {json_type(schema)} instead."
        )
        raise bad_request(message, where, "invalid_type")
    close = not _uses(schema, where, 0)
    try:
        return Grammar.json_schema(_made(schema, close)).named(where)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"Invalid '{where}': {error}.", where, "invalid_value") from None


def _uses(schema: Any, where: str, depth: int) -> bool:
    """Whether anything in the schema combines others."""
    if depth > MAX_DEPTH:
        raise bad_request(f"Invalid '{where}': nested more than {MAX_DEPTH} levels deep.", where, "invalid_value")
    if isinstance(schema, list):
        return any([_uses(item, where, depth + 1) for item in schema])
    if not isinstance(schema, dict):
        return False
    combined = any(name in schema and not (name == "allOf" and _is_single(schema[name])) for name in _COMBINED)
    return any([_uses(value, where, depth + 1) for value in schema.values()]) or combined


def _is_single(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1


def _made(schema: Any, close: bool) -> Any:
    """A schema without annotations; closed if `close`."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _LEFT_OUT or (name == "format" and value in _NUMBER_FORMATS):
            continue
        if name in _MAPS and isinstance(value, dict):
            value = {key: _made(child, close) for key, child in value.items()}
        elif name in _LISTS and isinstance(value, list):
            value = [_made(child, close) for child in value]
        elif name in _SCHEMAS:
            value = _made(value, close)
        out[name] = value
    if close and _is_closable(out):
        out["additionalProperties"] = False
    return out


def _is_closable(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    others = ("additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "minProperties")
    return not any(name in schema for name in others) and all(name in properties for name in required)
