"""The line of JSON that is logged for every finished request: what was asked, what it cost, and where its time went."""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

from pydantic_core import to_json

from ..logs import REQUESTS
from .context import Answered, RequestInfo

_STAGES = ("read", "template", "queue", "cache", "prefill", "decode", "stream")
"""What a request goes through: its body is read; the prompt is made and tokenized; then the engine has it, until it is
admitted, cached KV is in place, the first token is there, and the last; and the time that its client took to accept
what was sent."""


def log_request(info: RequestInfo, method: str, route: str, path: str, *, quiet: bool = False) -> None:
    """Log that `info` has been answered. What it has started and is still running gets lines of its own
    (`log_late`). `quiet`: at level debug."""
    info.logged = True
    level = logging.DEBUG if quiet else logging.INFO
    if REQUESTS.isEnabledFor(level):
        seconds = time.perf_counter() - info.started
        asked = {"method": method, "route": route, "path": path[:200], "status": info.status}
        REQUESTS.log(level, "%s", _line(info, asked, info.answered, info.stages, seconds))


def log_late(info: RequestInfo, answered: Answered) -> None:
    """Log the end of an answer that went on after its request had been answered: a run in the background."""
    if REQUESTS.isEnabledFor(logging.INFO):
        seconds = time.perf_counter() - info.started
        REQUESTS.info("%s", _line(info, {"background": True}, [answered], {}, seconds))


def _line(
    info: RequestInfo, asked: dict[str, Any], answers: list[Answered], outside: dict[str, float], seconds: float
) -> str:
    fields: dict[str, Any] = {"time": _now(), "id": info.id, **asked}
    if info.key:
        fields |= {"tenant": info.tenant, "key": info.key}
    fields |= {name: value for name, value in info.notes.items() if name not in ("tokens", "finish")}
    fields["priority"] = info.priority
    fields |= _tokens(answers)
    fields["total_ms"] = round(seconds * 1e3, 1)
    fields["stages_ms"] = {name: round(spent * 1e3, 2) for name, spent in _in_order({**outside, **_inside(answers)})}
    return to_json(fields, fallback=str).decode()


def _in_order(stages: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(stages.items(), key=lambda stage: _STAGES.index(stage[0]))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")  # noqa: UP017


def _tokens(answers: list[Answered]) -> dict[str, Any]:
    used = [one.usage for one in answers if one.usage is not None]
    if not used:
        return {}
    passes = sum(one.timings.passes for one in answers if one.timings is not None)
    tokens = sum(one.completion_tokens for one in used)
    return {
        "cached_tokens": sum(one.cached_tokens for one in used),
        "output_tokens": tokens,
        "thought_tokens": sum(one.thought_tokens for one in used),
        "tokens_per_pass": round(tokens / max(passes, 1), 2),
        "finish": ",".join(sorted({one.finish for one in answers})),
    }


def _inside(answers: list[Answered]) -> dict[str, float]:
    """Seconds in the engine, of the choice that took longest."""
    times = max((one.timings for one in answers if one.timings is not None), key=lambda t: t.total, default=None)
    if times is None:
        return {}
    return {
        "queue": times.queued,
        "cache": times.cache,
        "prefill": max(0.0, times.ttft - times.queued - times.cache),
        "decode": times.decode,
    }
