"""What is to be measured: the command line as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .systems import PEERS

MIN_TOKENS = 64
"""A decode rate over fewer tokens is listed but left out of medians."""


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
    sequences: int = 1
    max_tokens: int = 1
    prompt_tokens: int = 0  # prefill only
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
        """For the report: everything but what the report tells elsewhere, and what this benchmark does not use."""
        left_out = {"bench", "model"}
        if self.bench != "prefill":
            left_out |= {"prompt_tokens"}
        if self.bench != "serve":
            left_out |= {"rate", "seed", "trace", "time_scale", "length_scale", "starts"}
        elif self.trace is None:
            left_out |= {"time_scale", "length_scale"}
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
