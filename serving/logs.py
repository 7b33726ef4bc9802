"""Log lines: every one that is written while a request is handled carries the request's id; a finished request is one
line of JSON. Importing this imports no JAX: logging is set up before JAX may start.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

REQUESTS = logging.getLogger("umbra.requests")
"""One message per finished request, which is a JSON object (serving/api/record.py)."""

request_id: ContextVar[str] = ContextVar("umbra_request_id", default="")
"""Id of the request that is handled in this context: the task of a request, what it starts, and its workers."""

_NOISY = ("httpx", "uvicorn", "jax", "asyncio", "absl")
_TELLTALE = ("websockets", "httpcore", "h11")
"""Loggers that print headers, and so keys, at level debug."""


class Formatter(logging.Formatter):
    """Time, level, the request's id if there is one, and the message; JSON of `REQUESTS` as it is."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == REQUESTS.name:
            return record.getMessage()
        line = super().format(record)
        known = request_id.get()
        return line if not known or known in line else f"[{known}] {line}"


class StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment: while progress bars are shown, they go around the line."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr(level: str) -> None:
    """Send log lines of `level` and above to stderr."""
    handler = StderrHandler()
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for other in _TELLTALE if level == "debug" else (*_TELLTALE, *_NOISY):
        logging.getLogger(other).setLevel(logging.WARNING)
