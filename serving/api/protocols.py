"""Which protocol a request speaks, as far as that can be seen before its handler runs: the shape of errors follows."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from .errors import ApiError, openai_body
from .google_errors import google_body
from .interaction_errors import interaction_body

_GOOGLE_PATH = re.compile(r"/v1(?:beta|alpha)(?:/.*)?|/v1/cachedContents(?:/.*)?|/models/.*|/.*:[A-Za-z]+")

_INTERACTIONS_PATH = re.compile(r"/v1(?:beta|alpha)?/interactions(?:/.*)?")


def error_body(scope: Scope, error: ApiError) -> dict[str, Any]:
    """`error` as a client of the request's protocol reads it."""
    if _INTERACTIONS_PATH.fullmatch(scope["path"]):
        return interaction_body(error)
    return google_body(error) if speaks_google(scope) else openai_body(error)


def speaks_google(scope: Scope) -> bool:
    """By the path where it belongs to one protocol; else (the models) by how the client sends its key."""
    if _GOOGLE_PATH.fullmatch(scope["path"]):
        return True
    headers = dict(scope["headers"])
    if b"authorization" in headers:
        return False
    return bool(headers.get(b"x-goog-api-key")) or "key" in parse_qs(scope.get("query_string", b"").decode("latin-1"))
