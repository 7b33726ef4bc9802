from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from umbra.configs.engine import EngineConfig
from umbra.configs.keys import digest_of
from umbra.configs.server import ServerConfig
from umbra.scripts.serve import given_keys, main, one_line, parser
from umbra.serving.api import Service
from umbra.serving.api.server import listen, run, url
from umbra.serving.engine import Emission, EngineStopped, Timings, Usage

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "argv",
    [["--level", "xhigh"], ["--cache-disk", "-1"], ["--port", "x"], ["--port", "70000"], ["--slots", "0"],
     ["--mesh", "data=0"], ["--mesh", "rows=2"], ["--tls-cert", "x"], ["--log-level", "loud"], ["--threads", "0"],
     ["--api-key", ""], ["--max-body", "0"], ["extra"], ["--host", "0.0.0.0"], ["--api-keys", "/no/such/file"],
     ["--requests-per-minute", "-1"], ["--cors-origin", "example.org"], ["--request-timeout", "0"],
     ["--new-api-key", "a b"], ["--state", "off", "--cache-memory", "1"]],
)  # fmt: skip
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for name in (
        "--model", "--host", "--port", "--quant", "--threads", "--mesh", "--slots", "--context-length", "--no-warmup",
        "--api-key", "--api-keys", "--new-api-key", "--requests-per-minute",
        "--cors-origin", "--log-level", "--level", "--lossy", "--max-queue", "--state",
        "--cache-disk", "--cache-memory", "--cache-objects", "--cache-log", "--tls-cert", "--tls-key", "--max-body",
    ):  # fmt: skip
        assert name in text


def test_a_new_key(capsys, tmp_path):
    assert main(["--new-api-key", "alice"]) == 0
    printed = capsys.readouterr().out
    secret, table = printed.removeprefix("key: ").split("\n\n", 1)
    file = tmp_path / "keys.toml"
    file.write_text(table)
    assert given_keys(parser().parse_args(["--api-keys", str(file)]))[0].sha256 == digest_of(secret.encode())


