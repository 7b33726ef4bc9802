"""The ASGI application: routes over a `Service`. A protocol is a module with handlers; its routes are listed here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ... import __version__
from ..metrics import CONTENT_TYPE, exposition
from .body import drain
from .embeddings import embeddings
from .errors import CLIENT_CLOSED, ApiError, ClientGone, internal
from .gemini_routes import BODIES, add_gemini
from .interaction_routes import BODIES as INTERACTION_BODIES
from .interaction_routes import add_interactions
from .middleware import Gate, log_failure, request_info
from .models import get_model, list_models
from .openai_chat import chat_completions
from .openai_completions import completions
from .openai_responses import count_input_tokens, create_response
from .openapi import SCHEMAS, describe
from .protocols import error_body
from .responses_body import ResponsesBody
from .responses_routes import add_stored_responses
from .schemas import ChatBody, CompletionBody, EmbeddingBody
from .service import Service
from .socket_routes import add_sockets

Handler = Callable[[Request, Service], Awaitable[Response]]


def create_app(service: Service) -> ASGIApp:
    """The server as an ASGI application."""
    app = FastAPI(
        title="Umbra",
        version=__version__,
        description="Language-model serving. Bodies and errors are those of OpenAI's and of Gemini's API.",
        redirect_slashes=False,
        redoc_url=None,
    )
    _add_operations(app, service)
    _add_models(app, service)
    _add_post(app, service, "/v1/chat/completions", chat_completions, ChatBody)
    _add_post(app, service, "/v1/completions", completions, CompletionBody)
    _add_post(app, service, "/v1/embeddings", embeddings, EmbeddingBody)
    _add_post(app, service, "/v1/responses", create_response, ResponsesBody)
    _add_post(app, service, "/v1/responses/input_tokens", count_input_tokens, ResponsesBody)
    add_stored_responses(app, service)
    add_interactions(app, service, SCHEMAS)
    add_sockets(app, service)
    add_gemini(app, service, SCHEMAS)
    describe(app, (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody, *BODIES, *INTERACTION_BODIES))
    app.add_exception_handler(ApiError, _on_api_error(service))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)
    return _with_cors(Gate(app, service), service.config.cors_origins)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app` for the pages of `origins` as well. Keys are sent in headers, never as cookies."""
    if not origins:
        return app
    return CORSMiddleware(
        app, origins, allow_methods=["GET", "POST", "PATCH", "DELETE"], allow_headers=["*"], expose_headers=["*"]
    )


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", tags=["operations"])
    async def root() -> dict[str, Any]:
        """What this is, and where to go on."""
        links = {"docs": "/docs", "models": "/v1/models", "health": "/healthz", "ready": "/readyz"}
        return {"name": "umbra", "version": __version__, "model": service.model_name, "links": links}

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, Any]:
        """The process answers; says nothing about the model."""
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["operations"])
    async def readyz() -> Response:
        """200 while requests are taken; 503 while the model loads and its programs are compiled, during shutdown, and
        when the engine has failed."""
        status = service.status
        if status == "starting":
            return JSONResponse({"status": status, "progress": service.progress}, 503, {"retry-after": "1"})
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(exposition(service.engine_metrics.registry), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return list_models(service.loaded)

    @app.get("/v1/models/{model_id:path}", tags=["models"])
    async def model(model_id: str) -> dict[str, Any]:
        """One model by its id."""
        return get_model(service.loaded, model_id)


def _add_post(app: FastAPI, service: Service, path: str, handler: Handler, schema: type[BaseModel]) -> None:
    """A route that reads its own body: FastAPI would read it without a limit and parse it on the event loop."""

    async def endpoint(request: Request) -> Response:
        return await handler(request, service)

    body = {"$ref": SCHEMAS + schema.__name__}
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        tags=["openai"],
        name=handler.__name__,
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
    )


def _on_api_error(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        response = JSONResponse(error_body(request.scope, error), error.status, error.headers)
        return _Draining(response, service.config.max_body) if error.status == 413 else response

    return handle


class _Draining(Response):
    """A reply to a request whose body has not been read: it is sent, then the body is read and thrown away."""

    def __init__(self, response: Response, limit: int) -> None:
        super().__init__()
        self._response = response
        self._limit = limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = self._response
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await drain(receive, self._limit)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        api = ApiError(404, f"Invalid URL ({method} {path})", code="unknown_url")
    elif error.status_code == 405:
        message = f"Not allowed to {method} on {path}. (HINT: Perhaps you meant to use a different HTTP method?)"
        api = ApiError(405, message, code="method_not_supported")
    else:
        api = ApiError(error.status_code, str(error.detail))
    return JSONResponse(error_body(request.scope, api), api.status, dict(error.headers or {}))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """The reply to what nobody expected."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_CLOSED)
    info = request_info(request.scope)
    log_failure(info)
    return JSONResponse(error_body(request.scope, internal(info.id)), 500)
