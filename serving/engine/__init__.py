"""The engine: requests, the scheduler, and the step. See `engine.Engine`."""

from .engine import Completion, Engine, EngineStats, EngineStopped
from .programs import Program, make_mesh, programs
from .request import (
    Emission,
    FinishReason,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    Sink,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "Completion",
    "Emission",
    "Engine",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Program",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "Sink",
    "Timings",
    "TokenLogprob",
    "Usage",
    "make_mesh",
    "programs",
]
