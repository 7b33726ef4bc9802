"""Errors as clients see them. A handler raises `ApiError`; one place renders it in the shape of the protocol."""

from __future__ import annotations

import math
from typing import Any

from ..engine import EngineStopped, PromptTooLong, QueueFull
from ..engine.grammar import BadGrammar

MAX_MESSAGE = 500
CLIENT_CLOSED = 499
"""Status in logs and metrics of a request whose client left before the answer was complete."""


class ApiError(Exception):
    """A refusal or failure with its HTTP status. `param` names the field of the request that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply; `Retry-After` in whole seconds, at least one."""
        if self.retry_after is None:
            return self._headers
        return {**self._headers, "retry-after": str(max(1, math.ceil(self.retry_after)))}


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A known option that would change the answer and cannot be honoured."""
    return bad_request(message, param, "unsupported_parameter")


def model_not_found(name: str, known: str) -> ApiError:
    message = f"The model '{name}' does not exist; this server has '{known}'"
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after: float) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def stopping() -> ApiError:
    """What a request is told that comes after a stop signal, or that did not end in the grace after one."""
    return unavailable("The server is stopping; send the request again in a moment", "shutting_down", 5.0)


def internal(request_id: str) -> ApiError:
    message = f"The server had an internal error while processing the request (request id {request_id})"
    return ApiError(500, message, kind="server_error", code="internal_error")


def context_exceeded(param: str, tokens: str, context: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in {tokens} tokens, "
        f"and at least one is needed for the answer. Please reduce the length of the {param}."
    )
    return bad_request(message, param, "context_length_exceeded")


def from_engine(error: Exception, prompt_param: str) -> Exception:
    """What the engine's refusal of a request means to its client; `prompt_param` is the field that held the prompt.
    An exception that is no refusal stays what it is."""
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            f"The server is busy: {error}",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=error.retry_after,
        )
    if isinstance(error, PromptTooLong):
        return context_exceeded(prompt_param, str(error.prompt_tokens), error.context_length)
    if isinstance(error, BadGrammar):
        field = error.field or prompt_param
        return bad_request(f"Invalid '{field}': {error}.", field, "invalid_value")
    if isinstance(error, ValueError):
        return from_value_error(error)
    if isinstance(error, EngineStopped):
        return unavailable("The engine does not take requests", "engine_stopped", 5.0)
    return error


_PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "logit_bias",
    "logprobs",
    "stop_token_ids",
    "ignore_eos",
    "stop",
)


def from_value_error(error: ValueError) -> ApiError:
    """The engine's parameter checks name the parameter somewhere in their sentence; the reply names it in `param`."""
    text = str(error)
    words = text.replace(":", " ").replace(",", " ").split()
    param = next((name for name in _PARAMETERS if name in words), None)
    if "stop token ids" in text:
        param = "stop_token_ids"
    return bad_request(f"Invalid value: {text}", param, "invalid_value")


def openai_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
