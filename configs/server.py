"""Limits and addresses of the HTTP server, as data."""

from __future__ import annotations

import dataclasses
import ipaddress
import re

from .keys import ApiKey, Limits
from .levels import DEFAULT_LEVEL, find_level

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How the server listens and what it accepts. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; the `ready` line names it."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that may use the server; empty: no key is asked for, and nothing but loopback addresses is listened on."""
    limits: Limits = Limits()
    """Of every key that has none of its own; without keys, of all requests together."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser; `*`: all."""
    level: str = DEFAULT_LEVEL
    """Level of requests that name none. It turns nobody's thinking on."""
    lossy: bool = False
    """Whether the lower levels may use what was calibrated to change few tokens; else all levels are exact."""
    max_body: int = 8 * MIB
    """Largest request body; a longer one is refused with 413 while it is being read."""
    max_stored: int = 128 * MIB
    """Conversations kept in memory by a server that has no state folder; then the oldest go."""
    retention: float = 30 * 86_400.0
    """Stored interactions and responses are kept for this long."""
    max_inflight: int = 1024
    """HTTP requests in progress, streams included; one more is refused with 429. Requests of low priority are refused
    earlier (serving/api/limits.py)."""
    max_connections: int = 4096
    """Open connections, idle ones included; one more is told 503 and closed."""
    max_choices: int = 128
    """Prompts times `n` of one request."""
    max_stop: int = 16
    """Stop strings of one request."""
    header_timeout: float = 20.0
    """The head of a request must have arrived this long after its first byte."""
    body_timeout: float = 60.0
    """A body must have arrived after this long."""
    heartbeat: float = 15.0
    """A stream with nothing to say sends a keep-alive this often."""
    request_timeout: float = 600.0
    """An answer must be complete after this long; `X-Server-Timeout` may ask for less."""
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
        for field in (
            "max_body", "max_stored", "max_inflight", "max_connections", "max_choices", "max_stop", "workers",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in (
            "header_timeout", "body_timeout", "heartbeat", "request_timeout", "send_timeout",
            "resume_grace", "retention", "shutdown_grace",
        ):  # fmt: skip
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(
                f"without an API key the server listens on loopback addresses only, not on {self.host!r}: set "
                "UMBRA_API_KEYS or --api-keys, or listen on 127.0.0.1"
            )
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in self.api_keys]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"two API keys have the {what} {twice[0]!r}")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"a CORS origin is '*' or like https://example.org (no path), got {origin!r}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
