"""Bad requests of the Gemini protocol: the status, Google's error body, and nothing reaches the engine."""

from __future__ import annotations

import json

import pytest

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.serving.engine import Emission

URL = "/v1beta/models/fake"
HI = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}


def error_of(response, status, word="INVALID_ARGUMENT"):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error = body["error"]
    assert set(body) == {"error"} and set(error) <= {"code", "message", "status", "details"}
    assert error["code"] == status and error["status"] == word
    assert error["message"] and len(error["message"]) <= 500
    return error


def field_of(error):
    (detail,) = error["details"]
    assert detail["@type"].endswith(".BadRequest")
    return detail["fieldViolations"][0]["field"]


def contents(*parts, role="user"):
    return {"contents": [{"role": role, "parts": list(parts)}]}


def config(**options):
    return {"generationConfig": options}


def declared(**function):
    return {"tools": [{"functionDeclarations": [{"name": "f", **function}]}]}


BAD = [
    # the turns
    ({"contents": None}, "contents"),
    ({"contents": []}, "contents"),
    ({"contents": "Hi"}, "contents"),
    ({"contents": ["Hi"]}, "contents[0]"),
    ({"contents": [None]}, "contents[0]"),
    ({"contents": [{"role": "user"}]}, "contents[0].parts"),
    ({"contents": [{"role": "user", "parts": []}]}, "contents[0].parts"),
    ({"contents": [{"role": "user", "parts": "Hi"}]}, "contents[0].parts"),
    ({"contents": [{"role": "user", "parts": ["Hi"]}]}, "contents[0].parts[0]"),
    (contents({}), "contents[0].parts[0]"),
    (contents({"text": 5}), "contents[0].parts[0].text"),
    (contents({"text": ["a"]}), "contents[0].parts[0].text"),
    (contents({"txt": "a"}), "contents[0].parts[0]"),
    (contents({"text": "a"}, role="system"), "contents[0].role"),
    (contents({"text": "a"}, role="assistant"), "contents[0].role"),
    (contents({"text": "a"}, role=5), "contents[0].role"),
    (contents({"text": "a", "thought": True}), "contents"),
    (contents({"inlineData": {"mimeType": "image/png", "data": "aGk="}}), "contents[0].parts[0].inlineData"),
    (contents({"inline_data": {"mime_type": "image/png", "data": "aGk="}}), "contents[0].parts[0].inlineData"),
    (contents({"fileData": {"fileUri": "gs://x"}}), "contents[0].parts[0].fileData"),
    (contents({"executableCode": {"code": "1"}}), "contents[0].parts[0].executableCode"),
    (contents({"text": "a", "fileData": {"fileUri": "gs://x"}}), "contents[0].parts[0].fileData"),
    (contents({"text": "a", "functionCall": {"name": "f"}}), "contents[0].parts[0]"),
    (contents({"functionCall": {"args": {}}}, role="model"), "contents[0].parts[0].functionCall.name"),
    (contents({"functionCall": {"name": "f"}}), "contents[0].parts[0]"),
    (contents({"functionResponse": {"response": {}}}), "contents[0].parts[0].functionResponse.name"),
    (contents({"text": "refuse this"}), "contents"),
    # the system instruction
    ({"systemInstruction": "be nice"}, "systemInstruction"),
    ({"system_instruction": {"parts": "be nice"}}, "systemInstruction.parts"),
    ({"systemInstruction": {"parts": [{"fileData": {}}]}}, "systemInstruction.parts[0].fileData"),
    ({"systemInstruction": {"parts": [{"functionCall": {"name": "f"}}]}}, "systemInstruction.parts[0]"),
    # names
    ({"temperature": 1}, "temperature"),
    ({"model": "models/other"}, "model"),
    ({"model": 5}, "model"),
    (config(temprature=1), "generationConfig"),
    (config(topK=1, top_k=1), "generationConfig"),
    ({"generationConfig": []}, "generationConfig"),
    ({"generationConfig": 5}, "generationConfig"),
    # numbers
    (config(temperature="hot"), "generationConfig.temperature"),
    (config(temperature="1"), "generationConfig.temperature"),
    (config(temperature=True), "generationConfig.temperature"),
    (config(temperature=-0.1), "generationConfig.temperature"),
    (config(temperature=2.1), "generationConfig.temperature"),
    (config(topP=-0.5), "generationConfig.topP"),
    (config(top_p=1.5), "generationConfig.topP"),
    (config(topK=-1), "generationConfig.topK"),
    (config(topK=40.5), "generationConfig.topK"),
    (config(candidateCount=0), "generationConfig.candidateCount"),
    (config(candidateCount=9), "generationConfig.candidateCount"),
    (config(candidate_count=10**40), "generationConfig.candidateCount"),
    (config(maxOutputTokens=0), "generationConfig.maxOutputTokens"),
    (config(maxOutputTokens=-1), "generationConfig.maxOutputTokens"),
    (config(maxOutputTokens="7"), "generationConfig.maxOutputTokens"),
    (config(max_output_tokens=1.5), "generationConfig.maxOutputTokens"),
    (config(seed=2**64), "generationConfig.seed"),
    (config(seed=0.5), "generationConfig.seed"),
    (config(presencePenalty=3), "generationConfig.presencePenalty"),
    (config(frequencyPenalty=-3), "generationConfig.frequencyPenalty"),
    # lists
    (config(stopSequences="a"), "generationConfig.stopSequences"),
    (config(stopSequences=["a", 5]), "generationConfig.stopSequences[1]"),
    (config(stopSequences=["a", ""]), "generationConfig.stopSequences[1]"),
    (config(stopSequences=["a"] * 17), "generationConfig.stopSequences"),
    # log-probabilities
    (config(logprobs=3), "generationConfig.logprobs"),
    (config(responseLogprobs=True, logprobs=21), "generationConfig.logprobs"),
    (config(responseLogprobs=True, logprobs=-1), "generationConfig.logprobs"),
    (config(responseLogprobs=1), "generationConfig.responseLogprobs"),
    # outputs
    (config(responseMimeType="text/plain", responseSchema={"type": "STRING"}), "generationConfig.responseMimeType"),
    (config(responseMimeType="text/x.enum"), "generationConfig.responseMimeType"),
    (config(responseMimeType="text/x.enum", responseSchema={"type": "STRING"}), "generationConfig.responseSchema"),
    (config(responseMimeType="image/png"), "generationConfig.responseMimeType"),
    (config(responseMimeType=5), "generationConfig.responseMimeType"),
    (config(responseSchema={"type": "THING"}), "generationConfig.responseSchema.type"),
    (config(responseSchema={"type": "STRING"}, responseJsonSchema={}), "generationConfig.responseJsonSchema"),
    (config(responseSchema={"type": "STRING"}, responseJsonSchema={"a": 1}), "generationConfig.responseJsonSchema"),
    (config(responseFormat=[{"type": "text"}, {"type": "text"}]), "generationConfig.responseFormat"),
    (config(responseFormat={"type": "image"}), "generationConfig.responseFormat.type"),
    (config(responseSchema="object"), "generationConfig.responseSchema"),
    (config(response_json_schema="object"), "generationConfig.responseJsonSchema"),
    (config(responseModalities=["IMAGE"]), "generationConfig.responseModalities"),
    (config(responseModalities=["TEXT", "AUDIO"]), "generationConfig.responseModalities"),
    (config(speechConfig={"languageCode": "de"}), "generationConfig.speechConfig"),
    (config(imageConfig={"aspectRatio": "1:1"}), "generationConfig.imageConfig"),
    (config(audioTimestamp=True), "generationConfig.audioTimestamp"),
    # thinking
    (config(thinkingConfig=5), "generationConfig.thinkingConfig"),
    (config(thinkingConfig={"thinkingBudget": -2}), "generationConfig.thinkingConfig.thinkingBudget"),
    (config(thinkingConfig={"thinking_budget": "many"}), "generationConfig.thinkingConfig.thinkingBudget"),
    (config(thinkingConfig={"thinkingLevel": "EXTREME"}), "generationConfig.thinkingConfig.thinkingLevel"),
    (config(thinkingConfig={"includeThoughts": "yes"}), "generationConfig.thinkingConfig.includeThoughts"),
    # tools
    ({"tools": "search"}, "tools"),
    ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
    ({"tools": [{"code_execution": {}}]}, "tools[0].codeExecution"),
    ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
    (declared(name="9"), "tools[0].functionDeclarations[0].name"),
    (declared(name=""), "tools[0].functionDeclarations[0].name"),
    (declared(name="a b"), "tools[0].functionDeclarations[0].name"),
    (declared(parameters={"type": "THING"}), "tools[0].functionDeclarations[0].parameters.type"),
    (declared(parameters={"tipe": "OBJECT"}), "tools[0].functionDeclarations[0].parameters"),
    (declared(parameters={"type": "ARRAY", "items": 5}), "tools[0].functionDeclarations[0].parameters.items"),
    (declared(parameters={}, parametersJsonSchema={}), "tools[0].functionDeclarations[0]"),
    (declared(parametersJsonSchema=5), "tools[0].functionDeclarations[0].parametersJsonSchema"),
    (declared(behavior="NON_BLOCKING"), "tools[0].functionDeclarations[0].behavior"),
    ({"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]}, "tools[0].functionDeclarations[1].name"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "toolConfig.functionCallingConfig.mode"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
    ({**declared(), "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["g"]}}},
     "toolConfig.functionCallingConfig.allowedFunctionNames"),
    ({"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}},
     "toolConfig.functionCallingConfig.allowedFunctionNames"),
    # the rest
    ({"cachedContent": "abc"}, "cachedContent"),
    ({"continuationToken": "aGk="}, "continuationToken"),
    ({"safetySettings": "none"}, "safetySettings"),
    ({"safetySettings": [{"categori": "x"}]}, "safetySettings[0]"),
    ({"labels": "a"}, "labels"),
    ({"store": "no"}, "store"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "field"), BAD)
def test_bad_request_names_the_field(api, option, field):
    for method in ("generateContent", "streamGenerateContent?alt=sse"):
        error = error_of(api.client.post(f"{URL}:{method}", json={**HI, **option}), 400)
        assert field_of(error) == field, error
    assert not api.engine.submitted


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "topP", "presencePenalty"])
def test_numbers_that_are_none(api, name, value):
    body = json.dumps({**HI, "generationConfig": {name: 77}}).replace("77", value)
    assert field_of(error_of(api.client.post(f"{URL}:generateContent", content=body), 400)).endswith(name)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"contents": "\xff"}', b"[" * 9000, b'{"a":' * 5000, b"\x00"]
)
@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent", "countTokens"])
def test_bodies_that_are_no_json_object(api, body, method):
    error_of(api.client.post(f"{URL}:{method}", content=body), 400)


COUNT = [
    ({}, "contents"),
    ({"contents": []}, "contents"),
    ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0].fileData"),
    ({"generateContentRequest": {}}, "generateContentRequest.contents"),
    ({"generateContentRequest": 5}, "generateContentRequest"),
    ({"generateContentRequest": HI, **HI}, "generateContentRequest"),
    ({"generateContentRequest": {**HI, "model": "models/x"}}, "model"),
    ({"generateContentRequest": {"contents": [{}]}}, "generateContentRequest.contents[0].parts"),
    ({**HI, "temperature": 1}, "temperature"),
    ({**HI, "generationConfig": {"topK": -1}}, "generationConfig.topK"),
    ({"generateContentRequest": {**HI, **config(topP=2)}}, "generateContentRequest.generationConfig.topP"),
    ({"generateContentRequest": {**HI, **config(thinkingConfig={"thinkingBudget": -2})}},
     "generateContentRequest.generationConfig.thinkingConfig.thinkingBudget"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), COUNT)
