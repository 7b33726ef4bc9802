from __future__ import annotations

import re

import pytest

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.serving.api.service import served_name


def test_health(api):
    assert api.client.get("/healthz").json() == {"status": "ok"}
    assert api.client.head("/healthz").status_code == 200
    assert api.client.get("/readyz").status_code == 200


def test_the_root_says_where_to_go_on(api):
    told = api.client.get("/").json()
    assert (
        told["name"] == "umbra" and told["model"] == "fake" and "/" in api.client.get("/openapi.json").json()["paths"]
    )
    assert all(api.client.get(path).status_code == 200 for path in told["links"].values())
    assert {"/docs", "/v1/models", "/healthz"} <= set(told["links"].values()) and api.client.head(
        "/"
    ).status_code == 200


def test_not_ready_while_loading(start_api):
    api = start_api(attached=False)
    assert api.client.get("/").json()["model"] is None
    api.service.progress = "compiling 3/12"
    assert api.client.get("/healthz").status_code == 200
    response = api.client.get("/readyz")
    assert response.status_code == 503 and response.json() == {"status": "starting", "progress": "compiling 3/12"}
    refused = api.chat()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_not_ready"
    assert "compiling 3/12" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1
    assert api.client.get("/v1/models").status_code == 503
    api.attach()
    assert api.client.get("/readyz").status_code == 200 and api.chat().status_code == 200


def test_not_ready_when_the_engine_is_not(api):
    api.engine.ready = False
    response = api.client.get("/readyz")
    assert response.status_code == 503 and response.json() == {"status": "failed"}
    assert api.client.get("/healthz").status_code == 200


def test_stopping(start_api):
    api = start_api()
    api.service.stopping = True
    assert api.client.get("/readyz").json()["status"] == "stopping"
    refused = api.chat()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"


def test_models_have_both_shapes(api):
    listed = api.client.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["fake"]
    assert set(listed["data"][0]) == {"id", "object", "created", "owned_by"}
    gemini = listed["models"][0]
    assert gemini["name"] == "models/fake" and gemini["inputTokenLimit"] == 999
    one = api.client.get("/v1/models/fake").json()
    assert one == {**listed["data"][0], **gemini}


@pytest.mark.parametrize(
    ("spec", "name"),
    [("smollm2", "smollm2"), ("hf:org/Some-Model", "Some-Model"), ("/a/b/c.Q4.gguf", "c.Q4"), ("folder/x/", "x")],
)
def test_served_name(spec, name):
    assert served_name(spec) == name


def test_metrics(api):
    api.chat()
    api.client.get("/v1/models/whatever")
    api.client.get("/nowhere/special")
    response = api.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    assert re.search(r'umbra_http_requests_total\{method="POST",route="/v1/chat/completions",status="200"\} \d', text)
    assert 'route="/v1/models/{model_id:path}",status="404"' in text
    assert 'method="GET",route="unmatched",status="404"' in text
    assert "special" not in text and "whatever" not in text
    assert "umbra_compilations_after_ready_total 0.0" in text
    assert "umbra_time_to_first_token_seconds_bucket" in text


def test_a_client_that_left_is_counted(api, wait):
    import itertools

    import httpx

    api.engine.plan = lambda prompt, params: itertools.repeat(None)
    with pytest.raises(httpx.ReadTimeout):
        api.client.post(
            "/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "x"}]}, timeout=0.1
        )
    wait(lambda: 'route="/v1/chat/completions",status="499"' in api.client.get("/metrics").text)


def test_request_ids(api):
    assert api.client.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 65, "é"):
        got = api.client.get("/healthz", headers={"x-request-id": bad.encode()}).headers["x-request-id"]
        assert got.startswith("req_")


def test_openapi_describes_the_bodies(api):
    assert api.client.get("/docs").status_code == 200
    document = api.client.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"4XX", "5XX"} <= set(operation["responses"]) and "422" not in operation["responses"], (method, path)
    schemas = document["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "ChatMessage"} <= set(schemas)
    assert schemas["ChatBody"]["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/ChatMessage"}


def test_keys(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("secret-1", "schlüssel")))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-1"}, {"x-goog-api-key": ""}):
        response = api.client.get("/v1/models", headers=headers)
        assert response.status_code == 401, headers
        assert response.json()["error"]["code"] == "invalid_api_key" and "secret" not in response.text
    assert api.chat().status_code == 401 and not api.engine.submitted
    for headers in (
        {"authorization": "Bearer secret-1"},
        {"authorization": "bearer  secret-1"},
        {"x-goog-api-key": "secret-1"},
        {"authorization": "Bearer schlüssel".encode()},
    ):
        assert api.client.get("/v1/models", headers=headers).status_code == 200, headers
    assert api.client.get("/v1/models?key=secret-1").status_code == 200
    assert api.client.get("/healthz").status_code == 200 and api.client.get("/metrics").status_code == 401
    assert "secret-1" not in repr(api.service.config)


@pytest.mark.parametrize("bad", [{"port": -1}, {"max_body": 0}, {"heartbeat": 0}, {"host": "0.0.0.0"}, {"workers": 0}])
def test_config_is_checked(bad):
    with pytest.raises(ValueError):
        ServerConfig(**bad)
