"""Keys, what they may use, what clients may wish for, and what is logged."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
import websockets.exceptions
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from umbra.configs.keys import ApiKey, Limits, digest_of, plain_keys
from umbra.configs.server import ServerConfig
from umbra.serving.api.principals import Allowance, Principal
from umbra.serving.engine import Emission
from umbra.serving.logs import Formatter, request_id

CONTENTS = {"contents": [{"parts": [{"text": "Hi"}]}]}
GEMINI = "/v1beta/models/fake:generateContent"


def silent(prompt, params):
    return itertools.repeat(None)


def key(name, tenant=None, priority="high", **limits):
    return ApiKey(name, digest_of(name.encode()), tenant or name, limits, priority)


def bearer(name):
    return {"authorization": f"Bearer {name}"}


# --- allowances


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_an_allowance_refills_evenly():
    clock = Clock()
    allowance = Allowance(60, clock)
    assert allowance.left == 60 and allowance.wait(1) == 0
    allowance.use(60)
    assert allowance.wait(1) == 1 and allowance.wait(60) == 60
    clock.now += 30
    assert allowance.left == 30
    allowance.use(90)  # overdrawn
    assert allowance.left == -60 and allowance.wait(1) == 61
    clock.now += 1000
    assert allowance.left == 60


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3))), st.integers(1, 100))
def test_no_more_is_had_than_allowed(asked, per_minute):
    """Over any time: a minute's worth to begin with, and what has been refilled since."""
    clock = Clock()
    allowance, had = Allowance(per_minute, clock), 0
    for wait, units in asked:
        clock.now += wait
        if not allowance.wait(units):
            allowance.use(units)
            had += units
    assert had <= per_minute + (clock.now - 100) * per_minute / 60 + 1e-6


def test_a_refused_request_costs_nothing():
    clock = Clock()
    who = Principal("t", "k", "high", Limits(requests_per_minute=2, tokens_per_minute=10), clock)
    assert who.admit() is None
    who.used(15)
    refused = who.admit()
    assert refused.status == 429 and "10 tokens per minute" in refused.message and refused.retry_after == 36
    assert dict(who.headers())[b"x-ratelimit-remaining-requests"] == b"1"
    clock.now += 36
    assert who.admit() is None


# --- limits over HTTP


def test_requests_per_minute(start_api):
    api = start_api(ServerConfig(api_keys=(key("a", requests_per_minute=2), key("b"))))
    for left in (1, 0):
        response = api.client.post("/v1/chat/completions", json=_chat(), headers=bearer("a"))
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = api.client.post("/v1/chat/completions", json=_chat(), headers=bearer("a"))
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    google = api.client.post(GEMINI, json=CONTENTS, headers={"x-goog-api-key": "a"})
    assert google.status_code == 429 and google.json()["error"]["status"] == "RESOURCE_EXHAUSTED"
    assert api.client.get("/v1/models", headers=bearer("a")).status_code == 200, "only what runs the model counts"
    other = api.client.post("/v1/chat/completions", json=_chat(), headers=bearer("b"))
    assert other.status_code == 200 and not [name for name in other.headers if "ratelimit" in name]


def test_tokens_per_minute(start_api):
    api = start_api(ServerConfig(api_keys=(key("a", tokens_per_minute=40),)))
    first = api.client.post("/v1/chat/completions", json=_chat(), headers=bearer("a"))
    used = first.json()["usage"]["total_tokens"]
    assert first.status_code == 200 and used < 40
    second = api.client.post("/v1/chat/completions", json=_chat(n=2), headers=bearer("a"))
    assert second.status_code == 200
    refused = api.client.post("/v1/chat/completions", json=_chat(), headers=bearer("a"))
    assert refused.status_code == 429 and "40 tokens per minute" in refused.json()["error"]["message"]


def test_requests_in_progress(start_api, wait):
    api = start_api(ServerConfig(heartbeat=0.1, limits=Limits(max_concurrent=1)))
    api.engine.plan = silent
    with api.client.stream("POST", GEMINI.replace("generate", "streamGenerate"), json=CONTENTS) as _:
        assert api.chat().status_code == 429
    wait(lambda: api.service.inflight == 0)
    api.engine.plan = lambda prompt, params: [Emission("ok", (1,), finish_reason="stop_token")]
    assert api.chat().status_code == 200


