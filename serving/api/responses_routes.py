"""Paths of stored responses. `POST /v1/responses` itself is added with OpenAI's other methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .openai_responses import cancel_response, delete_response, list_input_items, retrieve_response
from .service import Service

Handler = Callable[[Request, Service, str], Awaitable[Response]]


def add_stored_responses(app: FastAPI, service: Service) -> None:
    one = "/v1/responses/{response_id}"
    for method, path, handler in (
        ("GET", one, retrieve_response),
        ("DELETE", one, delete_response),
        ("POST", f"{one}/cancel", cancel_response),
        ("GET", f"{one}/input_items", list_input_items),
    ):
        _add(app, service, method, path, handler)


def _add(app: FastAPI, service: Service, method: str, path: str, handler: Handler) -> None:
    async def endpoint(request: Request, response_id: str) -> Response:
        return await handler(request, service, response_id)

    app.add_api_route(path, endpoint, methods=[method], tags=["openai"], name=handler.__name__, response_class=Response)
