from __future__ import annotations

import json
import re

import pytest

from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"


def events(response):
    """The data of a stream's events; the last one must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    data = [block.removeprefix("data: ") for block in blocks[:-1] if not block.startswith(":")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def text_of(chunks, index=0):
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_whole(api):
    response = api.chat()
    assert response.status_code == 200
    body = response.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["system_fingerprint"] == "fp_fake"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt, completion = len("user: Hi\n"), len(TEXT.encode())
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == completion
    assert body["usage"]["total_tokens"] == prompt + completion
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert response.headers["x-umbra-ttft-ms"] == "10.0"
    assert response.headers["x-umbra-cached-tokens"] == "4"
    assert response.headers["x-request-id"].startswith("req_")


def test_stream_is_the_whole_text(api):
    chunks = events(api.chat(stream=True))
    assert text_of(chunks) == TEXT
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1 and chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in c for c in chunks)


def test_a_stream_ends_with_what_headers_could_not_tell(api):
    chunks = events(api.chat(stream=True, n=2, level="low"))
    told = [chunk["umbraMetadata"] for chunk in chunks if "umbraMetadata" in chunk]
    assert told == [chunks[-1]["umbraMetadata"]] and chunks[-1]["choices"][0]["finish_reason"]
    assert told[0]["level"] == "low" and told[0]["systemFingerprint"] == "fp_fake"
    assert {"ttftMs", "tokensPerPass", "cachedTokens", "queueMs", "totalMs"} <= set(told[0])


def test_stream_usage(api):
    chunks = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(TEXT.encode())
    assert all(c["usage"] is None for c in chunks[:-1])


@pytest.mark.parametrize(
    ("engine_reason", "reason"),
    [("stop_token", "stop"), ("stop_string", "stop"), ("max_tokens", "length"), ("context_length", "length")],
)
def test_finish_reasons(api, make_answer, engine_reason, reason):
    api.engine.plan = lambda prompt, params: make_answer("ab", engine_reason)
    assert api.chat().json()["choices"][0]["finish_reason"] == reason
    assert events(api.chat(stream=True))[-1]["choices"][0]["finish_reason"] == reason


def test_choices(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"seed {params.seed}")
    body = api.chat(n=3, seed=7).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["seed 7", "seed 8", "seed 9"]
    assert body["usage"]["prompt_tokens"] == len("user: Hi\n")
    assert body["usage"]["completion_tokens"] == 3 * len("seed 7")
    chunks = events(api.chat(n=3, seed=7, stream=True))
    assert [text_of(chunks, i) for i in range(3)] == ["seed 7", "seed 8", "seed 9"]


def test_logprobs(api):
    for chunks in (
        [api.chat(logprobs=True, top_logprobs=2).json()],
        events(api.chat(logprobs=True, top_logprobs=2, stream=True)),
    ):
        listed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert bytes(byte for entry in listed for byte in entry["bytes"]).decode() == TEXT
        assert listed[0]["token"] == "H" and listed[0]["logprob"] == -0.5
        assert [t["token"] for t in listed[0]["top_logprobs"]] == ["A", "B"]


def test_logprobs_of_a_hidden_stop_string_are_hidden(api):
    steps = [Emission("ok", (111, 107)), Emission("", (33,)), Emission("", (33,), finish_reason="stop_string")]
    api.engine.plan = lambda prompt, params: steps
    body = api.chat(logprobs=True, stop="!!").json()
    assert [e["token"] for e in body["choices"][0]["logprobs"]["content"]] == ["o", "k"]
    assert body["usage"]["completion_tokens"] == 4


def test_infinite_logprobs_stay_json(api):
    def plan(prompt, params):
        return [Emission("a", (97,)), Emission("", finish_reason="stop_token")]

    api.engine.plan = plan
    api.engine._logprobs = lambda one, emission: ()
    try:
        from umbra.serving.engine import TokenLogprob

        api.engine._logprobs = lambda one, emission: tuple(
            TokenLogprob(t, float("-inf"), ((t, float("-inf")),)) for t in emission.token_ids
        )
        entry = api.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"][0]
        assert entry["logprob"] == -9999.0 and entry["top_logprobs"][0]["logprob"] == -9999.0
    finally:
        del api.engine._logprobs


def test_options_reach_the_engine(api):
    response = api.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"65": -100, "66": 5.5},
        seed=123,
        stop=["a", "b"],
        max_completion_tokens=50,
        max_tokens=7,
        ignore_eos=True,
        stop_token_ids=[9],
        logprobs=True,
        top_logprobs=3,
        user="me",
    )
    assert response.status_code == 200
    params = api.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert params.logit_bias == ((65, -100.0), (66, 5.5)) and params.seed == 123
    assert params.stop == ("a", "b") and params.max_tokens == 50
    assert params.ignore_eos and params.stop_token_ids == (9,) and params.logprobs == 3


def test_defaults_are_openais(api):
    api.chat()
    params = api.engine.submitted[0].params
    assert params.temperature == 1.0 and params.top_p == 1.0 and params.max_tokens is None and params.logprobs is None


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [({"top_p": 0}, "top_p", 1e-6), ({"top_k": -1}, "top_k", 0), ({"top_k": 10**9}, "top_k", 300),
     ({"max_tokens": 10**30}, "max_tokens", 1000), ({"stop": "x"}, "stop", ("x",)), ({"stop": []}, "stop", ()),
     ({"temperature": 0}, "temperature", 0), ({"temperature": None}, "temperature", 1.0)],
)  # fmt: skip
def test_edges(api, option, field, value):
    assert api.chat(**option).status_code == 200
    assert getattr(api.engine.submitted[0].params, field) == value


def test_messages_become_the_template_s(api):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d", "name": "me"},
    ]
    assert api.chat(messages=messages).status_code == 200
    assert bytes(api.engine.submitted[0].prompt).decode() == "system: Be brief.\nuser: ab\nassistant: c\nuser: d\n"


def test_harmless_options_are_accepted_and_unknown_ones_named(api):
    response = api.chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=True,
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="none",
        temprature=1,
    )
    assert response.status_code == 200
    assert response.headers["x-umbra-ignored"] == "temprature"


@pytest.mark.parametrize(("store", "keep"), [(None, "blocks"), (True, "blocks"), (False, "nothing")])
def test_what_is_not_to_be_stored_leaves_nothing_behind(api, store, keep):
    for stream in (False, True):
        assert api.chat(store=store, stream=stream).status_code == 200
        assert api.engine.submitted[-1].keep == keep


def test_empty_answer(api):
    api.engine.plan = lambda prompt, params: [Emission("", (257,), finish_reason="stop_token")]
    assert api.chat().json()["choices"][0]["message"]["content"] == ""
    chunks = events(api.chat(stream=True))
    assert text_of(chunks) == "" and chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_line_separators_are_escaped(api, make_answer):
    text = "a\u2028b\u2029c\u0085d\r\n"
    api.engine.plan = lambda prompt, params: make_answer(text)
    response = api.chat(stream=True)
    assert len(response.text.splitlines()) == response.text.count("\n")
    assert text_of(events(response)) == text


def test_no_template(api):
    template, api.model.chat_template = api.model.chat_template, None
    api.attach()
    try:
        response = api.chat()
    finally:
        api.model.chat_template = template
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
