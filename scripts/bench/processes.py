"""Worker processes of the systems under test: one runs at a time, the others are stopped and cost nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .systems import adapter
from .systems.base import Run, Scores, Setup


class BenchError(Exception):
    """A measurement cannot be made; one sentence."""


class Worker:
    """A system in its own process. It is stopped (SIGSTOP) except inside `with worker.turn():`."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile(mode="w+", prefix="umbra-bench-")  # noqa: SIM115 - lives with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "umbra.scripts.bench.worker", adapter(system)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
            start_new_session=True,  # an interrupt at the terminal is for us, who then end the workers
        )  # fmt: skip
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Worker]:
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def load(self, setup: Setup) -> None:
        loaded = self.ask({"op": "load", "setup": dataclasses.asdict(setup)})
        self.versions, self.settings = loaded["versions"], loaded["settings"]

    def describe(self, setup: Setup) -> Any:
        return self.ask({"op": "describe", "setup": dataclasses.asdict(setup)})

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        return Run.from_json(self.ask({"op": "generate", "prompts": prompts, "max_tokens": max_tokens}))

    def score(self, sequences: Sequence[Sequence[int]], begins: Sequence[int]) -> list[Scores]:
        scores = self.ask({"op": "score", "sequences": sequences, "begins": begins})
        return [Scores(**one) for one in scores]

    def call(self, method: str, *args: Any) -> Any:
        """Call a method that only this system's adapter has."""
        return self.ask({"op": method, "args": args})

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"{self.system}: its process {_ended(self._process.wait())}: {last_line(self._log)}")
        reply = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.system}: {reply['error']}")
        return reply["ok"]

    def close(self) -> None:
        self._process.kill()  # also ends a stopped process
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)


def last_line(log: Any) -> str:
    """The last line that is not empty of a log file that a process writes to."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


class Workers:
    """The workers of a benchmark, in the order in which they take turns; a context manager that ends them."""

    def __init__(self, systems: Sequence[str]) -> None:
        self._all: list[Worker] = []
        try:
            for system in systems:
                self._all.append(Worker(system))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def __getitem__(self, system: str) -> Worker:
        return next(worker for worker in self._all if worker.system == system)

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def gguf_path(path: str | None, model: str) -> Path:
    """The GGUF file that peers load. Raises `BenchError` when the model is not one."""
    if path is None or not path.endswith(".gguf"):
        supported = "supported: smollm2, gemma3-270m, a .gguf file"
        raise BenchError(f"--against needs a model in a GGUF file, which {model} is not; {supported}")
    return Path(path)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
