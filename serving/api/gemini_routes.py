"""Paths of the Gemini protocol. Its clients ask for three versions of it, which are the same here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .cached_contents import create_content, delete_content, get_content, list_contents, patch_content
from .embeddings import BatchEmbedBody, EmbedBody, batch_embed_contents, embed_content
from .gemini import count_tokens, generate_content, stream_generate_content, unknown_method
from .gemini_schemas import CachedBody, CountBody, ExpiryBody, GenerateBody, Message
from .models import get_model, list_models
from .service import Service

VERSIONS = ("v1", "v1beta", "v1alpha")
BODIES = (GenerateBody, CountBody, CachedBody, ExpiryBody, EmbedBody, BatchEmbedBody)
"""Schemas that the routes refer to in the OpenAPI document."""

Method = Callable[[Request, Service, str], Awaitable[Response]]

_METHODS: dict[str, tuple[Method, type[Message]]] = {
    "generateContent": (generate_content, GenerateBody),
    "streamGenerateContent": (stream_generate_content, GenerateBody),
    "countTokens": (count_tokens, CountBody),
    "embedContent": (embed_content, EmbedBody),
    "batchEmbedContents": (batch_embed_contents, BatchEmbedBody),
}


def add_gemini(app: FastAPI, service: Service, schemas: str) -> None:
    """Add the routes; `schemas` is where the document has its schemas. Models of `v1` are described by `/v1/models`."""
    for version in VERSIONS:
        # `{model}` is `models/ID`; an id with a slash comes bare.
        for name, (method, body) in _METHODS.items():
            _add_method(app, service, f"/{version}/{{model:path}}:{name}", method, schemas + body.__name__)
        _add_method(app, service, f"/{version}/models/{{model:path}}", unknown_method, None)
        _add_contents(app, service, version, schemas)
        if version != "v1":
            _add_models(app, service, version)
    for name, (method, _) in _METHODS.items():  # some clients send no version
        _add_method(app, service, f"/models/{{model:path}}:{name}", method, None)


def _add_method(app: FastAPI, service: Service, path: str, method: Method, schema: str | None) -> None:
    """A route that reads its own body. Without `schema` it is not described."""

    async def endpoint(request: Request, model: str) -> Response:
        return await method(request, service, model)

    body = _described(schema)
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        tags=["gemini"],
        name=method.__name__,
        response_class=Response,
        include_in_schema=schema is not None,
        openapi_extra={"requestBody": body},
    )


def _add_contents(app: FastAPI, service: Service, version: str, schemas: str) -> None:
    path = f"/{version}/cachedContents"
    for method, of_one, handler, body in (
        ("POST", False, create_content, CachedBody),
        ("GET", False, list_contents, None),
        ("GET", True, get_content, None),
        ("PATCH", True, patch_content, ExpiryBody),
        ("DELETE", True, delete_content, None),
    ):
        described = {} if body is None else {"requestBody": _described(schemas + body.__name__)}
        app.add_api_route(
            f"{path}/{{id}}" if of_one else path,
            _of_one(handler, service) if of_one else _of_all(handler, service),
            methods=[method],
            tags=["gemini"],
            name=handler.__name__,
            response_class=Response,
            openapi_extra=described,
        )


def _of_one(handler: Any, service: Service) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request, id: str) -> Response:
        return await handler(request, service, id)

    return endpoint


def _of_all(handler: Any, service: Service) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, service)

    return endpoint


def _described(schema: str | None) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": {"$ref": schema}}}}


def _add_models(app: FastAPI, service: Service, version: str) -> None:
    @app.get(f"/{version}/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return list_models(service.loaded)

    @app.get(f"/{version}/models/{{model_id:path}}", tags=["models"])
    async def model(model_id: str) -> dict[str, Any]:
        """One model by its id."""
        return get_model(service.loaded, model_id)
