"""Paths of the Interactions API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .gemini_routes import VERSIONS
from .interaction_schemas import InteractionBody
from .interactions import cancel_interaction, create_interaction, delete_interaction, get_interaction
from .service import Service

BODIES = (InteractionBody,)
"""Schemas that the routes refer to in the OpenAPI document."""

One = Callable[[Request, Service, str], Awaitable[Response]]


def add_interactions(app: FastAPI, service: Service, schemas: str) -> None:
    for version in VERSIONS:
        path = f"/{version}/interactions"
        _add_create(app, service, path, schemas + InteractionBody.__name__)
        _add_one(app, service, "GET", path + "/{id}", get_interaction)
        _add_one(app, service, "DELETE", path + "/{id}", delete_interaction)
        _add_one(app, service, "POST", path + "/{id}/cancel", cancel_interaction)


def _add_create(app: FastAPI, service: Service, path: str, schema: str) -> None:
    async def endpoint(request: Request) -> Response:
        return await create_interaction(request, service)

    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        tags=["interactions"],
        name=create_interaction.__name__,
        response_class=Response,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": schema}}}}
        },
    )


def _add_one(app: FastAPI, service: Service, method: str, path: str, handler: One) -> None:
    async def endpoint(request: Request, id: str) -> Response:
        return await handler(request, service, id)

    app.add_api_route(
        path, endpoint, methods=[method], tags=["interactions"], name=handler.__name__, response_class=Response
    )