def test_bad_count(api, body, field):
    assert field_of(error_of(api.client.post(f"{URL}:countTokens", json=body), 400)) == field


@pytest.mark.parametrize("query", ["alt=proto", "alt=media", "fields=candidates", "$alt=xml", "callback=f"])
def test_bad_query(api, query):
    error_of(api.client.post(f"{URL}:streamGenerateContent?{query}", json=HI), 400)


def test_events_need_a_stream(api):
    error = error_of(api.client.post(f"{URL}:generateContent?alt=sse", json=HI), 400)
    assert "streamGenerateContent" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [("POST", "/v1beta/models/no-such:generateContent", 404, "NOT_FOUND"),
     ("POST", "/v1/models/no-such:streamGenerateContent", 404, "NOT_FOUND"),
     ("POST", "/v1alpha/models/no-such:countTokens", 404, "NOT_FOUND"),
     ("POST", "/v1beta/org/name:generateContent", 404, "NOT_FOUND"),
     ("POST", "/models/no-such:generateContent", 404, "NOT_FOUND"),
     ("POST", "/v1beta/models/fake:predict", 404, "NOT_FOUND"),
     ("POST", "/v1/models/fake:batchPredict", 404, "NOT_FOUND"),
     ("POST", "/v1beta/models/fake", 404, "NOT_FOUND"),
     ("POST", "/v2/models/fake:generateContent", 404, "NOT_FOUND"),
     ("GET", "/v1beta", 404, "NOT_FOUND"),
     ("GET", "/v1beta/nothing", 404, "NOT_FOUND"),
     ("GET", "/v1beta/models/no-such", 404, "NOT_FOUND"),
     ("GET", "/models/fake:generateContent", 405, "UNIMPLEMENTED"),
     ("DELETE", "/v1beta/models/fake", 405, "UNIMPLEMENTED"),
     ("OPTIONS", "/v1beta/models/fake:generateContent", 405, "UNIMPLEMENTED")],
)  # fmt: skip
def test_unknown_models_methods_and_paths(api, method, path, status, word):
    error = error_of(api.client.request(method, path, json=HI), status, word)
    if "embed" in path.lower():
        assert "supported: generateContent, streamGenerateContent, countTokens" in error["message"]