def test_low_priority_is_refused_first(start_api, wait):
    api = start_api(ServerConfig(max_inflight=2, heartbeat=0.1, api_keys=(key("low", priority="low"), key("any"))))
    api.engine.plan = silent
    url = GEMINI.replace("generate", "streamGenerate")
    with api.client.stream("POST", url, json=CONTENTS, headers=bearer("any")):
        assert api.client.post(GEMINI, json=CONTENTS, headers=bearer("low")).status_code == 429
        asked = {**bearer("any"), "x-goog-priority": "low"}
        assert api.client.post(GEMINI, json=CONTENTS, headers=asked).status_code == 429
        api.engine.plan = lambda prompt, params: [Emission("ok", (1,), finish_reason="stop_token")]
        assert api.client.post(GEMINI, json=CONTENTS, headers=bearer("any")).status_code == 200


def test_every_form_of_a_key(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("sécret")))
    for headers in ({"api-key": "sécret".encode()}, {"authorization": "Bearer x", "x-goog-api-key": "sécret".encode()}):
        assert api.client.get("/v1/models", headers=headers).status_code == 200
    assert api.client.get("/v1/models", params={"key": "sécret"}).status_code == 200
    for headers in ({"api-key": "x"}, {"cookie": "key=sécret".encode()}, {"authorization": "Basic sécret".encode()}):
        assert api.client.get("/v1/models", headers=headers).status_code == 401


# --- wishes


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({}, {}, 0), ({"x-goog-priority": "HIGH"}, {}, 1), ({"x-goog-priority": "low"}, {}, -1),
        ({}, {"service_tier": "flex"}, -1), ({}, {"service_tier": "priority"}, 1), ({}, {"priority": "low"}, -1),
        ({"x-goog-priority": "high"}, {"priority": "normal"}, 0), ({}, {"service_tier": "auto"}, 0),
    ],
)  # fmt: skip
def test_priority(api, headers, body, priority):
    response = api.client.post("/v1/chat/completions", json=_chat(**body), headers=headers)
    assert response.status_code == 200 and api.engine.submitted[-1].priority == priority


@pytest.mark.parametrize(("field", "value"), [("priority", "low"), ("serviceTier", "flex"), ("service_tier", "flex")])
def test_priority_in_a_body_of_gemini(api, field, value):
    assert api.client.post(GEMINI, json={**CONTENTS, field: value}).status_code == 200
    assert api.engine.submitted[-1].priority == -1
    refused = api.client.post(GEMINI, json={**CONTENTS, "contextPolicy": "all"})
    assert refused.status_code == 400 and "supported: aggressive" in refused.json()["error"]["message"]


def test_a_key_bounds_the_priority(start_api):
    api = start_api(ServerConfig(api_keys=(key("a", priority="low"),)))
    api.client.post(GEMINI, json=CONTENTS, headers={**bearer("a"), "x-goog-priority": "high"})
    assert api.engine.submitted[-1].priority == -1


@pytest.mark.parametrize("name", ["x-goog-priority", "x-goog-context-policy"])
def test_unknown_wishes(api, name):
    response = api.client.post(GEMINI, json=CONTENTS, headers={name: "urgent"})
    assert response.status_code == 400 and "supported: " in response.json()["error"]["message"]
    field = name.removeprefix("x-goog-").replace("-", "_")
    assert api.chat(**{field: 7}).json()["error"]["param"] == field


def test_a_context_policy_is_a_cap(api, monkeypatch):
    monkeypatch.setattr("umbra.serving.api.wishes.CONTEXT_CAPS", {"aggressive": 8, "default": 100})
    long = [{"role": "user", "content": "x" * 50}]
    assert api.chat(messages=long).status_code == 200
    assert api.chat(messages=long, context_policy="default").status_code == 200
    refused = api.chat(messages=long, context_policy="aggressive")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_window_exceeded"
    assert refused.json()["error"]["message"].startswith("context_window_exceeded: dynamic cap enforced")
    google = api.client.post(GEMINI, json=CONTENTS, headers={"x-goog-context-policy": "aggressive"})
    assert google.status_code == 400 and google.json()["error"]["status"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(start_api, wait, stream):
    api = start_api(ServerConfig(request_timeout=0.3))
    api.engine.plan = silent
    response = api.chat(stream=stream)
    error = json.loads(response.text.removeprefix("data: "))["error"]
    assert error["code"] == "deadline_exceeded" and "0.3 s" in error["message"]
    assert response.status_code == (200 if stream else 504)
    wait(lambda: api.engine.cancelled)


def test_a_client_may_ask_for_less_time(api, wait):
    api.engine.plan = silent
    response = api.client.post(
        "/v1/responses", json={"model": "fake", "input": "Hi"}, headers={"x-server-timeout": "0.2"}
    )
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    wait(lambda: api.engine.cancelled)


# --- pages of other origins


def test_cors_is_off_unless_asked_for(start_api, api):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for method, headers in (("OPTIONS", preflight), ("GET", {"origin": "https://a.example"})):
        response = api.client.request(method, "/v1/models", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]
    open_api = start_api(ServerConfig(cors_origins=("https://a.example",), api_keys=plain_keys("k")))
    asked = {**preflight, "access-control-request-headers": "authorization, content-type, x-goog-api-key"}
    response = open_api.client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://a.example"
    assert (
        open_api.client.options("/v1/models", headers={**preflight, "origin": "https://b.example"}).status_code == 400
    )
    refused = open_api.client.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


# --- the log


def lines(caplog):
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "umbra.requests"]


