"""Servers under test: started, waited for, stopped while another has its turn, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from ...configs.files import cache_dir
from .plan import Plan
from .processes import BenchError, last_line

START_TIMEOUT = 900.0
"""Seconds a server may take to be ready: a first start compiles everything."""

SERVE = Path(__file__).parent.parent / "serve.py"


class Server:
    """A server process. `start_s` is the time from its start until it was ready."""

    def __init__(self, system: str, command: Sequence[str], env: dict[str, str], port: int | None) -> None:
        self.system = system
        self.url = f"http://127.0.0.1:{port}"
        self._known_port = port is not None
        self._out = tempfile.TemporaryFile(mode="w+", prefix="umbra-bench-")  # noqa: SIM115 - live with the server
        self._log = tempfile.TemporaryFile(mode="w+", prefix="umbra-bench-")  # noqa: SIM115
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "umbra.scripts.bench.launch", *command],
            env=env, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            self._wait(began + START_TIMEOUT)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - began

    def _wait(self, deadline: float) -> None:
        while not self._is_ready():
            if self._process.poll() is not None:
                status = self._process.returncode
                raise BenchError(f"the server of {self.system} ended with status {status}: {last_line(self._log)}")
            if time.perf_counter() > deadline:
                raise BenchError(f"the server of {self.system} was not ready after {START_TIMEOUT:.0f} s")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        """Ours says so in a line on stdout, which names the address; a peer's answers a request."""
        if self._known_port:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/v1/models", timeout=5.0).status_code == 200
            return False
        found = re.search(r"^ready (http://\S+)$", os.pread(self._out.fileno(), 65536, 0).decode(), re.MULTILINE)
        if found:
            self.url = found.group(1).rstrip("/")
        return found is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    def model(self) -> str:
        """The model's name in requests."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=30.0).json()["data"][0]["id"])

    def metric(self, name: str) -> float | None:
        """A value from `/metrics`; None when there is none of that name."""
        found = re.search(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics", timeout=30.0).text, re.MULTILINE)
        return float(found.group(1)) if found else None

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Server]:
        self._process.send_signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.suspend()

    def close(self) -> None:
        """End the server: politely, then not."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._log.close()


def our_server(plan: Plan, cache_home: Path | None) -> Server:
    """Ours, with its files in `cache_home` (see `empty_cache`) or where the user has them."""
    command = [
        sys.executable, str(SERVE), "--model", plan.model, "--quant", plan.quant, "--kernels", plan.kernels,
        "--kv", plan.kv, "--embedding", plan.embedding, "--draft", plan.draft, "--shadow", plan.shadow,
        "--host", "127.0.0.1", "--port", "0", "--threads", str(plan.threads), "--slots", str(plan.sequences),
        "--state", "off",
    ]  # fmt: skip
    if plan.mesh:
        command += ["--mesh", f"data={plan.mesh[0]},model={plan.mesh[1]}"]
    env = dict(os.environ)
    if cache_home is not None:
        env["XDG_CACHE_HOME"] = str(cache_home)
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
    return Server("umbra", command, env, None)


def peer_server(plan: Plan, gguf: Path, context: int) -> Server:
    """llama.cpp's server from llama-cpp-python. It must not drop a running request when the next one comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port),
        "--n_ctx", str(context), "--n_threads", str(plan.threads), "--n_threads_batch", str(plan.threads),
        "--interrupt_requests", "false",
    ]  # fmt: skip
    return Server("llama.cpp", command, dict(os.environ), port)


@contextlib.contextmanager
def empty_cache() -> Iterator[Path]:
    """A cache folder as on a machine where only the models were fetched yet: nothing is compiled."""
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        home = Path(folder)
        (home / "umbra").mkdir()
        models = cache_dir() / "models"
        models.mkdir(parents=True, exist_ok=True)
        (home / "umbra" / "models").symlink_to(models.resolve())
        yield home