def test_errors_of_shared_paths_follow_the_client(api):
    """The models have one address for two protocols: the key tells who asks."""
    assert api.client.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
    error_of(api.client.get("/v1/models/x", headers={"x-goog-api-key": "k"}), 404, "NOT_FOUND")
    error_of(api.client.get("/v1/models/x?key=k"), 404, "NOT_FOUND")
    both = api.client.get("/v1/models/x?key=k", headers={"authorization": "Bearer k"})
    assert both.json()["error"]["code"] == "model_not_found"


def test_prompt_longer_than_the_context(api):
    for method in ("generateContent", "streamGenerateContent"):
        error = error_of(api.client.post(f"{URL}:{method}", json=contents({"text": "x" * 5000})), 400)
        assert field_of(error) == "contents" and "1000 tokens" in error["message"]
    counted = api.client.post(f"{URL}:countTokens", json=contents({"text": "x" * 5000}))
    assert counted.json()["totalTokens"] == 5007
    error_of(api.client.post(f"{URL}:countTokens", json=contents({"text": "x" * 9000})), 400)
    error_of(api.client.post(f"{URL}:generateContent", json={"contents": [{"parts": {"text": ""}}] * 4001}), 400)


def test_body_over_the_limit(api):
    error_of(api.client.post(f"{URL}:generateContent", json=contents({"text": "x" * 200_000})), 413)
    error_of(api.client.post(f"{URL}:generateContent", content=b"x", headers={"content-encoding": "gzip"}), 415)


