"""What clients do to a server that means no good, and whether the others notice.

    python -m umbra.scripts.bench.stress [--model M] [--json OUT]

Starts our server, sends it bad requests, unfinished ones, large bodies, idle connections and readers that do not read,
and asks it something in the usual way all the while: `usual` are the answers to that, which must all come.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..model_options import OneLineParser
from .bad_requests import CHAT, COMPLETIONS, HI, Bad, bad_requests
from .report import percentile
from .servers import SERVE, Server

Answers = dict[str, int]
"""How often each status came; `closed`: the server closed without one, `open`: it still waits."""


async def send_bad(url: str, bad: Sequence[Bad]) -> tuple[Answers, list[str]]:
    """Send bad requests one after the other; what is wrong with the answers, a sentence each."""
    answers: Answers = collections.Counter()
    wrong = []
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        for one in bad:
            response = await http.request(one.method, one.path, content=one.body, headers=dict(one.headers))
            answers[str(response.status_code)] += 1
            if (what := _fault(one, response)) is not None:
                wrong.append(f"{one.name}: {what}")
    return answers, wrong


def _fault(bad: Bad, response: httpx.Response) -> str | None:
    """What is wrong with a refusal; None if it is as the protocol has it."""
    if not 400 <= response.status_code < 500:
        return f"status {response.status_code}, {response.text[:200]}"
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {response.text[:200]}"
    keys = {"code", "message", "status"} if bad.google else {"message", "type", "param", "code"}
    if not keys <= set(error) or not isinstance(error["message"], str) or not error["message"]:
        return f"not in the protocol's shape: {response.text[:200]}"
    if any(word in error["message"] for word in ("Traceback", 'File "', "object at 0x")):
        return f"tells of the inside: {error['message'][:200]}"
    return None


async def slowloris(url: str, count: int, seconds: float) -> Answers:
    """Heads that arrive a byte at a time and never end."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        answered = asyncio.ensure_future(reader.readuntil(b"\r\n"))
        while not answered.done():
            writer.write(b"x")
            await asyncio.sleep(0.2)
        return await answered

    return await _crowd(url, count, seconds, one)


async def idle(url: str, count: int, seconds: float) -> Answers:
    """Connections on which nothing is sent."""
    return await _crowd(url, count, seconds, lambda reader, writer: asyncio.sleep(seconds))


async def slow_readers(url: str, count: int, seconds: float, model: str) -> Answers:
    """Streams that nobody reads, of large events: what has been sent soon fills what the connection holds."""
    options = {"stream": True, "max_tokens": 30, "logprobs": True, "top_logprobs": 20}
    body = json.dumps({"model": model, **HI, **options}).encode()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(seconds)

    return await _crowd(url, count, seconds, one)


async def large(url: str, count: int, size: int) -> Answers:
    """Bodies that are larger than accepted, all at once."""
    answers: Answers = collections.Counter()
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=None)) as http:

        async def one() -> None:
            try:
                answers[str((await http.post(CHAT, content=b"x" * size)).status_code)] += 1
            except httpx.HTTPError:
                answers["closed"] += 1

        await asyncio.gather(*(one() for _ in range(count)))
    return answers


async def _crowd(
    url: str, count: int, seconds: float,
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]],
) -> Answers:  # fmt: skip
    """`count` connections that `behave` for so many seconds; how they stand then. `behave` may give the first line of
    what it was told."""
    address = urlsplit(url)
    answers: Answers = collections.Counter()

    async def one() -> None:
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            answers["refused"] += 1
            return
        head = None
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            async with asyncio.timeout(seconds):
                head = await behave(reader, writer)
        answers[head.split()[1].decode() if head else await _standing(reader)] += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(count)))
    return answers


async def _standing(reader: asyncio.StreamReader) -> str:
    """The status that came, or whether the connection is open."""
    try:
        async with asyncio.timeout(0.05):
            head = await reader.read(64)
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return head.split()[1].decode() if head.startswith(b"HTTP/") else "closed"


class Usual:
    """Somebody who asks a short question again and again."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._body = url, {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}
        self.answers: Answers = collections.Counter()
        self.seconds: list[float] = []

    async def during(self, trouble: Awaitable[Any]) -> Any:
        """Ask while there is `trouble`; what the trouble gives."""
        task = asyncio.ensure_future(trouble)
        async with httpx.AsyncClient(base_url=self._url, timeout=600.0) as http:
            while not task.done() or not self.seconds:
                began = time.perf_counter()
                response = await http.post(COMPLETIONS, json=self._body)
                self.seconds.append(time.perf_counter() - began)
                self.answers[str(response.status_code)] += 1
                await asyncio.sleep(0.02)
        return await task


async def _beside(usual: Usual, trouble: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """The trouble in a process of its own, so that it is the server that is disturbed and not who asks it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return await usual.during(asyncio.get_running_loop().run_in_executor(pool, _alone, trouble, *arguments))


def _alone(trouble: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    async def run() -> Any:
        return await trouble(*arguments)

    return asyncio.run(run())


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def run(server: Server, pid: int, *, scale: float = 1.0) -> dict[str, Any]:
    """All kinds of trouble, one after the other; `scale`: how much of it."""
    url, model = server.url, server.model()
    some = max(1, round(200 * scale))
    kinds: dict[str, tuple[Callable[..., Awaitable[Any]], tuple[Any, ...]]] = {
        "nothing": (asyncio.sleep, (2.0,)),
        "bad requests": (send_bad, (url, bad_requests(model))),
        "slowloris": (slowloris, (url, some, 30.0)),
        "10 MB bodies": (large, (url, max(1, some // 10), 10_000_000)),
        "idle connections": (idle, (url, 5 * some, 5.0)),
        "slow readers": (slow_readers, (url, some, 60.0, model)),
    }
    out: dict[str, Any] = {}
    for name, (trouble, arguments) in kinds.items():
        usual = Usual(url, model)
        result = asyncio.run(_beside(usual, trouble, *arguments))
        wrong = result[1] if isinstance(result, tuple) else []
        answers = result[0] if isinstance(result, tuple) else result or {}
        out[name] = {
            "answers": dict(answers), "wrong": wrong, "usual": dict(usual.answers),
            "usual_p50_ms": percentile(usual.seconds, 50, 1e3), "usual_p99_ms": percentile(usual.seconds, 99, 1e3),
            "memory_mib": memory_mib(pid),
        }  # fmt: skip
        print(name, json.dumps(out[name]), flush=True)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    options = OneLineParser(prog="stress.py", description="Bad clients against our server.", allow_abbrev=False)
    options.add_argument("--model", default="smollm2", help="what the server loads")
    options.add_argument("--scale", type=float, default=1.0, metavar="X", help="1: 200 slow readers, 1,000 idle ...")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    args = options.parse_args(argv)
    command = [
        sys.executable,
        str(SERVE),
        "--model",
        args.model,
        "--port",
        "0",
        "--max-queue",
        "1000",
        "--state",
        "off",
    ]
    server = Server("umbra", command, dict(os.environ), None)
    try:
        report = run(server, server.pid, scale=args.scale)
    finally:
        server.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    bad = [name for name, one in report.items() if one["wrong"] or set(one["usual"]) != {"200"}]
    print("failed: " + ", ".join(bad) if bad else "all well")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
