"""The OpenAPI description: what FastAPI finds in the routes, with the bodies that handlers read themselves and the
refusals that every route may answer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

SCHEMAS = "#/components/schemas/"

_ERROR = {
    "description": "Why a request was refused or failed. Gemini's routes have an integer `code` and a `status`; "
    "OpenAI's a string `code` or null, a `type` and a `param`.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "message": {"type": "string"},
                "code": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
                "status": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}


def describe(app: FastAPI, schemas: Sequence[type[BaseModel]]) -> None:
    """Make the document of `app` describe `schemas`, which its routes refer to, and errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema([(one, "validation") for one in schemas], ref_template=SCHEMAS + "{model}")
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update({**bodies["$defs"], "Error": _ERROR})
            for methods in document["paths"].values():
                for operation in methods.values():
                    _add_refusals(operation)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_refusals(operation: dict[str, Any]) -> None:
    """Our own in place of FastAPI's 422, which nothing here is answered with."""
    responses = operation.setdefault("responses", {})
    responses.pop("422", None)
    refusal = {"content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}}
    responses["4XX"] = {"description": "Refused: the message says why", **refusal}
    responses["5XX"] = {"description": "Not available, or not in time", **refusal}
