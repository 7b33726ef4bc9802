"""What is to be measured: the command line as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .systems import PEERS

MIN_TOKENS = 64
"""A decode rate over fewer tokens is listed but left out of medians."""

_MODEL = ("quant", "threads", "mesh", "kernels", "kv", "embedding", "draft", "against")
_RUNS = (*_MODEL, "prompts", "limit", "rounds", "sequences", "max_tokens")
_ARRIVALS = (*_RUNS, "rate", "seed", "trace", "starts")

USED = {
    "decode": (*_RUNS, "busy"),
    "prefill": (*_RUNS, "prompt_tokens"),
    "batch": _RUNS,
    "serve": _ARRIVALS,
    "passes": (*_MODEL, "prompts", "rounds", "widths", "prompt_tokens"),
    "kernels": ("quant", "threads", "kernels", "kv", "embedding", "against", "rounds", "ops", "widths", "contexts"),
    "quality": (*_MODEL, "prompts", "limit", "sequences", "max_tokens", "variants"),
    "exact": ("quant", "kernels", "kv", "embedding", "draft", "prompts", "limit", "max_tokens"),
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
    sequences: int = 1
    max_tokens: int = 1
    prompt_tokens: int = 0  # prefill: of a prompt; passes: the long context
    busy: int = 0  # decode: busy processes beside a second run of every prompt
    widths: tuple[int, ...] = ()  # passes: tokens of a pass; kernels: rows of a product
    contexts: tuple[int, ...] = ()  # kernels: tokens that attention sees
    ops: tuple[str, ...] = ()  # kernels
    variants: tuple[str, ...] = ()  # quality: other forms of ours (see quality.form)
    # serve only:
    rate: float = 1.0  # requests per second
    seed: int = 0
    trace: Path | None = None
    time_scale: float = 1.0  # seconds of ours per second of the trace
    length_scale: float = 1.0  # tokens of ours per token of the trace
    starts: int = 2

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
