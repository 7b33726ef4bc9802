"""The form of an answer: free text, text of a form, calls of functions, or either, as one grammar."""

from __future__ import annotations

import dataclasses
import json

from ..engine.grammar import JSON_FORM, Grammar
from ..engine.landing import longest_part
from .errors import bad_request, unsupported
from .json_schema import schema_grammar
from .tool_calls import ToolFormat, Tools

MAX_FORCED_CALLS = 8
"""Calls of one answer that must call, where several may come."""


def answer_grammar(tools: Tools | None, text: Grammar | None) -> Grammar | None:
    """What the answer must match; None: nothing in particular. `text` is the form that it has if it calls nothing.

    Where a call must come, or its arguments must be valid, it is; raises `ApiError` when the two cannot be combined.
    """
    if tools is None:
        return text
    if tools.mode == "required":
        several = f' ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}' if tools.parallel else ""
        return _lark(f"start: call{several}\n{_calls(tools)}", "tools", _length(tools, more=tools.parallel))
    if text is not None:
        return _lark(f"start: call | text\n{_calls(tools)}{_text_rule(text)}", text.field, _length(tools, more=True))
    if tools.mode == "validated" or tools.strict:
        return _lark(
            f"start: called* REST\ncalled: opened call_rest\n"
            f"opened[lazy]: REST {_literal(tools.form.open)}\nREST: /(.|\\n)*/\n{_calls(tools)}",
            "tools",
        )
    return None


def _length(tools: Tools, *, more: bool) -> int:
    """Characters by which a token may put off the end: those of the longest among the shortest parts of a call, or of
    the shortest calls, if `more` of them may begin. Too many, and a short answer is nothing but its shortest end."""
    longest = max((longest_part(one["parameters"]) + len(one["name"]) for one in tools.callable), default=0)
    return longest + len(tools.form.open + tools.form.close) + 30 if more else longest


def _lark(rules: str, field: str, longest_part: int | None = None) -> Grammar:
    try:
        grammar = Grammar.grammar(f"%llguidance {{}}\n{rules}").named(field)
        return dataclasses.replace(grammar, longest_part=longest_part)
    except ValueError as error:
        raise bad_request(f"Invalid '{field}': {error}.", field, "invalid_value") from None


def _calls(tools: Tools) -> str:
    """Rules for `call`, and for `call_rest`, which is what follows the opening marker."""
    form: ToolFormat = tools.form
    rules = [
        f"call: {_literal(form.open)} call_rest",
        "call_rest: " + " | ".join(f"call_{i}" for i, _ in enumerate(tools.callable)),
    ]
    for i, function in enumerate(tools.callable):
        name = function["name"]
        head = "\n" + json.dumps({"name": name})[:-1] + ', "arguments": '
        schema = function["parameters"] if tools.mode != "auto" or name in tools.strict else {"type": "object"}
        rules.append(f"call_{i}: {_literal(head)} args_{i} {_literal('}' + chr(10) + form.close)}")
        rules.append(f"args_{i}: " + _json(schema, f"tools.{name}.parameters"))
    return "\n".join(rules) + "\n"


def _json(schema: object, where: str) -> str:
    return f"%json {json.dumps({'x-guidance': JSON_FORM, **_object(schema, where)})}"


def _object(schema: object, where: str) -> dict[str, object]:
    made = json.loads(schema_grammar(schema, where).text)
    return made if isinstance(made, dict) else {"anyOf": [made]}


def _text_rule(text: Grammar) -> str:
    if text.kind == "json_schema":
        return f"text: {_json(json.loads(text.text), text.field)}\n"
    if text.kind == "choice":
        return "text: " + " | ".join(_literal(choice) for choice in json.loads(text.text)) + "\n"
    message = f"'{text.field}' is not supported together with tools; supported: JSON schemas, choices"
    raise unsupported(text.field, message)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