def test_keys_come_from_everywhere_and_once(monkeypatch, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[alice]\nsha256 = "{digest_of(b"one")}"\n')
    monkeypatch.setenv("UMBRA_API_KEYS", "one, two,,")
    monkeypatch.setenv("UMBRA_API_KEY", "three")
    keys = given_keys(parser().parse_args(["--api-keys", str(file), "--api-key", "two"]))
    assert [key.sha256 for key in keys] == [digest_of(text) for text in (b"one", b"two", b"three")]
    assert keys[0].name == "alice"


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--model", "tiny", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_model(capsys):
    assert main(["--model", "/no/such/model.gguf", "--port", "0"]) == 1
    out, err = capsys.readouterr()
    assert "ready" not in out
    assert "/no/such/model.gguf" in err.splitlines()[-1] and "Traceback" not in err


def test_missing_certificate(capsys):
    assert main(["--model", "tiny", "--port", "0", "--tls-cert", "/no/cert", "--tls-key", "/no/key"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("serve.py: ")


def test_errors_in_one_line():
    assert one_line(ValueError("two\nlines")) == "two lines"
    assert one_line(KeyError("x")) == "KeyError: 'x'"


def test_addresses():
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    assert url("127.0.0.1", sock) == f"http://127.0.0.1:{port}" and port > 0
    assert url("::1", sock) == f"http://[::1]:{port}"
    sock.close()
    with pytest.raises(OSError, match="no-such-host"):
        listen("no-such-host.invalid", 0)


class Engine:
    """Emits a token now and then, for ever."""

    ready = True
    failed: str | None = None
    config = EngineConfig()
    context_length = 100
    system_fingerprint = "fp"
    store = None

    def __init__(self):
        self.closed = False
        self.sinks = {}
        threading.Thread(target=self._loop, daemon=True).start()

    def choice_params(self, params, n):
        return [params] * n

    def submit(self, prompt_ids, params, *, sink, request_id=None, principal="local", keep="blocks", priority=0):
        self.sinks[request_id] = sink
        return request_id

    def cancel(self, request_id):
        if (sink := self.sinks.pop(request_id, None)) is not None:
            sink([(request_id, Emission("", (), (), (), "cancelled", Usage(1, 1), Timings(0, 0, 0, 0, 1)))])

    def finish(self):
        """End all answers."""
        while self.sinks:
            request_id, sink = self.sinks.popitem()
            sink([(request_id, Emission("", (), (), (), "stop_token", Usage(1, 1), Timings(0, 0, 0, 0, 1)))])

    def close(self):
        self.closed = True

    def _loop(self):
        while not self.closed:
            time.sleep(0.01)
            for request_id, sink in list(self.sinks.items()):
                sink([(request_id, Emission("", (1,)))])


MODEL = SimpleNamespace(name="m", config=SimpleNamespace(vocab_size=10), tokenizer=None, chat_template=None)
BODY = {"model": "m", "prompt": [1], "stream": True}


def test_a_stop_signal_ends_running_answers_and_the_server():
    """Listens at once, is ready later, refuses new work while stopping, tells running clients, closes the engine."""
    engine, ready, seen = Engine(), threading.Event(), {}
    loading = threading.Event()
    service = Service(ServerConfig(shutdown_grace=0.4))
    sock = listen("127.0.0.1", 0)
    address = url("127.0.0.1", sock)

    def load(service):
        loading.wait(5)
        return engine, MODEL

    def client():
        with httpx.Client(base_url=address, timeout=5) as http:
            while "early" not in seen:
                try:
                    seen["early"] = http.get("/readyz").status_code
                except httpx.ConnectError:
                    time.sleep(0.02)
            loading.set()
            ready.wait(5)
            with http.stream("POST", "/v1/completions", json=BODY) as response:
                lines = response.iter_lines()
                os.kill(os.getpid(), signal.SIGTERM)
                seen["lines"] = [line for line in lines if line]

    thread = threading.Thread(target=client)
    thread.start()
    began = time.monotonic()
    assert run(service, sock, load, ready.set) == 0
    thread.join(5)
    assert time.monotonic() - began < 10  # what a stop may take at most
    assert seen["early"] == 503
    told = json.loads(seen["lines"][-1].removeprefix("data: "))["error"]
    assert told["code"] == "shutting_down" and told["type"] == "server_error"
    assert told["message"] == "The server is stopping; send the request again in a moment"
    assert engine.closed
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def test_running_answers_may_end_and_new_requests_are_refused():
    """The port stays open for as long as something runs; what is registered to stop is waited for."""
    engine, ready, seen = Engine(), threading.Event(), {}
    service = Service(ServerConfig(shutdown_grace=4))
    sock = listen("127.0.0.1", 0)
    address = url("127.0.0.1", sock)

    async def goodbye():
        await asyncio.sleep(0.2)
        seen["goodbye"] = True

    async def broken():
        raise ValueError("cannot say goodbye")

    service.on_stop += [goodbye, broken]

    def client():
        ready.wait(5)
        with httpx.stream("POST", f"{address}/v1/completions", json=BODY, timeout=5) as response:
            lines = response.iter_lines()
            os.kill(os.getpid(), signal.SIGTERM)
            while not service.stopping:
                time.sleep(0.01)
            seen["refused"] = httpx.post(f"{address}/v1/completions", json=BODY)
            seen["readyz"] = httpx.get(f"{address}/readyz")
            engine.finish()
            seen["lines"] = [line for line in lines if line]

    thread = threading.Thread(target=client)
    thread.start()
    assert run(service, sock, lambda service: (engine, MODEL), ready.set) == 0
    thread.join(5)
    assert seen["refused"].status_code == 503 and int(seen["refused"].headers["retry-after"]) >= 1
    assert seen["refused"].json()["error"]["code"] == "shutting_down"
    assert seen["readyz"].json() == {"status": "stopping"}
    assert seen["lines"][-1] == "data: [DONE]" and seen["goodbye"]


def test_an_engine_that_dies_ends_the_server():
    """Readiness says so, and `run` raises what `main` makes one line and exit code 1 of."""
    engine, ready, seen = Engine(), threading.Event(), {}
    sock = listen("127.0.0.1", 0)
    address = url("127.0.0.1", sock)

    def client():
        ready.wait(5)
        engine.ready = False
        seen["readyz"] = httpx.get(f"{address}/readyz", timeout=5)
        engine.failed = "the engine failed: out of memory"

    thread = threading.Thread(target=client)
    thread.start()
    with pytest.raises(EngineStopped, match="^the engine failed: out of memory$") as error:
        run(Service(ServerConfig()), sock, lambda service: (engine, MODEL), ready.set)
    thread.join(5)
    assert seen["readyz"].status_code == 503 and seen["readyz"].json() == {"status": "failed"}
    assert engine.closed
    assert one_line(error.value) == "the engine failed: out of memory"


def test_a_failure_between_loading_and_ready():
    """Nothing is served that nobody was told of."""
    engine = Engine()

    def nobody_listens():
        raise BrokenPipeError("no stdout")

    with pytest.raises(BrokenPipeError):
        run(Service(ServerConfig()), listen("127.0.0.1", 0), lambda service: (engine, MODEL), nobody_listens)
    assert engine.closed


def test_a_stop_signal_while_loading():
    code = """
import time
from umbra.configs.server import ServerConfig
from umbra.serving.api import Service
from umbra.serving.api.server import listen, run
def load(service):
    print("loading", flush=True)
    time.sleep(60)
run(Service(ServerConfig()), listen("127.0.0.1", 0), load, lambda: None)
raise SystemExit(5)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0 and not err


def test_the_command_with_a_model(tmp_path):
    """From the command line to a streamed answer and a clean end, with the random trunk."""
    command = [
        sys.executable, str(ROOT / "scripts" / "serve.py"), "--model", "tiny", "--port", "0", "--slots", "2",
        "--context-length", "256", "--state", str(tmp_path / "state"),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(tmp_path / "err").open("w"), text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://127.0.0.1:"), (tmp_path / "err").read_text()
        with httpx.Client(base_url=line.split()[1], timeout=60) as http:
            assert http.get("/readyz").status_code == 200
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
            whole = http.post("/v1/completions", json=body).json()
            assert whole["usage"]["completion_tokens"] == 9 and whole["choices"][0]["finish_reason"] == "length"
            streamed = http.post("/v1/completions", json={**body, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
            assert "umbra_compilations_after_ready_total 0.0" in http.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()


@contextlib.contextmanager
def tiny_server(*options: str):
    """serve.py on the tiny trunk, in a process of its own; yields its address."""
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--model", "tiny", "--port", "0", "--slots", "4",
               "--context-length", "512", "--kv-memory", "0.01", "--state", "off", *options]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ready ").strip()
        assert address.startswith("http://127.0.0.1:")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_the_real_engine_on_one_device_and_on_a_mesh():
    """The same answers as far as float order allows, and nothing compiled after ready."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "logprobs": 1}
    logprobs = []
    for options in ((), ("--mesh", "data=2,model=2")):
        with tiny_server(*options) as address:
            answers = [httpx.post(f"{address}/v1/completions", json=body, timeout=60).json() for _ in range(3)]
            assert all(answer["usage"]["completion_tokens"] == 12 for answer in answers)
            each = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
            assert each[0] == each[1] == each[2]
            metrics = httpx.get(f"{address}/metrics").text
            assert "umbra_compilations_after_ready_total 0.0" in metrics
            assert "umbra_generated_tokens_total 36.0" in metrics
            logprobs.append(each[0])
    assert logprobs[1] == pytest.approx(logprobs[0], abs=2e-3)  # other sums, rounded to KV in int8
