"""Limits and addresses of the HTTP server, as data."""

from __future__ import annotations

import dataclasses

from .levels import DEFAULT_LEVEL, find_level

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How the server listens and what it accepts. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; the `ready` line names it."""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Keys that may use the server; empty: no key is asked for."""
    level: str = DEFAULT_LEVEL
    """Level of requests that name none. It turns nobody's thinking on."""
    lossy: bool = False
    """Whether the lower levels may use what was calibrated to change few tokens; else all levels are exact."""
    max_body: int = 8 * MIB
    """Largest request body; a longer one is refused with 413 while it is being read."""
    max_stored: int = 128 * MIB
    """Conversations kept in memory by a server that has no state folder; then the oldest go."""
    max_inflight: int = 1024
    """HTTP requests in progress, streams included; one more is refused with 429."""
    max_choices: int = 128
    """Prompts times `n` of one request."""
    max_stop: int = 16
    """Stop strings of one request."""
    body_timeout: float = 60.0
    """A body must have arrived after this long."""
    heartbeat: float = 15.0
    """A stream with nothing to say sends a keep-alive this often."""
    send_timeout: float = 120.0
    """A client that accepts no byte for this long is taken as gone."""
    resume_grace: float = 30.0
    """An interaction that is streamed goes on for this long after its client is gone, who may come back."""
    shutdown_grace: float = 5.0
    """After a stop signal, running answers may go on for this long; then they are cancelled."""
    workers: int = 2
    """Threads that render templates, tokenize and parse large bodies."""

    def __post_init__(self) -> None:
        find_level(self.level)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        for field in ("max_body", "max_stored", "max_inflight", "max_choices", "max_stop", "workers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in ("body_timeout", "heartbeat", "send_timeout", "resume_grace", "shutdown_grace"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        if any(not key for key in self.api_keys):
            raise ValueError("an API key must not be empty")
