"""Connections that are idle, slow, too many, or speak something else; and bodies and readers of any size and speed."""

from __future__ import annotations

import itertools
import json
import socket
import time

import pytest

from umbra.configs.server import ServerConfig
from umbra.serving.engine import Emission

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def connect(api):
    return socket.create_connection(("127.0.0.1", api.port), timeout=10)


def everything(sock):
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def answer_of(data):
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


def test_a_head_that_never_ends(start_api, wait):
    """Byte by byte: told 408 in JSON, and closed; also after a first request on the same connection."""
    api = start_api(ServerConfig(header_timeout=0.3))
    for before in (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
        with connect(api) as sock:
            if before:
                sock.sendall(before)
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            for byte in b"GET /healthz":
                sock.sendall(bytes([byte]))
                time.sleep(0.01)
            status, head, body = answer_of(everything(sock))
            assert status == 408 and b"connection: close" in head and body["error"]["code"] == "request_timeout"
    assert api.client.get("/healthz").status_code == 200


def test_a_body_that_never_ends(start_api, wait):
    api = start_api(ServerConfig(body_timeout=0.3))
    with connect(api) as sock:
        sock.sendall(CHAT + b"Content-Length: 100\r\n\r\n{")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")
    wait(lambda: api.service.inflight == 0)


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4 + b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"NONSENSE\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", b"GET /" + b"a" * 200_000],
    ids=["TLS", "version", "no request", "two hosts", "negative length", "long header", "long path"],
)  # fmt: skip
def test_what_is_not_http(api, sent):
    with connect(api) as sock:
        try:
            sock.sendall(sent)
            status, _, body = answer_of(everything(sock))
        except ConnectionResetError:  # it was closed while we were still sending
            assert len(sent) > 100_000
            return
        assert status == 400 and body["error"]["code"] == "invalid_http"


def test_too_many_connections(start_api, wait):
    api = start_api(ServerConfig(max_connections=3))
    held = [connect(api) for _ in range(3)]
    wait(lambda: len(api.server.server_state.connections) == 3)
    with connect(api) as sock:
        status, head, body = answer_of(everything(sock))
        assert status == 503 and b"retry-after: 5" in head and body["error"]["code"] == "too_many_connections"
    held.pop().close()
    wait(lambda: len(api.server.server_state.connections) == 2)
    assert api.client.get("/healthz").status_code == 200
    for sock in held:
        sock.close()


def test_idle_connections_are_no_bother(api):
    idle = [connect(api) for _ in range(200)]
    assert api.chat().status_code == 200
    for sock in idle:
        sock.close()


def test_requests_one_after_the_other_without_waiting(api):
    with connect(api) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
        data = b""
        while data.count(b'{"status":"ok"}') < 5:
            data += sock.recv(65536)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1beta/models/fake:generateContent"])
@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies(api, path, declared):
    """Refused while they arrive; the connection stays in order for the reply."""
    size = 10_000_000
    pieces = (b"x" * 100_000 for _ in range(size // 100_000))
    headers = {"content-length": str(size)} if declared else {}
    response = api.client.post(path, content=pieces, headers=headers)
    assert response.status_code == 413 and "100000 bytes" in response.json()["error"]["message"]


def test_slow_readers_do_not_pile_up_memory(start_api, wait):
    """What a reader has not taken is one merged piece, and no more than its answer."""
    api = start_api(ServerConfig(send_timeout=30))
    api.engine.plan = lambda prompt, params: (Emission("x" * 1000, (97,)) for _ in itertools.count())
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    slow = [connect(api) for _ in range(50)]
    for sock in slow:
        sock.sendall(CHAT + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait(lambda: len(api.engine.running) == 50)
    time.sleep(0.5)
    for connection in list(api.server.server_state.connections):
        if connection.transport is not None:
            assert connection.transport.get_write_buffer_size() < 1 << 20
    api.engine.plan = lambda prompt, params: [Emission("ok", (1,), finish_reason="stop_token")]
    assert api.chat().status_code == 200
    for sock in slow:
        sock.close()
    wait(lambda: not api.engine.running)
