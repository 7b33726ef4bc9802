"""A server on loopback over a scripted engine: everything but the model is real."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from umbra.configs.engine import EngineConfig
from umbra.configs.server import ServerConfig
from umbra.model.chat_template import ChatTemplateError, Known
from umbra.serving.api import Service, create_app
from umbra.serving.api.connections import MAX_HEAD, connections
from umbra.serving.engine import (
    Emission,
    EngineStopped,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    Sink,
    Timings,
    TokenLogprob,
    Usage,
)
from umbra.serving.engine.thoughts import Channels

VOCAB = 300
CONTEXT = 1000
STEP = 0.002


class FakeTokenizer:
    """Bytes are tokens; above them are two special tokens and one of eight bytes."""

    vocab_size = VOCAB
    add_bos = False
    special = {"<|im_start|>": 256, "<|im_end|>": 257}

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        if special and text in self.special:
            return [self.special[text]]
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"abcdefgh" if token == 258 else b""

    def token_str(self, token: int) -> str:
        return {v: k for k, v in self.special.items()}.get(token, f"<{token}>")


class FakeTemplate:
    source = ""
    variables: frozenset[str] = frozenset()

    def render(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return ""

    def encode(
        self,
        tokenizer: FakeTokenizer,
        messages: list[dict[str, Any]],
        *,
        suffix: str = "",
        known: Known | None = None,
        until: str | None = None,
        **_: Any,
    ) -> list[int]:
        if any(message["content"] == "refuse this" for message in messages):
            raise ChatTemplateError("roles must alternate")
        if any(message["content"] == "explode" for message in messages):
            raise KeyError("secret detail")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += suffix
        if until is not None:
            text = text.partition(until)[0]
        if known is not None:
            return known.join(tokenizer.encode(text.partition(known.mark)[2]))
        return tokenizer.encode(text)


Step = Emission | None
"""What a request emits in a step; None: nothing."""


def answer(text: str, finish: str = "stop_token") -> list[Step]:
    """One emission per byte of `text`, whole characters only, and the last one."""
    out: list[Step] = []
    pending = b""
    for byte in text.encode():
        pending += bytes([byte])
        try:
            piece = pending.decode()
            pending = b""
        except UnicodeDecodeError:
            piece = ""
        out.append(Emission(piece, (byte,)))
    return [*out, Emission("", finish_reason=finish)]  # type: ignore[arg-type]


@dataclasses.dataclass
class Running:
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    steps: Iterator[Step]
    tokens: int = 0
    taken: int = 0
    priority: int = 0
    principal: str = "local"
    keep: str = "blocks"


class FakeEngine:
    """The engine's interface over a script. `plan(prompt, params)` gives the steps of a request."""

    system_fingerprint = "fp_fake"
    store = None
    context_length = CONTEXT

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing = False
        self._ids = itertools.count()
        self.running: dict[str, Running] = {}
        self.reset()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        with self._lock:
            self.running.clear()
            self.ready = True
            self.failed: str | None = None
            self.config = EngineConfig(embeddings=True)
            self.stopped = False
            self.max_queue = 1000
            self.submitted: list[Running] = []
            self.cancelled: list[str] = []
            self.plan: Callable[[list[int], SamplingParams], Sequence[Step] | Iterator[Step]] = lambda prompt, params: (
                answer("Hello, wörld 🎉")
            )

    def choice_params(self, params: SamplingParams, n: int) -> list[SamplingParams]:
        return [dataclasses.replace(params, seed=(params.seed or 0) + i) for i in range(n)]

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        sink: Sink,
        request_id: str | None = None,
        principal: str = "local",
        keep: str = "blocks",
        priority: int = 0,
    ) -> str:
        if self.stopped:
            raise EngineStopped("the engine is not running")
        if len(prompt_ids) >= self.context_length:
            raise PromptTooLong(len(prompt_ids), self.context_length)
        with self._lock:
            if len(self.running) >= self.max_queue:
                raise QueueFull(len(self.running), 2.5)
            name = request_id or str(next(self._ids))
            steps = iter(self.plan(list(prompt_ids), params))
            one = Running(list(prompt_ids), params, sink, steps, priority=priority, principal=principal, keep=keep)
            self.submitted.append(one)
            self.running[name] = one
        return name

    def cancel(self, request_id: str) -> None:
        with self._lock:
            one = self.running.pop(request_id, None)
            if one is None:
                return
            self.cancelled.append(request_id)
        one.sink([(request_id, self._last(one, Emission("", finish_reason="cancelled")))])

    def close(self) -> None:
        self._closing = True
        self._thread.join(2)

    def _loop(self) -> None:
        while not self._closing:
            time.sleep(STEP)
            by_sink: dict[int, tuple[Sink, list[tuple[str, Emission]]]] = {}
            with self._lock:
                for name, one in list(self.running.items()):
                    emission = next(one.steps, None)
                    one.taken += 1
                    if emission is None:
                        continue
                    one.tokens += len(emission.token_ids)
                    if one.params.logprobs is not None:
                        emission = dataclasses.replace(emission, logprobs=self._logprobs(one, emission))
                    if emission.finish_reason is not None:
                        emission = self._last(one, emission)
                        del self.running[name]
                    by_sink.setdefault(id(one.sink), (one.sink, []))[1].append((name, emission))
            for sink, pairs in by_sink.values():
                sink(pairs)

    def _logprobs(self, one: Running, emission: Emission) -> tuple[TokenLogprob, ...]:
        top = tuple((i, -float(i) if i else float("-inf")) for i in range(65, 65 + (one.params.logprobs or 0)))
        return tuple(TokenLogprob(token, -0.5, top) for token in emission.token_ids)

    def _last(self, one: Running, emission: Emission) -> Emission:
        return dataclasses.replace(
            emission,
            usage=emission.usage or Usage(len(one.prompt), one.tokens, cached_tokens=min(4, len(one.prompt))),
            timings=Timings(queued=0.001, ttft=0.01, total=0.1, decode=0.09, passes=max(one.tokens, 1)),
        )


