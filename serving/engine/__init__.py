"""The engine: requests, the scheduler, and the step. See `engine.Engine`.

Plain data (requests, emissions) is there at once; what needs JAX is imported when it is first asked for, so that
scripts can read options and choose a platform before JAX starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .grammar import Grammar
from .request import (
    Emission,
    EngineStopped,
    FinishReason,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    Sink,
    Timings,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from .blocking import Completion
    from .engine import Engine, EngineStats
    from .programs import Program, make_mesh

_LAZY = {
    "Completion": "blocking",
    "Engine": "engine",
    "EngineStats": "engine",
    "Program": "programs",
    "make_mesh": "programs",
}

__all__ = [
    "Completion",
    "Emission",
    "Engine",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Grammar",
    "Program",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "Sink",
    "Timings",
    "TokenLogprob",
    "Usage",
    "make_mesh",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
