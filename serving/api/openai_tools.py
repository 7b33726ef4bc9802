"""Functions that OpenAI requests declare, as tools of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .body import json_type
from .errors import ApiError, bad_request, unsupported
from .tool_calls import ToolFormat, Tools

Choice = str | dict[str, Any] | None

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES = "'none', 'auto', 'required', a function, allowed tools"


def nested_tools(
    tools: Sequence[dict[str, Any]] | None, choice: Choice, form: ToolFormat, *, parallel: bool | None
) -> Tools | None:
    """The tools of chat completions, whose functions are objects of their own; None if there are none or `choice` is
    `none`."""
    for i, tool in enumerate(tools or ()):
        _check_kind(tool, f"tools[{i}]")
        if not isinstance(tool.get("function"), dict):
            raise _no_object(f"tools[{i}].function", tool.get("function"))
    declared = [(tool["function"], f"tools[{i}].function") for i, tool in enumerate(tools or ())]
    return _tools(declared, choice, form, parallel)


def old_functions(functions: Sequence[dict[str, Any]] | None, choice: Choice, form: ToolFormat) -> Tools | None:
    """The functions of chat completions before there were tools, of which an answer calls at most one."""
    field = "function_call"
    if isinstance(choice, dict):
        if not isinstance(choice.get("name"), str):
            raise bad_request(f"Invalid '{field}': a function needs a name.", field, "invalid_value")
        choice = {"type": "function", "name": choice["name"]}
    elif choice not in (None, "none", "auto"):
        message = f"Invalid '{field}': {choice[:40]!r}. Supported: 'none', 'auto', a function."
        raise bad_request(message, field, "invalid_value")
    declared = [(function, f"functions[{i}]") for i, function in enumerate(functions or ())]
    return _tools(declared, choice, form, False, fields=("functions", field))


def flat_tools(
    tools: Sequence[dict[str, Any]] | None, choice: Choice, form: ToolFormat, *, parallel: bool | None
) -> Tools | None:
    """The tools of responses, whose functions are not nested; None if there are none or `choice` is `none`."""
    for i, tool in enumerate(tools or ()):
        _check_kind(tool, f"tools[{i}]")
    return _tools([(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())], choice, form, parallel)


def _tools(
    declared: Sequence[tuple[dict[str, Any], str]],
    choice: Choice,
    form: ToolFormat,
    parallel: bool | None,
    fields: tuple[str, str] = ("tools", "tool_choice"),
) -> Tools | None:
    """`fields`: where the functions and the choice stand."""
    listed, chosen = fields
    descriptions = [_function(function, where) for function, where in declared]
    names = [one["function"]["name"] for one in descriptions]
    if len(set(names)) < len(names):
        raise bad_request(f"Invalid '{listed}': two functions have the same name.", listed, "invalid_value")
    mode, allowed = _choice(choice)
    for name in allowed or ():
        if name not in names:
            message = f"Invalid '{chosen}': no function {name[:64]!r} is among the {listed}."
            raise bad_request(message, chosen, "invalid_value")
    if mode == "required" and not names:
        raise bad_request("Invalid 'tool_choice': it needs 'tools'.", "tool_choice", "invalid_value")
    if not names or mode == "none":
        return None
    return Tools(
        form,
        descriptions,
        mode="required" if mode == "required" else "auto",
        allowed=None if allowed is None else frozenset(allowed),
        parallel=bool(parallel),
        strict=frozenset(function["name"] for function, _ in declared if function.get("strict")),
    )


def _choice(choice: Choice) -> tuple[str, list[str] | None]:
    """`none`, `auto` or `required`, and the functions that may be called (None: all)."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise _bad_choice(repr(choice[:40]))
        return choice or "auto", None
    kind = choice.get("type")
    if kind == "function":
        return "required", [_named(choice)]
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode, listed = (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return mode, [_named(tool) for tool in listed]
    raise _bad_choice(repr(kind[:40]) if isinstance(kind, str) else json_type(kind))


def _named(tool: Any) -> str:
    """The name in `{"type": "function", "name": ...}`, or in the object `function` within."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise bad_request("Invalid 'tool_choice': a function needs a name.", "tool_choice", "invalid_value")
    return name


def _bad_choice(shown: str) -> ApiError:
    return bad_request(f"Invalid 'tool_choice': {shown}. Supported: {_CHOICES}.", "tool_choice", "invalid_value")


def _check_kind(tool: dict[str, Any], where: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        shown = kind[:40] if isinstance(kind, str) else json_type(kind)
        raise unsupported(
            f"{where}.type", f"'{where}': tools of type {shown!r} are not supported; supported: 'function'"
        )


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"Invalid '{where}.name': expected 1 to 64 letters, digits, '_' and '-'."
        raise bad_request(message, f"{where}.name", "invalid_value")
    if parameters is not None and not isinstance(parameters, dict):
        raise _no_object(f"{where}.parameters", parameters)
    function = {
        "name": name,
        "description": str(tool.get("description") or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _no_object(param: str, got: Any) -> ApiError:
    message = f"Invalid type for '{param}': expected an object, but got {json_type(got)} instead."
    return bad_request(message, param, "invalid_type")
