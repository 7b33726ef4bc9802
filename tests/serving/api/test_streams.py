"""Clients that leave, that read slowly, and streams that fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time

import httpx
import pytest

from umbra.configs.server import ServerConfig
from umbra.serving.api.bridge import Bridge, Reply, merge
from umbra.serving.api.errors import ClientGone
from umbra.serving.engine import Emission, TokenLogprob

CHAT = "/v1/chat/completions"


def forever(prompt, params):
    return (Emission("word ", (97,)) for _ in itertools.count())


def silent(prompt, params):
    return itertools.repeat(None)


def body(**options):
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], **options}


def send(api, **options):
    """A raw connection that has sent a request and reads nothing."""
    data = json.dumps(body(**options)).encode()
    sock = socket.create_connection(("127.0.0.1", api.port), timeout=5)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("plan", [silent, forever], ids=["before the first token", "while answering"])
def test_a_client_that_leaves_is_noticed(api, wait, plan, stream):
    api.engine.plan = plan
    sock = send(api, stream=stream, n=2)
    wait(lambda: len(api.engine.running) == 2)
    time.sleep(0.05)
    sock.close()
    wait(lambda: len(api.engine.cancelled) == 2)
    wait(lambda: api.service.inflight == 0)
    wait(lambda: not api.service._bridge.running())


def test_leaving_a_stream_early_with_a_client_library(api, wait):
    api.engine.plan = forever
    with api.client.stream("POST", CHAT, json=body(stream=True)) as response:
        for _, _line in zip(range(6), response.iter_lines(), strict=False):
            pass
    wait(lambda: api.engine.cancelled)


def test_leaving_while_the_prompt_is_tokenized(api, wait):
    class Slow(type(api.model.chat_template)):
        def encode(self, tokenizer, messages, **_):
            time.sleep(0.3)
            return [1]

    template, api.model.chat_template = api.model.chat_template, Slow()
    api.attach()
    try:
        sock = send(api, stream=True)
        time.sleep(0.1)
        sock.close()
        wait(lambda: api.service.inflight == 0)
    finally:
        api.model.chat_template = template
    assert not api.engine.submitted and not api.engine.running


def test_leaving_in_the_middle_of_the_body(api, wait):
    sock = socket.create_connection(("127.0.0.1", api.port))
    sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
    time.sleep(0.05)
    sock.close()
    wait(lambda: api.service.inflight == 0)
    assert not api.engine.submitted


def test_a_slow_reader_costs_its_text_and_loses_nothing(api, wait):
    """Nobody reads while the engine emits more than the socket holds: all text arrives later."""
    count = 400

    def plan(prompt, params):
        for i in range(count):
            yield Emission(f"{i:020000} ", (97,))
        yield Emission("", finish_reason="stop_token")

    api.engine.plan = plan
    sock = send(api, stream=True)
    wait(lambda: not api.engine.running, 30)
    data = bytearray()
    while b"[DONE]" not in data[-100:]:
        data += sock.recv(1 << 20)
    sock.close()
    lines = [line for line in data.decode().split("\r\n") if line.startswith("data: ")]
    events = [json.loads(part[6:]) for line in lines for part in line.split("\n\n") if part.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == "".join(f"{i:020000} " for i in range(count))


def test_a_stuck_reader_does_not_disturb_others(api, wait):
    api.engine.plan = forever
    stuck = [send(api, stream=True) for _ in range(20)]
    wait(lambda: len(api.engine.running) == 20)
    api.engine.plan = lambda prompt, params: [Emission("ok", (1,), finish_reason="stop_token")]
    assert api.chat().status_code == 200
    for sock in stuck:
        sock.close()
    wait(lambda: not api.engine.running)


def test_a_reader_that_never_reads_is_given_up(start_api, wait):
    api = start_api(ServerConfig(send_timeout=0.3))
    api.engine.plan = lambda prompt, params: (Emission("x" * 200_000, (97,)) for _ in itertools.count())
    sock = send(api, stream=True)
    wait(lambda: api.engine.cancelled, 10)
    sock.close()


def test_keep_alive(api):
    api.engine.plan = lambda prompt, params: [*[None] * 250, Emission("x", (97,), finish_reason="stop_token")]
    response = api.chat(stream=True)
    assert response.text.startswith(": keep-alive\n\n") and response.text.endswith("data: [DONE]\n\n")


def test_text_before_a_failure_is_sent(api):
    """Also when a slow reader takes both at once."""
    api.engine.plan = lambda prompt, params: [Emission("par", (97,), finish_reason="error", error="the step failed")]
    told = [one for one in api.chat(stream=True).text.strip().split("\n\n") if not one.startswith(":")]
    role, text, error = (json.loads(one.removeprefix("data: ")) for one in told)
    assert text["choices"][0]["delta"] == {"content": "par"} and text["choices"][0]["finish_reason"] is None
    assert error["error"]["code"] == "engine_error"


def test_an_engine_failure_in_a_stream_is_told(api):
    api.engine.plan = lambda prompt, params: [
        Emission("par", (97,)), Emission("", finish_reason="error", error="the step failed"),
    ]  # fmt: skip
    response = api.chat(stream=True)
    last = response.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_error" and error["message"] == "The engine failed while answering"
    assert "[DONE]" not in response.text
    whole = api.chat()
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_error"


STOPPING = "The server is stopping; send the request again in a moment"


def test_what_a_stop_cuts_off_is_told_so_that_it_is_sent_again(api):
    """Each protocol's own form of a failure that may be retried."""
    api.engine.plan = lambda prompt, params: [Emission("a", (97,)), Emission("", finish_reason="cancelled")]
    refused = api.chat()
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    last = api.chat(stream=True).text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": STOPPING, "type": "server_error", "param": None, "code": "shutting_down"
    }  # fmt: skip
    gemini = {"contents": [{"parts": [{"text": "Hi"}]}]}
    text = api.client.post("/v1/models/fake:streamGenerateContent?alt=sse", json=gemini).text
    told = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (told["code"], told["status"], told["message"]) == (503, "UNAVAILABLE", STOPPING)
    for path in ("interactions", "responses"):
        refused = api.client.post(f"/v1/{path}", json={"model": "fake", "input": "Hi"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["message"] == STOPPING
        text = api.client.post(f"/v1/{path}", json={"model": "fake", "input": "Hi", "stream": True}).text
        last = json.loads([line for line in text.split("\n") if line.startswith("data: {")][-1].removeprefix("data: "))
        told = last.get("interaction") or last["response"]
        assert told["status"] == "incomplete"
        assert (told["errors"][0] if path == "interactions" else told["error"])["message"] == STOPPING


def test_a_bug_in_a_stream_is_told_without_details(api, caplog):
    api.engine.plan = lambda prompt, params: [Emission("a", (97,)), Emission(None, (97,)), Emission("b", (98,))]
    response = api.chat(stream=True, logprobs=True)
    error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "internal_error" and response.headers["x-request-id"] in error["message"]
    assert response.headers["x-request-id"] in caplog.text


def test_many_at_once(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"answer {params.seed}")

    async def run():
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=api.url, limits=limits, timeout=20) as client:
            return await asyncio.gather(*(client.post(CHAT, json=body(seed=i)) for i in range(100)))

    responses = asyncio.run(run())
    assert all(r.status_code == 200 for r in responses), [r.text for r in responses if r.status_code != 200][:3]
    texts = [r.json()["choices"][0]["message"]["content"] for r in responses]
    assert texts == [f"answer {i}" for i in range(100)]


def test_too_many_at_once(start_api, wait):
    api = start_api(ServerConfig(max_inflight=2))
    api.engine.plan = silent
    held = [send(api) for _ in range(2)]
    wait(lambda: len(api.engine.running) == 2)
    response = api.chat()
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert api.client.get("/healthz").status_code == 200
    for sock in held:
        sock.close()


# --- the bridge


def test_one_hand_over_per_step():
    calls = []

    class Loop:
        def call_soon_threadsafe(self, callback, *args):
            calls.append(args)
            callback(*args)

    async def run():
        bridge = Bridge(Loop())
        replies = [Reply(lambda _: None) for _ in range(3)]
        for i, reply in enumerate(replies):
            bridge.expect(str(i), reply)
        assert bridge.sink is bridge.sink, "the engine groups by sink"
        bridge.sink([(str(i), Emission(f"t{i}")) for i in range(3)])
        assert len(calls) == 1
        assert [await reply.take() for reply in replies] == [[(0, Emission(f"t{i}"))] for i in range(3)]

    asyncio.run(run())


def test_emissions_nobody_waits_for_are_dropped():
    async def run():
        bridge = Bridge(asyncio.get_running_loop())
        bridge.sink([("unknown", Emission("x"))])
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_reply_merges_what_waits():
    async def run():
        reply = Reply(lambda _: None)
        for name in ("a", "b"):
            reply.submitted(name)
        for i in range(1000):
            reply.put(i % 2, Emission(str(i % 10), (i,)))
        assert len(reply._pending[0]._parts) < 64
        [(zero, even), (one, odd)] = await reply.take()
        assert (zero, one) == (0, 1)
        assert even.token_ids == tuple(range(0, 1000, 2)) and odd.text == "13579" * 100
        assert await reply.take(0.01) == []
        reply.close()
        with pytest.raises(ClientGone):
            await reply.take()

    asyncio.run(run())


def test_close_cancels_what_is_not_finished():
    async def run():
        cancelled = []
        reply = Reply(cancelled.append)
        for name in ("a", "b", "c"):
            reply.submitted(name)
        reply.put(1, Emission("", finish_reason="stop_token"))
        reply.refused(2)
        reply.close()
        assert cancelled == ["a"]

    asyncio.run(run())


def test_merge_keeps_everything():
    parts = [
        Emission("a", (1,), (TokenLogprob(1, -1.0),), (5,)),
        Emission("", (2, 3)),
        Emission("b", (4,), finish_reason="max_tokens"),
    ]
    merged = merge(parts)
    assert merged.text == "ab" and merged.token_ids == (1, 2, 3, 4) and merged.digests == (5,)
    assert merged.finish_reason == "max_tokens" and len(merged.logprobs) == 1
