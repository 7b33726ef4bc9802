"""Paths of the Gemini protocol. Its clients ask for three versions of it, which are the same here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .embeddings import BatchEmbedBody, EmbedBody, batch_embed_contents, embed_content
from .gemini import count_tokens, generate_content, stream_generate_content, unknown_method
from .gemini_schemas import CountBody, GenerateBody, Message
from .models import get_model, list_models
from .service import Service

VERSIONS = ("v1", "v1beta", "v1alpha")
BODIES = (GenerateBody, CountBody, EmbedBody, BatchEmbedBody)
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
        if version != "v1":
            _add_models(app, service, version)
    for name, (method, _) in _METHODS.items():  # some clients send no version
        _add_method(app, service, f"/models/{{model:path}}:{name}", method, None)


def _add_method(app: FastAPI, service: Service, path: str, method: Method, schema: str | None) -> None:
    """A route that reads its own body. Without `schema` it is not described."""

    async def endpoint(request: Request, model: str) -> Response:
        return await method(request, service, model)

    body = {"required": True, "content": {"application/json": {"schema": {"$ref": schema}}}}
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


def _add_models(app: FastAPI, service: Service, version: str) -> None:
    @app.get(f"/{version}/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return list_models(service.loaded)

    @app.get(f"/{version}/models/{{model_id:path}}", tags=["models"])
    async def model(model_id: str) -> dict[str, Any]:
        """One model by its id."""
        return get_model(service.loaded, model_id)
