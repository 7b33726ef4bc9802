"""What is to be measured: the command line as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .systems import DRAFTING, PEERS

MIN_TOKENS = 64
"""A decode rate over fewer tokens is listed but left out of medians."""

_MODEL = ("quant", "threads", "mesh", "kernels", "kv", "embedding")
_OURS = (*_MODEL, "draft", "shadow")
_RUNS = (*_OURS, "against", "prompts", "limit", "rounds", "sequences", "max_tokens")
_TIERS = ("quant", "threads", "kernels", "kv", "embedding", "draft", "shadow", "folder")
_ARRIVALS = (*_RUNS, "scenario", "clients", "rate", "seed", "trace", "starts")

USED = {
    "decode": (*_RUNS, "each", "draft_length", "temperature", "busy"),
    "flat": _RUNS,
    "schema": (*_OURS, "limit", "rounds", "sequences", "max_tokens", "seed"),
    "levels": (*_OURS, "prompts", "limit", "rounds", "max_tokens", "tasks", "thoughts"),
    "skips": (*_MODEL, "prompts", "built_in", "limit", "sequences", "max_tokens"),
    "relax": (*_OURS, "prompts", "built_in", "limit", "sequences", "max_tokens"),
    "prefill": (*_RUNS, "prompt_tokens"),
    "batch": (*_RUNS, "draft_length"),
    "serve": _ARRIVALS,
    "passes": (*_MODEL, "shadow", "against", "prompts", "rounds", "widths", "prompt_tokens"),
    "kernels": ("quant", "threads", "kernels", "kv", "embedding", "against", "rounds", "ops", "widths", "contexts"),
    "kv": (
        "quant",
        "threads",
        "mesh",
        "kernels",
        "embedding",
        "prompts",
        "limit",
        "max_tokens",
        "needles",
        "prompt_tokens",
    ),
    "quality": (*_MODEL, "against", "prompts", "limit", "sequences", "max_tokens", "variants"),
    "exact": ("quant", "kernels", "kv", "embedding", "shadow", "prompts", "limit", "max_tokens", "drafting_only"),
    "resume": (*_TIERS, "rounds", "prompts", "prompt_tokens", "new_tokens"),
    "capacity": ("quant", "threads", "kernels", "kv", "embedding", "folder", "prompt_tokens"),
    "context": ("quant", "threads", "kernels", "kv", "against", "rounds", "contexts"),
    "soak": (*_TIERS, "limit", "sequences", "seed"),
    "cache": (*_TIERS, "rounds", "prompts", "limit", "sequences", "max_tokens"),
    "simulate": (*_TIERS, "prompts", "trace", "histories", "plots"),
}
"""Benchmark -> the fields that it uses, and that its report lists."""


@dataclasses.dataclass(frozen=True)
class Plan:
    bench: str
    model: str
    quant: str
    threads: int
    mesh: tuple[int, int] | None
    draft: str
    against: tuple[str, ...]  # names in PEERS
    prompts: Path
    limit: int
    rounds: int
    kernels: str = "auto"
    kv: str = "auto"
    embedding: str = "file"
    shadow: str = "auto"
    sequences: int = 1
    max_tokens: int = 1
    each: int | None = None  # decode: prompts of each category, instead of the first `limit`
    draft_length: int | None = None  # always so many drafted tokens; None: the gate decides
    temperature: float = 0.0  # decode, of ours: above 0, drawn with seeds
    prompt_tokens: int = (
        0  # prefill: of a prompt; passes: the long context; resume, capacity: the conversation; kv: the list
    )
    busy: int = 0  # decode: busy processes beside a second run of every prompt
    widths: tuple[int, ...] = ()  # passes: tokens of a pass; kernels: rows of a product
    contexts: tuple[int, ...] = ()  # kernels: tokens that attention sees
    ops: tuple[str, ...] = ()  # kernels
    needles: int = 0  # kv
    variants: tuple[str, ...] = ()  # quality: other forms of ours (see quality.form)
    tasks: int = 0  # levels: tasks of each way
    thoughts: int = 0  # levels: tokens of the largest thinking budget; 0: no thoughts
    plots: Path | None = None  # levels: folder for pictures
    built_in: bool = False  # skips, relax: prompts made from templates, instead of a file
    save: bool = False  # skips, relax: write the result where the program looks for it
    drafting_only: bool = False  # exact: leave out the settings that do not draft
    folder: Path | None = None  # resume, capacity, soak, cache, simulate: where temporary folders are made
    new_tokens: int = 0  # resume: of the new turn
    histories: tuple[int, ...] = ()  # simulate: tokens of the conversations that are measured
    # serve only:
    scenario: str = "arrivals"
    clients: tuple[int, ...] = ()  # numbers of clients, or streams, at once
    rate: float = 1.0  # requests per second
    seed: int = 0
    trace: Path | None = None
    time_scale: float = 1.0  # seconds of ours per second of the trace
    length_scale: float = 1.0  # tokens of ours per token of the trace
    starts: int = 2

    @property
    def drafting(self) -> list[str]:
        """Our own systems that differ in how they draft."""
        return ["umbra", *(f"umbra-{peer}" for peer in self.against if peer in DRAFTING)]

    @property
    def systems(self) -> list[str]:
        """Ours first, then every variant of every peer."""
        return ["umbra", *(system for peer in self.against for system in PEERS[peer])]

    def settings(self) -> dict[str, object]:
        """For the report: everything that this benchmark uses."""
        scales = ("time_scale", "length_scale") if self.bench == "serve" and self.trace is not None else ()
        values = dataclasses.asdict(self)
        used = {name: values[name] for name in (*USED[self.bench], *scales)}
        return {key: str(value) if isinstance(value, Path) else value for key, value in used.items()}
