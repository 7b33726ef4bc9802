"""What a client may ask of the server beside its request: priority, a time, and which part of a long context counts.

Each has a header and, in JSON bodies, a field: `X-Goog-Priority` (`priority`, and OpenAI's `service_tier`),
`X-Server-Timeout`, `X-Goog-Context-Policy` (`context_policy`), `X-Goog-Client-Features` (`client_features`).
A value that is not known is refused with those that are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from ...configs.keys import PRIORITIES
from .context import RequestInfo, current
from .errors import ApiError, bad_request

K = 1024

CONTEXT_CAPS = {"aggressive": 40 * K, "default": 128 * K, "conservative": 256 * K}
"""Tokens of a prompt that each policy processes. Up to there all of a prompt is used; a longer one is refused."""

MOBILE_CAP = 66 * K

TIERS = {"flex": "low", "auto": "normal", "default": "normal", "scale": "high", "priority": "high"}
"""OpenAI's service tiers as priorities."""


@dataclasses.dataclass(frozen=True)
class _Wish:
    header: str
    field: str
    supported: tuple[str, ...]


PRIORITY = _Wish("x-goog-priority", "priority", tuple(PRIORITIES))
POLICY = _Wish("x-goog-context-policy", "context_policy", tuple(CONTEXT_CAPS))

FIELDS = (PRIORITY.field, POLICY.field, "client_features", "service_tier")
"""Fields of bodies that are understood here."""


def from_headers(headers: Headers, info: RequestInfo, limit: float, highest: int) -> None:
    """Take the wishes of the headers into `info`. `limit`: seconds that an answer may take at most; `highest`: the
    priority that may not be exceeded, however high the wish. Raises `ApiError` (400)."""
    info.timeout = min(limit, _seconds(headers.get("x-server-timeout", "")))
    info.highest, info.priority = highest, min(0, highest)
    _take(
        info,
        headers.get(PRIORITY.header),
        headers.get(POLICY.header),
        headers.get("x-goog-client-features"),
        PRIORITY.header,
        POLICY.header,
    )


def from_body(body: Mapping[str, Any]) -> None:
    """Take the wishes among the fields of `body` into the record of the request being handled."""
    info = current()
    if info is None:
        return
    tier = body.get("service_tier")
    priority = body.get(PRIORITY.field) or (TIERS.get(tier.lower()) if isinstance(tier, str) else None)
    _take(info, priority, body.get(POLICY.field), body.get("client_features"), PRIORITY.field, POLICY.field)


def _take(info: RequestInfo, priority: Any, policy: Any, features: Any, priority_name: str, policy_name: str) -> None:
    if priority is not None:
        info.priority = min(info.highest, PRIORITIES[_one_of(priority, PRIORITY.supported, priority_name)])
    caps = [] if info.context_cap is None else [info.context_cap]
    if policy is not None:
        caps.append(CONTEXT_CAPS[_one_of(policy, POLICY.supported, policy_name)])
    if isinstance(features, str | list) and "mobile" in str(features).lower():
        caps.append(MOBILE_CAP)
    info.context_cap = min(caps, default=None)


def _one_of(value: Any, supported: tuple[str, ...], name: str) -> str:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in supported:
        got = f"{value[:40]!r}" if isinstance(value, str) else type(value).__name__
        raise bad_request(f"Invalid '{name}': got {got}; supported: {', '.join(supported)}", name, "invalid_value")
    return word


def _seconds(value: str) -> float:
    """`X-Server-Timeout`; infinity where it says nothing."""
    try:
        seconds = float(value)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf


def check_cap(info: RequestInfo | None, tokens: int, param: str) -> None:
    """Refuse a prompt that is longer than its context policy processes."""
    if info is not None and info.context_cap is not None and tokens > info.context_cap:
        message = (
            f"context_window_exceeded: dynamic cap enforced: the prompt has {tokens} tokens, and the request's "
            f"context policy processes {info.context_cap}"
        )
        raise bad_request(message, param, "context_window_exceeded")


def too_late(info: RequestInfo) -> ApiError:
    """The answer was not complete in time."""
    message = f"The answer was not complete within the {info.timeout:g} s that the request may take"
    return ApiError(504, message, kind="server_error", code="deadline_exceeded")
