"""What is known of the request that is being handled, wherever it is handled: its owner, its limits, its times.

The record of a request is found through its ASGI scope or, in code that does not see the scope, through the context:
tasks and workers that a request starts inherit it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.types import Scope

from ..engine.request import FinishReason, Timings, Usage
from ..logs import request_id
from .principals import Principal

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Answered:
    """How one choice of an answer ended."""

    finish: FinishReason
    usage: Usage | None
    timings: Timings | None


@dataclasses.dataclass
class RequestInfo:
    """One HTTP request or WebSocket session. `tenant` is who owns what it stores and whose cache it uses: the tenant of
    its key, the same for all where no keys are asked for. `notes` are added by handlers, for the log."""

    id: str
    started: float  # time.perf_counter()
    tenant: str = ""
    key: str = ""
    """Name of the key."""
    principal: Principal | None = None
    """Who pays."""
    priority: int = 0
    highest: int = 1
    """The highest priority that its key may ask for."""
    context_cap: int | None = None
    """Tokens that a prompt may have by the request's context policy."""
    timeout: float | None = None
    """Seconds from `started` in which the answer must be complete."""
    status: int = 0
    failure_logged: bool = False
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds spent in stages outside the engine, by their names in the log."""
    answered: list[Answered] = dataclasses.field(default_factory=list)
    logged: bool = False

    @property
    def time_left(self) -> float | None:
        """Seconds until the answer is too late; None: as many as it takes."""
        return None if self.timeout is None else self.started + self.timeout - time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is done inside as a part of the stage `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - began


_CURRENT: ContextVar[RequestInfo | None] = ContextVar("umbra_request", default=None)


def request_info(scope: Scope) -> RequestInfo:
    """The request's record; it exists for every request that came through `Gate`."""
    return scope["umbra.request"]


def current() -> RequestInfo | None:
    """The record of the request that this code runs for; None outside of requests."""
    return _CURRENT.get()


@contextmanager
def handling(scope: Scope, info: RequestInfo) -> Iterator[None]:
    """Inside, `info` is the request that is handled."""
    scope["umbra.request"] = info
    record, name = _CURRENT.set(info), request_id.set(info.id)
    try:
        yield
    finally:
        _CURRENT.reset(record)
        request_id.reset(name)


def log_failure(info: RequestInfo) -> None:
    """Log the exception being handled, once per request."""
    if not info.failure_logged:
        info.failure_logged = True
        log.exception("%s failed", info.id)
