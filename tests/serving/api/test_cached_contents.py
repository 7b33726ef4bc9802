"""Cached contents, on the wire and with Google's client."""

from __future__ import annotations

import datetime

import pytest
from google import genai
from google.genai import errors, types

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig

TEXT = "Hello, wörld 🎉"
URL = "/v1beta/cachedContents"
DOCUMENT = "a long document. "


def turn(text, role="user"):
    return {"role": role, "parts": [{"text": text}]}


def create(api, contents=None, **body):
    contents = [turn(DOCUMENT)] if contents is None else contents
    return api.client.post(URL, json={"model": "models/fake", "contents": contents, **body})


def generate(api, name, *contents, **body):
    url = "/v1beta/models/fake:generateContent"
    return api.client.post(url, json={"contents": list(contents), "cachedContent": name, **body})


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_the_life_of_one(api, version):
    url = f"/{version}/cachedContents"
    body = {"model": "models/fake", "contents": [turn(DOCUMENT)], "systemInstruction": turn("be nice"), "ttl": "300s",
            "displayName": "doc"}  # fmt: skip
    made = api.client.post(url, json=body)
    one = made.json()
    assert made.status_code == 200 and one["name"].startswith("cachedContents/")
    assert (one["model"], one["displayName"]) == ("models/fake", "doc")
    beginning = f"system: be nice\nuser: {DOCUMENT}"
    assert one["usageMetadata"]["totalTokenCount"] == len(beginning)
    assert prompt_of(api) == beginning and api.engine.submitted[-1].params.max_tokens == 1
    assert api.client.get(f"/{version}/{one['name']}").json() == one
    assert one in api.client.get(url).json()["cachedContents"]
    patched = api.client.patch(f"/{version}/{one['name']}", json={"ttl": "60s"}).json()
    assert patched["expireTime"] < one["expireTime"] and patched["name"] == one["name"]

    used = generate(api, one["name"], turn("What?")).json()
    assert prompt_of(api) == f"{beginning}What?\n"
    usage = used["usageMetadata"]
    assert usage["promptTokenCount"] == len(prompt_of(api)) and usage["cachedContentTokenCount"] == len(beginning)
    whole = {"model": "models/fake", "contents": [turn("What?")], "cachedContent": one["name"]}
    counted = api.client.post("/v1beta/models/fake:countTokens", json={"generateContentRequest": whole}).json()
    assert counted["totalTokens"] == usage["promptTokenCount"]
    assert counted["cachedContentTokenCount"] == len(beginning)

    assert api.client.delete(f"/{version}/{one['name']}").json() == {}
    for method in ("GET", "DELETE"):
        missing = api.client.request(method, f"/{version}/{one['name']}")
        assert missing.status_code == 404 and missing.json()["error"]["status"] == "NOT_FOUND"
    assert generate(api, one["name"], turn("What?")).status_code == 404


def test_other_beginnings(api):
    name = create(api, [turn("one"), turn("two", "model")]).json()["name"]
    generate(api, name, turn("three"))
    assert prompt_of(api) == "user: one\nassistant: two\nuser: three\n"
    name = create(api, [], systemInstruction=turn("be nice")).json()["name"]
    generate(api, name, turn("three"), turn("four", "model"), turn("five"))
    assert prompt_of(api) == "system: be nice\nuser: three\nassistant: four\nuser: five\n"


def test_streams_know_of_it(api):
    name = create(api).json()["name"]
    url = "/v1beta/models/fake:streamGenerateContent?alt=sse"
    response = api.client.post(url, json={"contents": [turn("x")], "cachedContent": name})
    assert f'"cachedContentTokenCount":{len("user: " + DOCUMENT)}' in response.text


def test_pages(api):
    names = [create(api).json()["name"] for _ in range(5)]
    seen, token = [], ""
    while True:
        page = api.client.get(URL, params={"pageSize": 2, **({"pageToken": token} if token else {})}).json()
        assert len(page["cachedContents"]) <= 2
        seen += [one["name"] for one in page["cachedContents"]]
        token = page.get("nextPageToken")
        if not token:
            break
    assert seen[-5:] == names
    assert api.client.get(URL, params={"pageToken": "nonsense"}).status_code == 400
    assert api.client.get(URL, params={"pageSize": "x"}).status_code == 400


