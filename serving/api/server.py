"""The life of the server process: listen, load, serve, stop.

The socket is open before the model is there, so that `/healthz` and `/readyz` answer while it loads. After a stop
signal new requests are told 503; running answers get `ServerConfig.shutdown_grace` seconds, then they are cancelled.
When none is left the server stops listening and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn

from ..engine import EngineStopped
from .app import create_app
from .connections import MAX_HEAD, connections, raise_file_limit
from .service import EnginePort, ModelPort, Service

log = logging.getLogger(__name__)

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than the pools of the common clients keep theirs."""

HTTP_NICE = 5
"""Niceness of the threads that serve HTTP, on Linux, where it is a property of a thread."""

_WATCH = 1.0
_POLL = 0.02
_AFTER_CANCEL = 1.0
_ENGINE_CLOSE = 2.0


class ClosableEngine(EnginePort, Protocol):
    def close(self) -> None: ...


Load = Callable[[Service], tuple[ClosableEngine, ModelPort]]
"""Loads the model and starts its engine; runs in its own thread and says how far it is in `service.progress`."""


@dataclasses.dataclass(frozen=True)
class Tls:
    cert: str
    key: str


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free port. Raises `OSError` in one sentence."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise OSError(f"cannot listen on host {host!r}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sock


def url(host: str, sock: socket.socket, tls: Tls | None = None) -> str:
    """Where the server can be reached, with the real port."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{sock.getsockname()[1]}"


def run(service: Service, sock: socket.socket, load: Load, on_ready: Callable[[], None], tls: Tls | None = None) -> int:
    """Serve until a signal says stop; the exit code of the process. A failed `load` is raised, and so is the death of
    the engine, as `EngineStopped`."""
    raise_file_limit()
    config = uvicorn.Config(
        create_app(service),
        http=connections(service.config),
        h11_max_incomplete_event_size=MAX_HEAD,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(_AFTER_CANCEL),
        ws_max_size=service.config.max_body,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    config.load()
    process = _Process(service, _Uvicorn(config), load, on_ready)
    uvicorn_loop = config.get_loop_factory()
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        runner.run(process.main(sock))
    process.finish()
    return 0


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would end the process by the signal instead of with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """Loading and serving, and the order in which they end."""

    def __init__(self, service: Service, server: _Uvicorn, load: Load, on_ready: Callable[[], None]) -> None:
        self._service = service
        self._server = server
        self._load = load
        self._on_ready = on_ready
        self._engine: ClosableEngine | None = None
        self._error: BaseException | None = None
        self._wind_down_task: asyncio.Task[None] | None = None

    async def main(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, loop)
        threading.Thread(target=self._load_and_attach, name="loader", daemon=True).start()
        # This thread, and the workers it will start, give way to the engine: a late step costs every client.
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HTTP_NICE)
        watch = asyncio.create_task(self._watch_engine())
        await self._server.serve(sockets=[sock])
        watch.cancel()
        with contextlib.suppress(TimeoutError):  # what was cancelled is still being stored
            async with asyncio.timeout(_AFTER_CANCEL):
                await self._service.runs.drain()
        self._service.close()

    def finish(self) -> None:
        """Close the engine; raises what ended the server, if that was no signal. What cannot be interrupted (a
        compilation, a step that hangs) is left behind."""
        loading = self._engine is None and self._error is None
        if not loading and self._closed():
            if self._error is not None:
                raise self._error
            return
        if self._error is not None:
            log.error("%s", self._error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter shutdown would wait for, or crash in, threads that are inside XLA.
        os._exit(0 if self._error is None else 1)

    def _closed(self) -> bool:
        """Close the engine, if there is one; whether it closed in time."""
        if self._engine is None:
            return True
        closer = threading.Thread(target=self._engine.close, name="closer", daemon=True)
        closer.start()
        closer.join(_ENGINE_CLOSE)
        if closer.is_alive():
            log.warning("the engine did not stop within %g s", _ENGINE_CLOSE)
        return not closer.is_alive()

    def _load_and_attach(self) -> None:
        try:
            self._engine, model = self._load(self._service)
            self._service.attach(self._engine, model)
            gc.collect()
            gc.freeze()  # what there is now stays: to look through it again would hold every answer up for 0.4 s
            if not self._service.stopping:
                self._on_ready()
        except BaseException as error:
            self._end_with(error)

    async def _watch_engine(self) -> None:
        """A server whose engine has died ends: whoever started it is to start another."""
        while self._engine is None or self._engine.failed is None:
            await asyncio.sleep(_WATCH)
        self._end_with(EngineStopped(self._engine.failed))

    def _end_with(self, error: BaseException) -> None:
        self._error = error
        self._server.should_exit = True

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._service.stopping:
            self._service.cancel_running()
            self._server.should_exit = self._server.force_exit = True
            return
        log.info("stopping: new requests are refused, running ones have %g s", self._service.config.shutdown_grace)
        self._service.stopping = True
        self._wind_down_task = loop.create_task(self._wind_down())

    async def _wind_down(self) -> None:
        """Let running answers end, cancel those that do not, and then stop listening."""
        service = self._service
        end = time.monotonic() + service.config.shutdown_grace
        hooks = [asyncio.ensure_future(hook()) for hook in service.on_stop]
        while (service.busy or not all(hook.done() for hook in hooks)) and time.monotonic() < end:
            await asyncio.sleep(_POLL)
        for hook in hooks:
            if not hook.done():
                log.warning("something was not ready to stop after %g s", service.config.shutdown_grace)
                hook.cancel()
            elif not hook.cancelled() and (error := hook.exception()) is not None:
                log.error("while stopping: %s", error, exc_info=error)
        service.cancel_running()
        self._server.should_exit = True
