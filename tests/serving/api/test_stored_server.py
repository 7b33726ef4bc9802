"""A server that dies or is stopped in the middle of answers, and the one that comes after it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

SERVER = Path(__file__).with_name("stored_server.py")
TEXT = "".join(chr(0x61 + i % 26) for i in range(300))
KILLS = int(os.environ.get("UMBRA_TEST_KILLS", "1"))


@contextlib.contextmanager
def server(folder, text=TEXT, milliseconds=10):
    command = [sys.executable, SERVER, folder, text, str(milliseconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://")
        with httpx.Client(base_url=address, timeout=20) as client:
            client.process = process
            yield client
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def text_of(interaction):
    return "".join(part["text"] for step in interaction["steps"] for part in step["content"])


def ask(client, given="Hi", **body):
    answer = client.post("/v1/interactions", json={"model": "fake", "input": given, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def deltas(stream):
    blocks = [block.split("data: ")[1] for block in stream.split("\n\n") if "data: {" in block]
    return "".join(e["delta"]["text"] for e in map(json.loads, blocks) if e["event_type"] == "step.delta")


def check_after_a_kill(client, acknowledged):
    """What was acknowledged is there with what had been stored, and is gone on with from exactly these tokens."""
    for id, least in acknowledged.items():
        one = client.get(f"/v1/interactions/{id}").json()
        assert one["status"] == "incomplete" and TEXT.startswith(text_of(one))
        assert len(text_of(one)) >= least
        assert one["usage"]["total_output_tokens"] == len(text_of(one))
        again = client.get(f"/v1/interactions/{id}", params={"stream": "true"}).text
        assert deltas(again) == text_of(one) and "interaction.completed" in again
        more = ask(client, "on", previous_interaction_id=id, background=True)["id"]
        assert client.post(f"/v1/interactions/{more}/cancel").json()["status"] == "cancelled"
        expected = len(f"user: Hi\n{text_of(one)}\nuser: on\n")
        assert client.get(f"/v1/interactions/{more}").json()["usage"]["total_input_tokens"] == expected


def run_until_killed(client):
    """Ids of what was running, and how many characters of each must be there."""
    ids = [ask(client, background=True)["id"] for _ in range(3)]
    time.sleep(random.uniform(0.1, 1.5))
    seen = {id: len(text_of(client.get(f"/v1/interactions/{id}").json())) for id in ids}
    time.sleep(random.choice([0, 0.6]))
    client.process.send_signal(signal.SIGKILL)
    client.process.wait(10)
    return {id: max(0, length - 120) for id, length in seen.items()}  # half a second may be lost


def run_until_stopped(client, path):
    """A stored answer in the background, and one that is read; both are cut off by the stop."""
    body = {"model": "fake", "input": "Hi"}
    return client.post(f"/v1/{path}", json={**body, "background": True}).json()["id"], client.build_request(
        "POST", f"/v1/{path}", json={**body, "stream": True}
    )


def check_after_a_stop(client, path, id):
    one = client.get(f"/v1/{path}/{id}").json()
    assert one["status"] == "incomplete", one
    pieces = one["steps"] if path == "interactions" else one["output"]
    text = "".join(part["text"] for item in pieces for part in item["content"])
    assert TEXT.startswith(text) and len(text) > 10
    name = "previous_interaction_id" if path == "interactions" else "previous_response_id"
    body = {"model": "fake", "input": "on", "background": True, name: id}
    more = client.post(f"/v1/{path}", json=body).json()
    assert more["status"] == "in_progress"
    client.post(f"/v1/{path}/{more['id']}/cancel")


def test_kills_a_stop_and_restarts(tmp_path):
    folder, acknowledged = tmp_path / "state", {}
    with server(folder) as client:
        body = {"model": "models/fake", "contents": [{"parts": [{"text": "a document "}]}], "ttl": "900s"}
        content = client.post("/v1beta/cachedContents", json=body).json()
        acknowledged = run_until_killed(client)
    for _ in range(KILLS - 1):
        with server(folder) as client:
            check_after_a_kill(client, acknowledged)
            acknowledged = run_until_killed(client)

    ids = {}
    with server(folder) as client, contextlib.ExitStack() as stack:
        check_after_a_kill(client, acknowledged)
        streams = {}
        for path in ("interactions", "responses"):
            ids[path], request = run_until_stopped(client, path)
            streams[path] = stack.enter_context(contextlib.closing(client.send(request, stream=True))).iter_text()
        time.sleep(0.4)
        client.process.send_signal(signal.SIGTERM)
        told = {path: "".join(parts) for path, parts in streams.items()}
        assert client.process.wait(10) == 0

    with server(folder, "ok", 1) as client:
        for path, seen in told.items():
            first, last = json.loads(seen.split("data: ")[1].split("\n")[0]), seen.split("data: ")
            assert '"status":"incomplete"' in last[-1 if path == "responses" else -2]
            for id in (ids[path], (first.get("interaction") or first["response"])["id"]):
                check_after_a_stop(client, path, id)
        assert client.get(f"/v1beta/{content['name']}").json() == content
        asked = {"contents": [{"parts": [{"text": "What?"}]}], "cachedContent": content["name"]}
        used = client.post("/v1beta/models/fake:generateContent", json=asked).json()["usageMetadata"]
        assert used["cachedContentTokenCount"] == content["usageMetadata"]["totalTokenCount"]
