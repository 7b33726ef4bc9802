"""Errors in the shape of Google's APIs: `{"error": {"code", "message", "status", "details"}}`."""

from __future__ import annotations

from typing import Any

from .errors import ApiError

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def google_body(error: ApiError) -> dict[str, Any]:
    """The reply's JSON. The first key is `error`: in a stream that is how clients notice."""
    body: dict[str, Any] = {
        "code": error.status,
        "message": error.message,
        "status": _STATUS.get(error.status, "UNKNOWN"),
    }
    if details := _details(error):
        body["details"] = details
    return {"error": body}


def _details(error: ApiError) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = []
    if error.status == 400 and error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append(_detail("BadRequest", fieldViolations=[violation]))
    if error.status == 401:
        details.append(_detail("ErrorInfo", reason="API_KEY_INVALID", domain="umbra"))
    if error.retry_after is not None:
        details.append(_detail("RetryInfo", retryDelay=f"{error.retry_after:g}s"))
    return details


def _detail(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/google.rpc.{kind}", **fields}
