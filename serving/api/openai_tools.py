"""Functions that OpenAI requests declare, as tools of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .body import json_type
from .errors import bad_request, unsupported
from .tool_calls import ToolFormat, Tools

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def flat_tools(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, form: ToolFormat | None, model: str
) -> Tools | None:
    """The tools of `/v1/responses`, whose functions are not nested; None if there are none or `choice` is `none`."""
    declared = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    names = [one["function"]["name"] for one in declared]
    if len(set(names)) < len(names):
        raise bad_request("Invalid 'tools': two functions have the same name.", "tools", "invalid_value")
    if choice not in (None, "auto", "none"):
        message = "'tool_choice': forced calls are not supported; supported: 'auto', 'none'"
        raise unsupported("tool_choice", message)
    if not declared or choice == "none":
        return None
    if form is None:
        message = f"'tools': the chat template of '{model}' has no tools; supported: no tools, or tool_choice 'none'"
        raise unsupported("tools", message)
    return Tools(form, declared)


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind, name, parameters = tool.get("type"), tool.get("name"), tool.get("parameters")
    if kind != "function":
        shown = kind[:40] if isinstance(kind, str) else json_type(kind)
        raise unsupported(
            f"{where}.type", f"'{where}': tools of type {shown!r} are not supported; supported: 'function'"
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"Invalid '{where}.name': expected 1 to 64 letters, digits, '_' and '-'."
        raise bad_request(message, f"{where}.name", "invalid_value")
    if tool.get("strict"):
        message = f"'{where}.strict': arguments are not bound to the schema; supported: false"
        raise unsupported(f"{where}.strict", message)
    if parameters is not None and not isinstance(parameters, dict):
        message = f"Invalid type for '{where}.parameters': expected an object, but got {json_type(parameters)} instead."
        raise bad_request(message, f"{where}.parameters", "invalid_type")
    function = {
        "name": name,
        "description": str(tool.get("description") or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
