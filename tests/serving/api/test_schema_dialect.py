from __future__ import annotations

import pytest

from umbra.serving.api.errors import ApiError
from umbra.serving.api.schema_dialect import json_schema


@pytest.mark.parametrize(
    ("gemini", "expected"),
    [({"type": "OBJECT"}, {"type": "object"}),
     ({"type": "string", "format": "date", "description": "d"},
      {"type": "string", "format": "date", "description": "d"}),
     ({"type": "ARRAY", "items": {"type": "BOOLEAN"}, "max_items": 2, "minItems": "1"},
      {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "minItems": 1}),
     ({"type": "NUMBER", "minimum": 0.5, "maximum": 9.0}, {"type": "number", "minimum": 0.5, "maximum": 9}),
     ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
     ({"type": "STRING", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
     ({"any_of": [{"type": "STRING"}, {"type": "INTEGER"}], "nullable": True},
      {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "null"}]}),
     ({"type": "OBJECT", "properties": {"min_items": {"type": "STRING"}}, "required": ["min_items"],
       "additional_properties": False},
      {"type": "object", "properties": {"min_items": {"type": "string"}}, "required": ["min_items"],
       "additionalProperties": False}),
     ({"type": "OBJECT", "additionalProperties": {"type": "NUMBER"}},
      {"type": "object", "additionalProperties": {"type": "number"}}),
     ({"$defs": {"A": {"type": "STRING"}}, "items": {"$ref": "#/$defs/A"}},
      {"$defs": {"A": {"type": "string"}}, "items": {"$ref": "#/$defs/A"}}),
     ({"type": "STRING", "title": None, "example": "x"}, {"type": "string"})],
)  # fmt: skip
def test_translation(gemini, expected):
    assert json_schema(gemini, "s") == expected


def test_properties_are_ordered():
    properties = {name: {"type": "STRING"} for name in "abc"}
    schema = json_schema({"type": "OBJECT", "properties": properties, "propertyOrdering": ["c", "a"]}, "s")
    assert list(schema["properties"]) == ["c", "a", "b"] and "propertyOrdering" not in schema


def nested(depth):
    schema = {"type": "STRING"}
    for _ in range(depth):
        schema = {"type": "ARRAY", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "where"),
    [(5, "s"), ({"type": 5}, "s.type"), ({"type": "THING"}, "s.type"), ({"typo": 1}, "s"),
     ({"minItems": 1, "min_items": 1}, "s"), ({"maxLength": -1}, "s.maxLength"), ({"maxItems": "x"}, "s.maxItems"),
     ({"minimum": "1"}, "s.minimum"), ({"enum": "a"}, "s.enum"), ({"required": [1]}, "s.required"),
     ({"pattern": 1}, "s.pattern"), ({"properties": []}, "s.properties"), ({"properties": {"a": 1}}, "s.properties.a"),
     ({"anyOf": []}, "s.anyOf"), ({"any_of": [1]}, "s.anyOf[0]"), ({"items": []}, "s.items"),
     ({"propertyOrdering": ["x"]}, "s.propertyOrdering"), ({"additionalProperties": 1}, "s.additionalProperties"),
     (nested(40), None)],
)  # fmt: skip
def test_refusals_name_the_place(schema, where):
    with pytest.raises(ApiError) as refused:
        json_schema(schema, "s")
    assert refused.value.status == 400
    assert where is None or refused.value.param == where
