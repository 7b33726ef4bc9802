"""The Gemini protocol as bytes on the wire."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.configs.server import ServerConfig
from umbra.serving.api import gemini
from umbra.serving.engine import Emission, TokenLogprob, Usage
from umbra.serving.engine.thoughts import Channels

TEXT = "Hello, wörld 🎉"
URL = "/v1beta/models/fake"


def hi(**body):
    return {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], **body}


def generate(api, body=None, url=URL, **options):
    return api.client.post(f"{url}:generateContent", json=body or hi(**options))


def stream(api, body=None, url=URL, **options):
    response = api.client.post(f"{url}:streamGenerateContent?alt=sse", json=body or hi(**options))
    assert response.status_code == 200, response.text
    return events(response.text)


def events(text):
    """The objects of a stream; every line is `data: ` or blank, and the last event ends with a blank line."""
    assert text.endswith("\n\n")
    lines = text.split("\n")
    assert all(line.startswith("data: ") or not line for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def text_of(answers, index=0, thought=False):
    return "".join(
        part.get("text", "")
        for answer in answers
        for candidate in answer["candidates"]
        if candidate["index"] == index
        for part in candidate.get("content", {}).get("parts", ())
        if part.get("thought", False) == thought
    )


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


def spoken(thoughts, answer, params, sizes, finish="stop_token"):
    """The emissions of an answer, a byte a token, in steps of these sizes; with thoughts if it was asked to think."""
    end = b"</think>\n\n" if params.thinking is not None else b""
    tokens = [*(thoughts.encode() if end else b""), *end, *answer.encode(), 257]
    channels = Channels(lambda token: bytes([token]) if token < 256 else b"", params.stop, params.thinking)
    out, used = [], 0
    for size in sizes:
        step, tokens = tokens[:size], tokens[size:]
        thought, text, stop = channels.push(step)
        step = step if stop is None else step[: stop + 1]
        used += len(step)
        out.append(Emission(text, tuple(step), thought=thought))
        if stop is not None or not tokens:
            break
    thought, text = channels.finish()
    usage = Usage(9, used, thought_tokens=channels.thought_tokens)
    reason = "stop_string" if channels.stopped else finish
    last = Emission(text, thought=thought, finish_reason=reason, usage=usage)
    return [*out, last]


THINK = {"thinkingConfig": {"thinkingBudget": 100}}
SHOWN = {"thinkingConfig": {"thinkingBudget": 100, "includeThoughts": True}}


def test_whole_answer(api):
    response = generate(api)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["candidates"] == [
        {
            "index": 0,
            "content": {"role": "model", "parts": [{"text": TEXT}]},
            "finishReason": "STOP",
            "tokenCount": len(TEXT.encode()),
        }
    ]
    prompt, answer = len("user: Hi\n"), len(TEXT.encode())
    assert body["usageMetadata"] == {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": 4,
        "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 4}],
        "candidatesTokenCount": answer,
        "totalTokenCount": prompt + answer,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
        "candidatesTokensDetails": [{"modality": "TEXT", "tokenCount": answer}],
    }
    assert body["modelVersion"] == "fake" and body["responseId"]
    assert response.headers["x-goog-model-latency-ms"] == "100"
    assert response.headers["x-goog-billing-tokens"] == str(prompt + answer)
    assert response.headers["x-umbra-ttft-ms"] == "10.0" and response.headers["x-umbra-cached-tokens"] == "4"


def test_streamed_answer(api):
    response = api.client.post(f"{URL}:streamGenerateContent?alt=sse", json=hi())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert int(response.headers["x-goog-model-latency-ms"]) >= 0 and response.headers["x-goog-billing-tokens"] == "9"
    answers = events(response.text)
    assert text_of(answers) == TEXT and len({answer["responseId"] for answer in answers}) == 1
    assert all(answer["candidates"][0]["content"]["parts"] for answer in answers)
    assert all("finishReason" not in answer["candidates"][0] for answer in answers[:-1])
    assert all("usageMetadata" not in answer for answer in answers[:-1])
    last, whole = answers[-1], generate(api).json()
    assert last["candidates"][0]["finishReason"] == "STOP" and last["usageMetadata"] == whole["usageMetadata"]
    assert last["umbraMetadata"] == {
        "level": "medium", "systemFingerprint": "fp_fake", "queueMs": 1.0, "ttftMs": 10.0, "totalMs": 100.0,
        "cachedTokens": 4, "tokensPerPass": 1.0,
    }  # fmt: skip


def test_stream_as_an_array(api):
    for query in ("", "?alt=json"):
        response = api.client.post(f"{URL}:streamGenerateContent{query}", json=hi())
        assert response.headers["content-type"] == "application/json"
        answers = response.json()
        assert text_of(answers) == TEXT and len(answers) > 2 and "usageMetadata" in answers[-1]


def test_silence_in_streams(api):
    """Blank lines for events, white space for an array: both before the first token and later."""
    silent = [None] * 150
    api.engine.plan = lambda prompt, params: [
        *silent,
        Emission("a", (1,)),
        *silent,
        Emission("b", (2,), finish_reason="max_tokens"),
    ]
    response = api.client.post(f"{URL}:streamGenerateContent?alt=sse", json=hi())
    assert response.text.startswith("\n") and "}\n\n\n" in response.text
    assert text_of(events(response.text)) == "ab"
    response = api.client.post(f"{URL}:streamGenerateContent", json=hi())
    assert response.text.startswith("\n") and text_of(response.json()) == "ab"


@pytest.mark.parametrize("url", ["/v1/models/fake", "/v1beta/models/fake", "/v1alpha/models/fake", "/models/fake",
                                 "/v1/fake", "//v1beta//models/fake"])  # fmt: skip
def test_addresses(api, url):
    assert generate(api, url=url).json()["candidates"][0]["content"]["parts"][0]["text"] == TEXT
    assert text_of(stream(api, url=url)) == TEXT
    assert api.client.post(f"{url}:countTokens", json=hi()).json()["totalTokens"] == 9


def test_models(api):
    for version in ("v1", "v1beta", "v1alpha"):
        listed = api.client.get(f"/{version}/models?pageSize=50").json()
        assert listed["models"][0]["name"] == "models/fake" and listed["data"][0]["id"] == "fake"
        assert listed["models"][0]["supportedGenerationMethods"] == list(gemini.METHODS)
        assert api.client.get(f"/{version}/models/fake").json()["name"] == "models/fake"


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop_token", "STOP"), ("stop_string", "STOP"), ("max_tokens", "MAX_TOKENS"), ("context_length", "MAX_TOKENS")],
)
def test_finish_reasons(api, make_answer, reason, finish):
    api.engine.plan = lambda prompt, params: make_answer("ab", reason)
    assert generate(api).json()["candidates"][0]["finishReason"] == finish
    assert stream(api)[-1]["candidates"][0]["finishReason"] == finish


def test_nothing_to_say(api):
    api.engine.plan = lambda prompt, params: [Emission("", (257,), finish_reason="stop_token")]
    assert generate(api).json()["candidates"][0]["content"]["parts"] == [{"text": ""}]
    usage = Usage(9, 1, thought_tokens=1)
    api.engine.plan = lambda prompt, params: [Emission("", (1,), thought="Hm", finish_reason="max_tokens", usage=usage)]
    answer = generate(api).json()
    assert answer["candidates"] == [{"index": 0, "finishReason": "MAX_TOKENS", "tokenCount": 0}]
    assert answer["usageMetadata"]["thoughtsTokenCount"] == 1 and answer["usageMetadata"]["candidatesTokenCount"] == 0
    (event,) = stream(api)
    assert event["candidates"][0]["content"]["parts"] == [{"text": ""}]
    api.engine.plan = lambda prompt, params: spoken("Hm", "", params, itertools.repeat(99))
    for answers in ([generate(api, generationConfig=SHOWN).json()], stream(api, generationConfig=SHOWN)):
        parts = [part for answer in answers for part in answer["candidates"][0]["content"]["parts"]]
        assert parts[0] == {"text": "Hm", "thought": True} and {"text": ""} in parts


def test_both_spellings(api):
    camel = hi(
        systemInstruction={"parts": [{"text": "be nice"}]},
        generationConfig={
            "temperature": 0, "topP": 0.9, "topK": 40.0, "maxOutputTokens": 7, "stopSequences": ["a"], "seed": 42,
            "presencePenalty": 0.5, "frequencyPenalty": 0.25, "responseLogprobs": True, "logprobs": 1,
            "candidateCount": 1, "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
        },
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    )  # fmt: skip
    snake = hi(
        system_instruction={"parts": {"text": "be nice"}},
        generation_config={
            "temperature": 0, "top_p": 0.9, "top_k": 40, "max_output_tokens": 7.0, "stop_sequences": ["a"], "seed": 42,
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "response_logprobs": True, "logprobs": 1,
            "candidate_count": 1, "thinking_config": {"include_thoughts": True, "thinking_budget": 0},
        },
        safety_settings=[],
    )  # fmt: skip
    answers = [generate(api, body).json() for body in (camel, snake)]
    first, second = api.engine.submitted
    assert first.params == second.params and first.prompt == second.prompt
    assert answers[0]["candidates"] == answers[1]["candidates"]
    params = first.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 0.9, 40, 7)
    assert (params.stop, params.seed, params.logprobs) == (("a",), 42, 1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)


def test_defaults_are_those_of_the_model_s_description(api):
    generate(api)
    params, model = api.engine.submitted[0].params, api.client.get("/v1beta/models/fake").json()
    assert (params.temperature, params.top_p, params.top_k) == (model["temperature"], model["topP"], model["topK"])
    assert params.max_tokens is None and params.logprobs is None and params.stop == ()


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [({"topP": 0}, "top_p", 1e-6), ({"topK": 0}, "top_k", 0), ({"topK": 10**9}, "top_k", 300),
     ({"maxOutputTokens": 10**6}, "max_tokens", 1000), ({"stopSequences": []}, "stop", ()),
     ({"temperature": None}, "temperature", 1.0), ({"responseLogprobs": True}, "logprobs", 0),
     ({"responseLogprobs": False, "logprobs": 0}, "logprobs", None), ({"responseMimeType": "text/plain"}, "stop", ()),
     ({"responseModalities": ["text"]}, "stop", ()), ({"mediaResolution": "MEDIA_RESOLUTION_LOW"}, "stop", ()),
     ({"thinkingConfig": {"thinkingLevel": "minimal"}}, "stop", ())],
)  # fmt: skip
def test_edges(api, option, field, value):
    assert generate(api, generationConfig=option).status_code == 200
    assert getattr(api.engine.submitted[0].params, field) == value


@pytest.mark.parametrize(("store", "keep"), [(None, "blocks"), (True, "blocks"), (False, "nothing")])
def test_what_is_not_to_be_stored_leaves_nothing_behind(api, store, keep):
    assert generate(api, store=store).status_code == 200
    assert api.engine.submitted[0].keep == keep


def test_accepted_and_without_effect(api):
    response = generate(
        api,
        model="models/fake",
        labels={"a_b": "c"},
        serviceTier="standard",
        store=False,
        tools=[],
        toolConfig={"functionCallingConfig": {"mode": "NONE"}},
        generationConfig={},
        cachedContent=None,
    )
    assert response.status_code == 200 and prompt_of(api) == "user: Hi\n"


def turn(role, *texts, **notes):
    return {"role": role, "parts": [{"text": text, **notes} for text in texts]}


@pytest.mark.parametrize(
    ("contents", "prompt"),
    [([turn("user", "a", "b")], "user: ab\n"),
     ([{"parts": [{"text": "a"}]}], "user: a\n"),
     ({"parts": {"text": "a"}}, "user: a\n"),
     ([turn("user", "a"), turn("user", "b")], "user: ab\n"),
     ([turn("user", "a"), turn("model", "b"), turn("model", ""), turn("model", "c"), turn("user", "d")],
      "user: a\nassistant: bc\nuser: d\n"),
     ([turn("user", "a"), turn("model", "hm", thought=True), turn("model", "b"), turn("user", "c")],
      "user: a\nassistant: b\nuser: c\n"),
     ([turn("user", "a"), {"role": "model", "parts": []}, turn("user", "c")], "user: a\nassistant: \nuser: c\n"),
     ([turn("user", "a"), {"role": "model", "parts": [{"thoughtSignature": "aGk="}]}, turn("user", "c")],
      "user: a\nassistant: \nuser: c\n"),
     ([turn("model", "a"), turn("user", "b")], "assistant: a\nuser: b\n"),
     ([turn("user", "a", thoughtSignature="aGk=", partMetadata={"a": 1})], "user: a\n")],
)  # fmt: skip
def test_contents_become_turns(api, contents, prompt):
    assert generate(api, {"contents": contents}).status_code == 200
    assert prompt_of(api) == prompt
    counted = api.client.post(f"{URL}:countTokens", json={"contents": contents}).json()
    assert counted == {
        "totalTokens": len(prompt),
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": len(prompt)}],
        "cachedContentTokenCount": 0,
    }


def test_count_of_a_whole_request(api):
    """What `countTokens` says is what the request uses."""
    body = hi(systemInstruction={"parts": [{"text": "be"}, {"text": " nice"}]}, generationConfig={"temperature": 0})
    used = generate(api, body).json()["usageMetadata"]["promptTokenCount"]
    for request in (body, {"generateContentRequest": {"model": "models/fake", **body}}):
        counted = api.client.post(f"{URL}:countTokens", json=request).json()
        assert counted["totalTokens"] == used == len("system: be nice\nuser: Hi\n")


def test_candidates(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"seed {params.seed}" + "!" * params.seed)
    config = {"candidateCount": 3, "seed": 7}
    body = generate(api, generationConfig=config).json()
    texts = [f"seed {i}" + "!" * i for i in (7, 8, 9)]
    assert [text_of([body], i) for i in range(3)] == texts
    used = body["usageMetadata"]
    assert used["promptTokenCount"] == 9 and used["candidatesTokenCount"] == sum(map(len, texts))
    answers = stream(api, generationConfig=config)
    assert [text_of(answers, i) for i in range(3)] == texts
    assert all(answer["candidates"][0]["index"] == 0 for answer in answers)  # clients look there alone
    assert answers[-1]["usageMetadata"] == used
    finished = [one["index"] for answer in answers for one in answer["candidates"] if "finishReason" in one]
    assert sorted(finished) == [0, 1, 2]


def test_logprobs(api):
    config = {"responseLogprobs": True, "logprobs": 2}
    whole = generate(api, generationConfig=config).json()
    streamed = stream(api, generationConfig=config)
    tokens = TEXT.encode()
    for answers in ([whole], streamed):
        results = [a["candidates"][0]["logprobsResult"] for a in answers if "logprobsResult" in a["candidates"][0]]
        chosen = [one for result in results for one in result["chosenCandidates"]]
        top = [one for result in results for one in result["topCandidates"]]
        assert [one["tokenId"] for one in chosen] == list(tokens) and len(top) == len(chosen)
        assert "".join(one["token"] for one in chosen) == TEXT
        assert top[0]["candidates"][0] == {"token": "A", "tokenId": 65, "logProbability": -65.0}
        assert sum(result["logProbabilitySum"] for result in results) == -0.5 * len(tokens)
        assert answers[-1]["candidates"][0]["avgLogprobs"] == -0.5


def test_logprobs_of_thoughts_are_left_out(api, monkeypatch):
    api.engine.plan = lambda prompt, params: spoken("Hm", "ok", params, itertools.repeat(4))
    tokens = lambda one, emission: tuple(TokenLogprob(t, float("-inf")) for t in emission.token_ids)  # noqa: E731
    monkeypatch.setattr(api.engine, "_logprobs", tokens)
    for read in (lambda body: [generate(api, body).json()], lambda body: stream(api, body)):
        answers = read(hi(generationConfig={"responseLogprobs": True, **THINK}))
        results = [one for a in answers if (one := a["candidates"][0].get("logprobsResult"))]
        chosen = [(one["token"], one["tokenId"]) for result in results for one in result["chosenCandidates"]]
        assert chosen == [("", 10), ("", 10), ("o", 111), ("k", 107), ("", 257)]
        candidate = answers[-1]["candidates"][0]
        assert candidate["tokenCount"] == len(chosen) and candidate["avgLogprobs"] == -9999.0


def test_thoughts(api):
    api.engine.plan = lambda prompt, params: spoken("Let me see.\n", "ok", params, itertools.repeat(3))
    for show in (True, False):
        config = {"thinkingConfig": {"includeThoughts": show, "thinkingBudget": 100}}
        whole, answers = generate(api, generationConfig=config).json(), stream(api, generationConfig=config)
        for listed in ([whole], answers):
            assert text_of(listed) == "ok" and text_of(listed, thought=True) == ("Let me see." if show else "")
            used = listed[-1]["usageMetadata"]
            assert (used["thoughtsTokenCount"], used["candidatesTokenCount"]) == (len("Let me see.\n</think>"), 5)
            assert used["totalTokenCount"] == used["promptTokenCount"] + 25


@pytest.mark.parametrize(
    ("config", "level", "budget"),
    [({}, "medium", None), ({"includeThoughts": True}, "medium", None), ({"thinkingBudget": 0}, "medium", None),
     ({"thinkingBudget": 50}, "medium", 50), ({"thinking_budget": 50.0}, "medium", 50),
     ({"thinkingLevel": "MINIMAL"}, "minimal", None), ({"thinking_level": "low"}, "low", 1024),
     ({"thinkingLevel": "MEDIUM"}, "medium", 7500), ({"thinkingLevel": "HIGH"}, "high", 16384),
     ({"thinkingLevel": "XHIGH"}, "high", 16384), ({"thinkingLevel": "HIGH", "thinkingBudget": 50}, "high", 50),
     ({"thinkingLevel": "HIGH", "thinkingBudget": 0}, "high", None),
     ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, "medium", None)],
)  # fmt: skip
def test_thinking_is_a_level_and_a_budget(api, monkeypatch, config, level, budget):
    monkeypatch.setattr(api.engine, "context_length", 60_000)
    body = hi(generationConfig={"thinkingConfig": config})
    response = generate(api, body)
    sent = api.engine.submitted[-1]
    assert (sent.params.level, sent.params.thinking and sent.params.thinking.most) == (level, budget)
    assert response.headers["x-umbra-level"] == level
    assert response.headers.get("x-umbra-thinking", "off") == (str(budget) if budget else "off")
    counted = api.client.post(f"{URL}:countTokens", json={"generateContentRequest": body}).json()
    assert counted["totalTokens"] == len(sent.prompt)


def test_an_adaptive_budget_explains_itself(api):
    response = generate(api, generationConfig={"thinkingConfig": {"thinkingBudget": -1}})
    assert response.headers["x-umbra-thinking"].startswith("off; adaptive: score 0")


def test_the_default_level_makes_nobody_think(start_api):
    api = start_api(ServerConfig(level="high"))
    assert generate(api).headers["x-umbra-level"] == "high"
    assert api.engine.submitted[0].params.thinking is None


def test_an_answer_that_fails_midway(api):
    api.engine.plan = lambda prompt, params: [
        Emission("a", (97,)), None, None, Emission("b", (98,), finish_reason="error", error="secret")
    ]  # fmt: skip
    response = api.client.post(f"{URL}:streamGenerateContent?alt=sse", json=hi())
    *answers, failed = events(response.text)
    assert text_of(answers) == "ab" and list(failed) == ["error"]
    assert failed["error"]["code"] == 500 and failed["error"]["status"] == "INTERNAL"
    assert '\ndata: {"error":' in response.text and "secret" not in response.text
    *answers, failed = api.client.post(f"{URL}:streamGenerateContent", json=hi()).json()
    assert text_of(answers) == "ab" and failed["error"]["code"] == 500


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent?alt=sse"])
def test_the_client_s_deadline(api, wait, method):
    api.engine.plan = lambda prompt, params: itertools.repeat(None)
    response = api.client.post(f"{URL}:{method}", json=hi(), headers={"x-server-timeout": "0.1"})
    assert response.status_code == 504 and response.json()["error"]["status"] == "DEADLINE_EXCEEDED"
    wait(lambda: not api.engine.running)
    api.engine.plan = lambda prompt, params: itertools.chain([Emission("a", (97,))], itertools.repeat(None))
    response = api.client.post(f"{URL}:{method}", json=hi(), headers={"x-server-timeout": "0.3"})
    if "stream" in method:
        assert events(response.text)[-1]["error"]["code"] == 504
    else:
        assert response.status_code == 504
    for odd in ("", "soon", "-1", "nan", "1e400", "100"):
        api.engine.plan = lambda prompt, params: [Emission("a", (97,), finish_reason="stop_token")]
        assert api.client.post(f"{URL}:{method}", json=hi(), headers={"x-server-timeout": odd}).status_code == 200


def test_a_client_that_leaves(api, wait):
    api.engine.plan = lambda prompt, params: (Emission("word ", (97,)) for _ in itertools.count())
    with api.client.stream("POST", f"{URL}:streamGenerateContent?alt=sse", json=hi()) as response:
        next(response.iter_raw())
    wait(lambda: len(api.engine.cancelled) == 1)
    wait(lambda: api.service.inflight == 0)


def test_line_separators(api, make_answer):
    text = "a\u2028b\u2029c\u0085d\r\n"
    api.engine.plan = lambda prompt, params: make_answer(text)
    response = api.client.post(f"{URL}:streamGenerateContent?alt=sse", json=hi())
    assert len(response.text.splitlines()) == response.text.count("\n")
    assert text_of(events(response.text)) == text


def test_described(api):
    document = api.client.get("/openapi.json").json()
    for version in ("v1", "v1beta", "v1alpha"):
        post = document["paths"][f"/{version}/{{model}}:generateContent"]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/GenerateBody")
    assert "generationConfig" in document["components"]["schemas"]["GenerateBody"]["properties"]


class Tools:
    """A template whose model calls tools."""

    source = "{% for tool in tools %}{% endfor %}<tool_call>{'arguments': 1}</tool_call>"
    variables = frozenset({"tools", "messages"})

    def render(self, messages, **_):
        return ""

    def encode(self, tokenizer, messages, *, tools=None, **_):
        return list(json.dumps([tools, messages]).encode())


@pytest.fixture
def with_tools(api):
    template, api.model.chat_template = api.model.chat_template, Tools()
    api.attach()
    yield
    api.model.chat_template = template


DECLARED = [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": {
    "type": "OBJECT", "properties": {"b_c": {"type": "INTEGER"}, "a": {"type": "STRING", "nullable": True}},
    "property_ordering": ["a", "b_c"]}}]}]  # fmt: skip


def test_tools_are_shown_to_the_model(api, with_tools):
    contents = [
        turn("user", "go"),
        {"role": "model", "parts": [{"text": "Well."}, {"functionCall": {"id": "1", "name": "f", "args": {"b_c": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "f", "response": {"x_y": "ä"}}}]},
    ]
    body = {"contents": contents, "tools": DECLARED}
    used = generate(api, body).json()["usageMetadata"]["promptTokenCount"]
    tools, messages = json.loads(prompt_of(api))
    function = tools[0]["function"]
    assert (function["name"], function["description"]) == ("f", "d")
    assert function["parameters"] == {
        "type": "object", "properties": {"a": {"type": ["string", "null"]}, "b_c": {"type": "integer"}}
    }  # fmt: skip
    assert list(function["parameters"]["properties"]) == ["a", "b_c"]
    assert messages == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Well.", "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"b_c": 1}}}]},
        {"role": "tool", "name": "f", "content": '{"x_y":"ä"}', "tool_call_id": "1"},
    ]  # fmt: skip
    assert api.client.post(f"{URL}:countTokens", json=body).json()["totalTokens"] == used
    none = {**hi(), "tools": DECLARED, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}
    generate(api, none)
    assert json.loads(prompt_of(api))[0] is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [('<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>', [("f", {"a": "x"})]),
     ('Well. <tool_call>\n{"name": "f"}\n</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
      ["Well.", ("f", {}), ("f", {})]),
     ("a <tool_cal b", ["a <tool_cal b"])],
)  # fmt: skip
def test_calls_become_parts(api, with_tools, make_answer, text, parts):
    api.engine.plan = lambda prompt, params: make_answer(text)
    for answers in ([generate(api, tools=DECLARED).json()], stream(api, tools=DECLARED)):
        got = [
            part for answer in answers for part in answer["candidates"][0]["content"]["parts"] if part.get("text") != ""
        ]
        calls = [(p["functionCall"]["name"], p["functionCall"]["args"]) for p in got if "functionCall" in p]
        assert calls == [part for part in parts if isinstance(part, tuple)]
        assert text_of(answers) == "".join(part for part in parts if isinstance(part, str))
        assert answers[-1]["candidates"][0]["finishReason"] == "STOP"
        assert len({p["functionCall"]["id"] for p in got if "functionCall" in p}) == len(calls)


@pytest.mark.parametrize(
    "text", ["<tool_call>{</tool_call>", '<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "f"',
             '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "<tool_call>[]</tool_call>"]
)  # fmt: skip
def test_calls_that_are_none(api, with_tools, make_answer, text):
    api.engine.plan = lambda prompt, params: make_answer(text)
    for answers in ([generate(api, tools=DECLARED).json()], stream(api, tools=DECLARED)):
        candidate = answers[-1]["candidates"][0]
        assert candidate["finishReason"] == "MALFORMED_FUNCTION_CALL" and candidate["finishMessage"]
        assert text_of(answers) == ""


WORDS = ["a", "ö", "🎉", " ", "\n", "<tool_call>", "</tool_call>", '{"name": "f"}', "<tool", "stop", "sto"]
PIECES = st.lists(st.sampled_from(WORDS), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(thought=PIECES, answer=PIECES, seed=st.integers(0, 2**32), finish=st.sampled_from(["stop_token", "max_tokens"]),
       tools=st.booleans(), think=st.booleans(), stop=st.booleans(), count=st.integers(1, 3))  # fmt: skip
def test_grouping_changes_nothing(api, thought, answer, seed, finish, tools, think, stop, count):
    """However many tokens come at once: text, thoughts, calls, log-probabilities and usage are the same, and those of
    the whole answer."""
    thought, answer = "".join(thought), "".join(answer)
    config = {"candidateCount": count, "responseLogprobs": True, "logprobs": 1, "stopSequences": ["stop"] * stop}
    if think:
        config["thinkingConfig"] = {"includeThoughts": True, "thinkingBudget": 100}
    body = hi(generationConfig=config)
    template = api.model.chat_template
    if tools:
        body["tools"] = DECLARED
        api.model.chat_template = Tools()
    api.attach()
    try:
        seen = []
        for sizes in ([1], [2], [1, 3, 2, 8], [10_000], None):
            cycle = itertools.cycle(sizes or [3])
            api.engine.plan = lambda prompt, params, c=cycle: spoken(thought, answer, params, c, finish)
            seen.append(summary(stream(api, body) if sizes else [generate(api, body).json()], count))
    finally:
        api.model.chat_template = template
    assert all(one == seen[0] for one in seen)
    first, used = seen[0][0][0], seen[0][1]
    thoughts = used.get("thoughtsTokenCount", 0)
    assert used["promptTokenCount"] + used["candidatesTokenCount"] + thoughts == used["totalTokenCount"]
    assert first["thought"] == (thought.strip() if think else "") and (thoughts > 0) == think
    if not tools:
        whole = answer.lstrip() if think else answer
        assert first["text"] == (whole.split("stop")[0] if stop else whole)
        assert stop or "".join(text for _, text in first["tokens"]) == first["text"]


def summary(answers, count):
    """What a client knows at the end of an answer: of each candidate and in all."""
    out = []
    for index in range(count):
        pieces = [one for answer in answers for one in answer["candidates"] if one["index"] == index]
        parts = [part for piece in pieces for part in piece.get("content", {}).get("parts", ())]
        chosen = [one for piece in pieces for one in piece.get("logprobsResult", {}).get("chosenCandidates", ())]
        (finish,) = [piece["finishReason"] for piece in pieces if "finishReason" in piece]
        out.append({
            "text": text_of(answers, index),
            "thought": text_of(answers, index, thought=True),
            "calls": [{**part["functionCall"], "id": None} for part in parts if "functionCall" in part],
            "tokens": [(one["tokenId"], one["token"]) for one in chosen],
            "average": [piece["avgLogprobs"] for piece in pieces if "avgLogprobs" in piece],
            "finish": finish,
            "count": next(piece["tokenCount"] for piece in pieces if "tokenCount" in piece),
        })  # fmt: skip
    return out, answers[-1]["usageMetadata"]
