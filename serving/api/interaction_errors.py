"""Errors in the shape of the Interactions API: `{"error": {"code": "<word>", "message"}}`."""

from __future__ import annotations

from typing import Any

from .errors import ApiError

_CODES = {
    400: "invalid_request",
    401: "authentication",
    403: "permission_denied",
    404: "not_found",
    405: "invalid_request",
    408: "deadline_exceeded",
    413: "invalid_request",
    415: "invalid_request",
    416: "out_of_range",
    429: "rate_limit_exceeded",
    499: "cancelled",
    503: "unavailable",
    504: "deadline_exceeded",
}

_OWN = {
    "unknown_field": "parameter_unknown",
    "model_not_found": "model_not_found",
    "failed_precondition": "failed_precondition",
    "quota_exceeded": "quota_exceeded",
}
"""Codes of errors that have a word of their own here."""


def interaction_error(error: ApiError) -> dict[str, Any]:
    """`error` as it stands in events and resources."""
    code = _OWN.get(error.code or "") or _CODES.get(
        error.status, "internal" if error.status >= 500 else "invalid_request"
    )
    return {"code": code, "message": error.message}


def interaction_body(error: ApiError) -> dict[str, Any]:
    return {"error": interaction_error(error)}