def test_expiry(api, wait):
    name = create(api, ttl="0.2s").json()["name"]
    wait(lambda: generate(api, name, turn("x")).status_code == 404)
    error = generate(api, name, turn("x")).json()["error"]
    assert error["status"] == "NOT_FOUND" and "expired" in error["message"]
    assert "expired" in api.client.get(f"/v1beta/{name}").json()["error"]["message"]
    assert api.client.patch(f"/v1beta/{name}", json={"ttl": "60s"}).status_code == 404
    assert all(one["name"] != name for one in api.client.get(URL).json()["cachedContents"])


BAD = [
    {"model": None}, {"contents": []}, {"ttl": "5"}, {"ttl": "-5s"}, {"ttl": "0s"}, {"expireTime": "yesterday"},
    {"expireTime": "2001-01-01T00:00:00Z"}, {"ttl": "5s", "expireTime": "2099-01-01T00:00:00Z"}, {"frob": 1},
    {"contents": [{"parts": [{"inlineData": {"mimeType": "x", "data": ""}}]}]}, {"contents": [turn("x" * 1100)]},
]  # fmt: skip


@pytest.mark.parametrize("option", BAD)
def test_bad_bodies(api, option):
    response = create(api, **option) if "contents" not in option else create(api, option["contents"])
    assert response.status_code == 400 and response.json()["error"]["status"] == "INVALID_ARGUMENT", response.text
    assert not api.engine.submitted


def test_bad_uses(api):
    name = create(api).json()["name"]
    for option in ({"systemInstruction": turn("x")}, {"tools": [{"functionDeclarations": []}]}, {"toolConfig": {}}):
        assert generate(api, name, turn("x"), **option).status_code == 400
    assert generate(api, "x", turn("x")).status_code == 400
    assert generate(api, "cachedContents/none", turn("x")).status_code == 404
    for query, body in (("", {}), ("?updateMask=contents", {"ttl": "5s"}), ("", {"displayName": "x"})):
        assert api.client.patch(f"/v1beta/{name}{query}", json=body).status_code == 400
    assert create(api, model="models/none").status_code == 404


def test_tenants_see_nothing_of_each_other(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("a", "b")))
    mine, other = ({"x-goog-api-key": key} for key in "ab")
    body = {"model": "models/fake", "contents": [turn("x")]}
    name = api.client.post(URL, json=body, headers=mine).json()["name"]
    for method in ("GET", "DELETE"):
        assert api.client.request(method, f"/v1beta/{name}", headers=other).status_code == 404
    assert api.client.get(URL, headers=other).json()["cachedContents"] == []
    used = {"contents": [turn("x")], "cachedContent": name}
    url = "/v1beta/models/fake:generateContent"
    assert api.client.post(url, json=used, headers=other).status_code == 404
    assert api.client.post(url, json=used, headers=mine).status_code == 200


@pytest.mark.parametrize("version", [None, "v1beta"])
def test_client(api, version):
    options = {"base_url": api.url} | ({"api_version": version} if version else {})
    client = genai.Client(api_key="any", http_options=options)
    config = types.CreateCachedContentConfig(
        contents=[DOCUMENT], system_instruction="be nice", ttl="300s", display_name="doc"
    )
    one = client.caches.create(model="fake", config=config)
    assert one.usage_metadata.total_token_count == len(f"system: be nice\nuser: {DOCUMENT}")
    assert client.caches.get(name=one.name).expire_time == one.expire_time
    assert one.name in [content.name for content in client.caches.list(config={"page_size": 1})]
    later = client.caches.update(name=one.name, config={"ttl": "600s"})
    assert later.expire_time > one.expire_time
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=3)
    assert client.caches.update(name=one.name, config={"expire_time": until}).expire_time > later.expire_time
    answer = client.models.generate_content(model="fake", contents="What?", config={"cached_content": one.name})
    assert answer.text == TEXT
    used = answer.usage_metadata
    assert used.cached_content_token_count == one.usage_metadata.total_token_count
    assert used.total_token_count == used.prompt_token_count + used.candidates_token_count
    client.caches.delete(name=one.name)
    with pytest.raises(errors.ClientError) as missing:
        client.caches.get(name=one.name)
    assert missing.value.code == 404
