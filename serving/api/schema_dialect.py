"""Gemini's schemas as JSON Schema.

Gemini describes data in a dialect of OpenAPI 3.0: type names in capitals, `nullable`, `propertyOrdering`, and every
keyword in camelCase or snake_case. Templates and grammars want JSON Schema.
"""

from __future__ import annotations

from typing import Any

from .body import json_type
from .errors import ApiError
from .gemini_schemas import invalid

_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_COPIED = {
    "title": "title",
    "description": "description",
    "format": "format",
    "pattern": "pattern",
    "enum": "enum",
    "default": "default",
    "minimum": "minimum",
    "maximum": "maximum",
    "required": "required",
    "$ref": "$ref",
    "ref": "$ref",
    "minItems": "minItems",
    "maxItems": "maxItems",
    "minLength": "minLength",
    "maxLength": "maxLength",
    "minProperties": "minProperties",
    "maxProperties": "maxProperties",
}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_CHILD_MAPS = ("properties", "$defs", "defs")
_MAX_DEPTH = 32


def json_schema(schema: Any, where: str, depth: int = 0) -> dict[str, Any]:
    """`schema`, found in the field `where`, as JSON Schema. Properties come in the order of `propertyOrdering`.

    Raises `ApiError` for a keyword or a type that the dialect does not have.
    """
    if not isinstance(schema, dict):
        raise invalid(where, f"expected a schema (an object), got {json_type(schema)}")
    if depth > _MAX_DEPTH:
        raise invalid(where, f"the schema is nested more than {_MAX_DEPTH} levels deep")
    given: dict[str, Any] = {}
    for key, value in schema.items():
        name = _camel(key)
        if value is None or name == "example":
            continue
        if name in given:
            raise invalid(where, f"'{name}' is given in both of its spellings")
        given[name] = value
    out: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where}.{name}"
        if name == "type":
            out["type"] = _type(value, place)
        elif name in _COPIED:
            out[_COPIED[name]] = _copied(name, value, place)
        elif name in _CHILD_MAPS:
            out["$defs" if name == "defs" else name] = _children(value, place, depth)
        elif name == "items":
            out["items"] = json_schema(value, place, depth + 1)
        elif name == "prefixItems" or name == "anyOf":
            out[name] = _each(value, place, depth)
        elif name == "additionalProperties":
            out[name] = value if isinstance(value, bool) else json_schema(value, place, depth + 1)
        elif name not in ("nullable", "propertyOrdering"):
            raise invalid(where, f"a schema has no keyword '{key[:60]}'")
    if "propertyOrdering" in given:
        _order(out, given["propertyOrdering"], f"{where}.propertyOrdering")
    return _nullable(out) if given.get("nullable") is True else out


def _camel(key: str) -> str:
    head, *rest = key.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest) if head else key


def _type(value: Any, where: str) -> str | list[str]:
    if isinstance(value, list):
        return [_one_type(item, where) for item in value]
    return _one_type(value, where)


def _one_type(value: Any, where: str) -> str:
    name = value.lower() if isinstance(value, str) else None
    if name not in _TYPES:
        shown = value[:40] if isinstance(value, str) else json_type(value)
        raise invalid(where, f"got {shown!r}; supported: {', '.join(name.upper() for name in _TYPES)}")
    return name


def _copied(name: str, value: Any, where: str) -> Any:
    """A keyword that both dialects have. Counts may come as strings (64-bit numbers in JSON) or with a point."""
    if name in _COUNTS:
        if isinstance(value, str) and value.isdecimal() and len(value) < 20:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise invalid(where, "expected a whole number of at least 0")
        return int(value)
    if name in ("minimum", "maximum"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(where, f"expected a number, got {json_type(value)}")
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if name in ("enum", "required"):
        if not isinstance(value, list) or (name == "required" and not all(isinstance(item, str) for item in value)):
            raise invalid(where, f"expected an array, got {json_type(value)}")
        return value
    if name in ("title", "description", "format", "pattern", "$ref", "ref") and not isinstance(value, str):
        raise invalid(where, f"expected a string, got {json_type(value)}")
    return value


def _children(value: Any, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, f"expected an object of schemas, got {json_type(value)}")
    return {name: json_schema(child, f"{where}.{name[:60]}", depth + 1) for name, child in value.items()}


def _each(value: Any, where: str, depth: int) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise invalid(where, "expected an array of at least one schema")
    return [json_schema(child, f"{where}[{i}]", depth + 1) for i, child in enumerate(value)]


def _order(out: dict[str, Any], names: Any, where: str) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid(where, "expected an array of property names")
    properties = out.get("properties", {})
    unknown = [name for name in names if name not in properties]
    if unknown:
        raise _unknown_property(unknown[0], where)
    first = {name: properties[name] for name in names}
    if properties:
        out["properties"] = {**first, **properties}


def _unknown_property(name: str, where: str) -> ApiError:
    return invalid(where, f"'{name[:60]}' is not one of the properties")


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, or null."""
    if isinstance(schema.get("type"), str) and "anyOf" not in schema:
        out = {**schema, "type": [schema["type"], "null"]}
        if "enum" in out:
            out["enum"] = [*out["enum"], None]
        return out
    return {"anyOf": [schema, {"type": "null"}]}
