"""A client that costs next to nothing: HTTP/1.1 over a socket, counting what comes without understanding it. For
measurements in which the client shares the machine's cores with the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from .processes import BenchError

EVENT = b"data: {"
TEXT = re.compile(rb'"(?:content|text)": ?"[^"]')
"""In an event with a piece of the answer; the first of some servers has none."""
END = b"data: [DONE]"


@dataclasses.dataclass
class Stream:
    """A streamed answer. Seconds count from when the request was sent."""

    first: float | None = None
    """When the first text came; None: there was none."""
    last: float = 0.0
    events: int = 0
    tokens: int = 0
    """By the usage in the last events, which some servers do not send; else pieces of text."""

    @property
    def tok_s(self) -> float | None:
        """Tokens but one over the time after the first text, which several may have come with: about."""
        if self.first is None or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    @property
    def events_s(self) -> float:
        """Events after the first over the time after it."""
        return (
            (self.events - 1) / (self.last - self.first) if self.first is not None and self.last > self.first else 0.0
        )


async def stream(url: str, path: str, body: dict[str, Any]) -> Stream:
    """Send one request and read its answer to the end."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    made, rest, pieces = Stream(), b"", 0
    began = time.perf_counter()
    try:
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while END not in rest:
            piece = await reader.read(1 << 16)
            if not piece:
                raise BenchError(f"the stream ended early: {rest[-200:].decode(errors='replace')}")
            now = time.perf_counter() - began
            if not rest and not piece.startswith(b"HTTP/1.1 200"):
                raise BenchError(f"refused: {piece[:300].decode(errors='replace')}")
            rest = rest[-1000:] + piece
            if made.first is None and TEXT.search(rest):
                made.first = now
            made.events, made.last = made.events + piece.count(EVENT), now
            pieces += len(TEXT.findall(piece))
        made.tokens = _usage(rest) or pieces
    finally:
        writer.close()
    return made


def _usage(tail: bytes) -> int:
    at = tail.rfind(b'"completion_tokens":')
    return 0 if at < 0 else int(tail[at + len(b'"completion_tokens":') :].split(b",")[0].rstrip(b"}"))


def streams(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Stream], float]:
    """All requests at once; their answers, and the seconds until all had ended."""

    async def all_of_them() -> list[Stream]:
        return list(await asyncio.gather(*(stream(url, path, body) for body in bodies)))

    began = time.perf_counter()
    made = asyncio.run(all_of_them())
    return made, time.perf_counter() - began