def test_a_line_for_each_request(start_api, caplog, wait):
    api = start_api(ServerConfig(api_keys=(key("sesame", tenant="cave"),)))
    with caplog.at_level(logging.DEBUG):
        api.client.post(
            "/v1/chat/completions?key=sesame", json=_chat(level="low", n=2), headers={"x-request-id": "me-1"}
        )
        wait(lambda: lines(caplog))
    (line,) = lines(caplog)
    assert line["id"] == "me-1" and line["status"] == 200 and line["route"] == line["path"] == "/v1/chat/completions"
    assert (line["tenant"], line["key"], line["level"], line["priority"]) == ("cave", "sesame", "low", 0)
    assert line["output_tokens"] == 36 and line["prompt_tokens"] > 0 and line["finish"] == "stop_token"
    assert set(line["stages_ms"]) == {"read", "template", "queue", "cache", "prefill", "decode", "stream"}
    assert line["total_ms"] >= line["stages_ms"]["template"] >= 0


def test_no_secret_is_logged(start_api, caplog, wait):
    api = start_api(ServerConfig(api_keys=plain_keys("open-sesame")))
    with caplog.at_level(logging.DEBUG):
        for headers in (bearer("open-sesame"), bearer("wrong-sesame"), {"x-goog-api-key": "open-sesame"}):
            api.client.post("/v1/chat/completions", json=_chat(), headers=headers)
        wait(lambda: len(lines(caplog)) == 3)
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore")))
    assert "sesame" not in ours and '"status":401' in ours


def test_a_refused_request_is_logged_without_tokens(api, caplog, wait):
    with caplog.at_level(logging.INFO):
        api.chat(messages=7)
        wait(lambda: lines(caplog))
    (line,) = lines(caplog)
    assert line["status"] == 400 and "output_tokens" not in line and "tenant" not in line


def test_lines_of_a_request_carry_its_id(api, caplog):
    seen = []
    plain = logging.LogRecord("umbra.x", logging.INFO, "", 0, "something", (), None)

    class Template(type(api.model.chat_template)):
        def encode(self, *args, **options):
            seen.append(Formatter("%(message)s").format(plain))  # in a worker
            return super().encode(*args, **options)

    template, api.model.chat_template = api.model.chat_template, Template()
    api.attach()
    try:
        api.client.post("/v1/chat/completions", json=_chat(), headers={"x-request-id": "abc"})
    finally:
        api.model.chat_template = template
    assert seen == ["[abc] something"]
    assert request_id.get() == "" and Formatter("%(message)s").format(plain) == "something"


def _chat(**options):
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], **options}


# --- tenants


def test_tenants_share_nothing(start_api):
    """Neither caches nor what is stored nor what is counted; two keys of one tenant do share."""
    api = start_api(
        ServerConfig(api_keys=(key("a", tenant="crimson"), key("b", tenant="crimson"), key("c", tenant="azure")))
    )
    made = {}
    for name in ("a", "b", "c"):
        sent = {"model": "fake", "input": "Hi"}
        made[name] = api.client.post("/v1/responses", json=sent, headers=bearer(name)).json()["id"]
    assert [one.principal for one in api.engine.submitted] == ["crimson", "crimson", "azure"]
    for name, status in (("a", 200), ("b", 200), ("c", 404)):
        assert api.client.get(f"/v1/responses/{made['a']}", headers=bearer(name)).status_code == status
    text = api.client.get("/metrics", headers=bearer("c")).text
    assert "umbra_requests" in text and not any(word in text for word in ("crimson", "azure", made["a"]))


def test_a_socket_needs_a_key(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("k")))
    url = f"ws://127.0.0.1:{api.port}/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused, connect(url, proxy=None):
        pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body)["error"]["message"].startswith("Incorrect or missing API key")
    with connect(f"{url}?key=k", proxy=None) as socket:
        socket.close()