def test_a_full_queue(api):
    api.engine.max_queue = 0
    for method in ("generateContent", "streamGenerateContent?alt=sse"):
        response = api.client.post(f"{URL}:{method}", json=HI)
        error = error_of(response, 429, "RESOURCE_EXHAUSTED")
        assert response.headers["retry-after"] == "3"
        assert error["details"] == [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2.5s"}]


def test_not_ready(start_api):
    api = start_api(attached=False)
    for path in (f"{URL}:generateContent", f"{URL}:countTokens"):
        assert "retry-after" in api.client.post(path, json=HI).headers
        error_of(api.client.post(path, json=HI), 503, "UNAVAILABLE")
    error_of(api.client.get("/v1beta/models"), 503, "UNAVAILABLE")


def test_engine_failures(api, caplog):
    api.engine.stopped = True
    error_of(api.client.post(f"{URL}:generateContent", json=HI), 503, "UNAVAILABLE")
    api.engine.stopped = False
    api.engine.plan = lambda prompt, params: [Emission("", finish_reason="error", error="secret")]
    for method in ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"):
        error = error_of(api.client.post(f"{URL}:{method}", json=HI), 500, "INTERNAL")
        assert "secret" not in error["message"]
    error_of(api.client.post(f"{URL}:generateContent", json=contents({"text": "explode"})), 500, "INTERNAL")


def test_no_template(api):
    template, api.model.chat_template = api.model.chat_template, None
    api.attach()
    try:
        error = error_of(api.client.post(f"{URL}:generateContent", json=HI), 400)
    finally:
        api.model.chat_template = template
    assert "no chat template" in error["message"]


def test_keys(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("k1")))
    url = f"{URL}:generateContent"
    for headers in ({}, {"x-goog-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        error = error_of(api.client.post(url, json=HI, headers=headers), 401, "UNAUTHENTICATED")
        assert error["details"][0]["reason"] == "API_KEY_INVALID" and "k1" not in str(error)
    for headers in ({"x-goog-api-key": "k1"}, {"authorization": "Bearer k1"}):
        assert api.client.post(url, json=HI, headers=headers).status_code == 200
    assert api.client.post(f"{url}?key=k1", json=HI).status_code == 200
    assert api.client.post(f"{url}?key=k2", json=HI).status_code == 401


def test_too_many_requests_in_progress(start_api):
    api = start_api(ServerConfig(max_inflight=1))
    api.engine.plan = lambda prompt, params: iter([Emission("a", (97,)), *[None] * 10_000])
    with api.client.stream("POST", f"{URL}:streamGenerateContent?alt=sse", json=HI) as held:
        lines = held.iter_lines()
        next(lines)
        error_of(api.client.post(f"{URL}:generateContent", json=HI), 429, "RESOURCE_EXHAUSTED")


def test_no_cors(api):
    headers = {"origin": "http://evil", "access-control-request-method": "POST"}
    for response in (
        api.client.options(f"{URL}:generateContent", headers=headers),
        api.client.post(f"{URL}:generateContent", json=HI, headers=headers),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)
