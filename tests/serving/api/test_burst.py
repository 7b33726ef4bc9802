"""Many clients at once over the real engine, half of which leave: everything they held comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from umbra.configs.engine import EngineConfig
from umbra.configs.server import ServerConfig
from umbra.serving.api import Service, create_app
from umbra.serving.engine import Engine

REQUESTS = 100
TOKENS = 24
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(random_model) -> Iterator[SimpleNamespace]:
    """A tiny random model behind a real server: 4 slots, and too few blocks for 4 of the longer sequences."""
    service = Service(ServerConfig(max_body=100_000))
    config = EngineConfig(slots=4, context_length=512, blocks=9, prefill_chunk=32, max_queue=2 * REQUESTS)
    model = random_model()
    with Engine(model, config, metrics=service.engine_metrics) as engine:
        engine.start()
        service.attach(engine, model)
        app = create_app(service)
        http = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", access_log=False)
        )
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await http.serve()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        while not http.started:
            thread.join(0.01)
        port = http.servers[0].sockets[0].getsockname()[1]
        yield SimpleNamespace(service=service, engine=engine, port=port, loop=loops[0])
        http.should_exit = True
        thread.join(10)
        service.close()


def body(i: int, **options: object) -> dict[str, object]:
    """Request `i`: prompts of many lengths, every third of which share their first block."""
    words = random.Random(i)
    shared = list(range(1, 129)) if i % 3 == 0 else []
    prompt = [*shared, *(words.randrange(1, 256) for _ in range(words.randrange(1, 120)))]
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0, "seed": i, **options}


async def ask(client: httpx.AsyncClient, i: int, port: int, rng: random.Random) -> str | None:
    """Send request `i`; the text of its answer, or None when the client left before it was complete."""
    how = rng.choice(("whole", "stream", "whole", "stream", "no patience", "in the stream", "in the body"))
    if how == "whole":
        answer = await client.post(PATH, json=body(i))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    if how == "no patience":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 0.3)):
                await client.post(PATH, json=body(i, max_tokens=300))
    elif how == "in the body":
        await asyncio.to_thread(half_a_request, port, json.dumps(body(i)).encode())
    else:
        events = rng.randrange(1, TOKENS // 2) if how == "in the stream" else None
        return await read_stream(client, i, events)
    return None


async def read_stream(client: httpx.AsyncClient, i: int, events: int | None) -> str | None:
    """Read a whole stream, or leave after so many events."""
    text, seen = "", 0
    async with client.stream("POST", PATH, json=body(i, stream=True)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                seen += 1
                if seen == events:
                    return None
    raise AssertionError("the stream ended early")


def half_a_request(port: int, content: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        sock.sendall(content[: len(content) // 2])


async def burst(port: int, seed: int) -> list[str | None]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as client:
        return await asyncio.gather(*(ask(client, i, port, random.Random(rng.random())) for i in range(REQUESTS)))


def tasks(server: SimpleNamespace) -> int:
    """Tasks of the server's event loop, but for the one that counts them."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(10)


def metric(port: int, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"connection": "close"}).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)} (.+)$", text, flags=re.M))


def test_a_burst_leaves_nothing_behind(server, wait):
    port, engine = server.port, server.engine
    httpx.post(f"http://127.0.0.1:{port}{PATH}", json=body(0), headers={"connection": "close"}, timeout=60)
    wait(lambda: server.service.inflight == 0, 30)
    at_first = tasks(server)

    texts = asyncio.run(burst(port, seed=1))
    wait(lambda: server.service.inflight == 0, 60)
    wait(lambda: engine.stats().running + engine.stats().waiting + engine.stats().paused == 0, 60)
    wait(lambda: tasks(server) == at_first, 10)
    stats = engine.stats()
    assert stats.free_slots == stats.total_slots == 4 and stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert stats.compilations_after_ready == 0
    engine.check()

    complete = [i for i, text in enumerate(texts) if text is not None]
    assert 20 < len(complete) < 90
    assert metric(port, 'umbra_requests_finished_total{reason="max_tokens"}') >= len(complete)
    assert metric(port, 'umbra_requests_finished_total{reason="cancelled"}') > 0
    assert metric(port, 'umbra_requests_finished_total{reason="error"}') == 0
    left = f'umbra_http_requests_total{{method="POST",route="{PATH}",status="499"}}'
    assert 0 < metric(port, left) <= REQUESTS - len(complete)
    for gauge in ("umbra_requests_running", "umbra_requests_waiting", "umbra_kv_blocks_used"):
        wait(lambda gauge=gauge: metric(port, gauge) == 0)

    # Who came and went around an answer did not change it.
    for i in complete[:: len(complete) // 5]:
        alone = httpx.post(f"http://127.0.0.1:{port}{PATH}", json=body(i), timeout=60).json()
        assert alone["choices"][0]["text"] == texts[i]