class Api:
    """A running server, its engine, and a client for it."""

    def __init__(self, config: ServerConfig, *, attached: bool = True, tls: tuple[Path, Path] | None = None) -> None:
        self.engine = FakeEngine()
        self.model = SimpleNamespace(
            name="fake",
            config=SimpleNamespace(vocab_size=VOCAB, d_model=4),
            tokenizer=FakeTokenizer(),
            chat_template=FakeTemplate(),
        )
        self.service = Service(config)
        if attached:
            self.attach()
        uv = uvicorn.Config(
            create_app(self.service),
            host="127.0.0.1",
            port=0,
            http=connections(config),
            h11_max_incomplete_event_size=MAX_HEAD,
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
        )
        self.server = uvicorn.Server(uv)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=10, verify=tls is None)

    def attach(self) -> None:
        self.service.attach(self.engine, self.model)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve())

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(5)
        self.service.close()
        self.engine.close()

    def chat(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(**body))

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "fake", "prompt": "Say", **body})


def chat_body(**body: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], **body}


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def shared_api() -> Iterator[Api]:
    api = Api(ServerConfig(max_body=100_000, max_choices=8, heartbeat=0.2, body_timeout=3.0))
    yield api
    api.close()


@pytest.fixture
def api(shared_api: Api) -> Iterator[Api]:
    """The server, with its engine's script and records reset."""
    shared_api.engine.reset()
    shared_api.attach()
    yield shared_api
    runs = shared_api.service.runs
    shared_api.loop.call_soon_threadsafe(runs.stop_all)
    wait_for(lambda: shared_api.service.inflight == 0 and not runs.running)


@pytest.fixture
def start_api() -> Iterator[Callable[..., Api]]:
    """Start a server of one's own."""
    started: list[Api] = []

    def start(config: ServerConfig | None = None, **options: Any) -> Api:
        started.append(Api(config or ServerConfig(), **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def start_tiny() -> Iterator[Callable[..., Api]]:
    """Start a server over an engine that is not a script, and its model."""
    started: list[Api] = []

    def start(engine: Any, model: Any) -> Api:
        api = Api(ServerConfig(), attached=False)
        started.append(api)
        served = SimpleNamespace(
            name="tiny", config=model.config, tokenizer=model.tokenizer, chat_template=FakeTemplate()
        )
        api.service.attach(engine, served)
        return api

    yield start
    for one in started:
        one.close()


@pytest.fixture
def make_answer() -> Callable[..., list[Step]]:
    return answer


def speak(
    thoughts: str, answer: str, params: SamplingParams, sizes: Iterator[int], finish: str = "stop_token"
) -> list[Step]:
    """The emissions of an answer, a byte a token, in steps of these sizes; with thoughts if it was asked to think."""
    end = b"</think>\n\n" if params.thinking is not None else b""
    tokens = [*(thoughts.encode() if end else b""), *end, *answer.encode(), 257]
    channels = Channels(lambda token: bytes([token]) if token < 256 else b"", params.stop, params.thinking)
    out, used = [], 0
    while tokens:
        size = next(sizes)
        step, tokens = tokens[:size], tokens[size:]
        thought, text, _ = channels.push(step)
        used += len(step)
        out.append(Emission(text, tuple(step), thought=thought))
    thought, text = channels.finish()
    usage = Usage(9, used, thought_tokens=channels.thought_tokens)
    return [*out, Emission(text, thought=thought, finish_reason=finish, usage=usage)]


@pytest.fixture
def spoken() -> Callable[..., list[Step]]:
    return speak


@pytest.fixture
def wait() -> Callable[..., None]:
    return wait_for
