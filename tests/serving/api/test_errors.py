"""Bad requests: the right status, an error body, the parameter named, and nothing reaches the engine."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading

import httpx
import pytest

from umbra.configs.engine import EngineConfig
from umbra.serving.api import openai_chat, openai_completions
from umbra.serving.engine import Emission

CHAT = "/v1/chat/completions"
GOOD = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and len(error["message"]) <= 500
    return error


def told(call):
    """A message of the assistant with a call."""
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


BAD_OPTIONS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 9}, "n"),
    ({"n": 10**40}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -(10**50)}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(10**4000)}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [300]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(600)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "refuse this"}]}, "messages"),
    # known options that cannot be honoured
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (told({"id": "1"}), "messages[0].tool_calls[0].function"),
    (told({"id": "1", "function": {"arguments": "{}"}}), "messages[0].tool_calls[0].function.name"),
    (told({"id": "1", "function": {"name": "f", "arguments": {}}}), "messages[0].tool_calls[0].function.arguments"),
    (told({"id": "1", "function": {"name": "f", "arguments": "[1]"}}), "messages[0].tool_calls[0].function.arguments"),
    (told({"id": "1", "type": "custom", "custom": {}}), "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
    ({"functions": [{"name": "f g"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}] * 2}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {}}, "function_call"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "["}}]},
     "messages[0].function_call.arguments"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": "text"}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"reasoning": {"effort": ""}}, "reasoning.effort"),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
    ({"reasoning": "low"}, "reasoning"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled"}, "thinking_budget": 5}, "thinking_budget"),
    ({"thinking_budget": 1.5}, "thinking_budget"),
    ({"thinking_budget": -2}, "thinking_budget"),
    ({"thinking_budget": 10**400}, "thinking_budget"),
    ({"level": "turbo"}, "level"),
    ({"level": ["low"]}, "level"),
    ({"web_search_options": {}}, "web_search_options"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "param"), BAD_OPTIONS)
def test_bad_option_is_named(api, option, param):
    error = error_of(api.client.post(CHAT, json={**GOOD, **option}), 400)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert not api.engine.submitted


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none(api, name, value):
    body = f'{{"model": "fake", "messages": [{{"role": "user", "content": "Hi"}}], "{name}": {value}}}'
    assert error_of(api.client.post(CHAT, content=body), 400)["param"] == name


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"{'a': 1}", b'{"a": 1}}', b"\xff\xfe", b'{"model": "\xff"}',
     b'{"model": "\xed\xa0\x80"}', b'{"model": "\\ud800"}', b"[" * 10_000, b'{"a":' * 5_000, b"\x00"],
)  # fmt: skip
def test_bodies_that_are_no_json_object(api, body):
    error = error_of(api.client.post(CHAT, content=body), 400)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    "option",
    [{"prompt": [*range(200), *["x"] * 20_000]}, {"prompt": [[1]] * 10_000 + [5] * 5_000}, {"stop": [1] * 40_000},
     {"prompt": "x", "logit_bias": {str(i): "x" for i in range(7_000)}}],
)  # fmt: skip
def test_many_faults_are_one_short_error(api, option):
    assert len(error_of(api.complete(**option), 400)["message"]) < 500


def test_text_that_cannot_fit_is_not_tokenized(api):
    encode, api.model.tokenizer.encode = api.model.tokenizer.encode, None
    try:
        error = error_of(api.complete(prompt="x" * 8008), 400)
    finally:
        api.model.tokenizer.encode = encode
    assert error["code"] == "context_length_exceeded" and "more than 1001" in error["message"]


def test_messages_say_what_was_expected(api):
    def message(**option):
        return api.client.post(CHAT, json={**GOOD, **option}).json()["error"]

    wrong = message(temperature="hot")
    assert wrong["message"] == "Invalid type for 'temperature': expected a decimal, but got a string instead."
    assert wrong["code"] == "invalid_type"
    assert "a string or an array" in message(stop=5)["message"]
    assert "'system', 'developer', 'user', 'assistant'" in message(messages=[{"role": "x", "content": "y"}])["message"]
    assert message(messages=[])["code"] == "empty_array"
    missing = api.client.post(CHAT, json={"model": "fake"}).json()["error"]
    assert missing == {
        "message": "Missing required parameter: 'messages'.", "type": "invalid_request_error", "param": "messages",
        "code": "missing_required_parameter",
    }  # fmt: skip


def test_unknown_model(api):
    error = error_of(api.client.post(CHAT, json={**GOOD, "model": "no-such"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "'no-such' does not exist" in error["message"]
    assert error_of(api.client.get("/v1/models/no-such"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(api, stream):
    error = error_of(api.chat(messages=[{"role": "user", "content": "x" * 5000}], stream=stream), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "1000 tokens" in error["message"] and "5007" in error["message"]
    assert error_of(api.complete(prompt=[1] * 1000), 400)["param"] == "prompt"


def test_more_messages_than_the_context_has_tokens(api):
    error = error_of(api.chat(messages=[{"role": "user", "content": ""}] * 1001), 400)
    assert error["code"] == "context_length_exceeded" and "at least 1001 tokens" in error["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_limit(api, declared):
    body = json.dumps({**GOOD, "messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    content = body if declared else (body[i : i + 65536] for i in range(0, len(body), 65536))
    error = error_of(api.client.post(CHAT, content=content), 413)
    assert error["code"] == "request_too_large" and "100000 bytes" in error["message"]
    assert api.chat().status_code == 200


def test_body_over_the_limit_is_refused_before_it_is_there(api):
    """A client that announces a huge body is answered although it never sends it."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=5) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_body_that_never_comes(api):
    with socket.create_connection(("127.0.0.1", api.port), timeout=5) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_compressed_body(api):
    error_of(api.client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize("stream", [False, True])
def test_queue_full(api, stream):
    api.engine.max_queue = 0
    response = api.chat(stream=stream)
    error = error_of(response, 429)
    assert error["code"] == "rate_limit_exceeded" and response.headers["retry-after"] == "3"


def test_queue_full_for_one_choice_refuses_all(api, wait):
    api.engine.max_queue = 2
    api.engine.plan = lambda prompt, params: iter([None] * 10_000)
    error_of(api.chat(n=3), 429)
    wait(lambda: len(api.engine.cancelled) == 2)


def test_more_choices_than_the_queue_holds(api):
    """Not 429: it would be the same however often the client tried."""
    api.engine.config = EngineConfig(max_queue=4)
    error = error_of(api.chat(n=5), 400)
    assert error["param"] == "n" and "between 1 and 4" in error["message"]
    error = error_of(api.complete(prompt=["a", "b", "c"], n=2), 400)
    assert error["param"] == "n" and "4 supported" in error["message"]
    assert not api.engine.submitted
    assert api.complete(prompt=["a", "b"], n=2).status_code == 200


def test_a_failed_answer_says_nothing_about_the_engine(api, caplog):
    api.engine.plan = lambda prompt, params: [Emission("", finish_reason="error", error="secret detail")]
    with caplog.at_level(logging.ERROR):
        response = api.chat()
    assert error_of(response, 500)["code"] == "engine_error"
    assert "secret" not in response.text and "secret detail" in caplog.text


def test_ids_that_cannot_fit_are_not_looked_at(api):
    error = error_of(api.complete(prompt=[[1], [-1] * 1000]), 400)
    assert error["code"] == "context_length_exceeded" and "1000 tokens" in error["message"]


def test_large_bodies_are_worked_on_in_a_worker(api, monkeypatch):
    """Whatever takes time that grows with the body leaves the event loop alone."""
    threads = []

    def noting(original):
        def call(*args, **kwargs):
            threads.append(threading.current_thread().name)
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(openai_chat, "template_messages", noting(openai_chat.template_messages))
    monkeypatch.setattr(openai_completions, "check_ids", noting(openai_completions.check_ids))
    monkeypatch.setattr(api.model.tokenizer, "decode", noting(api.model.tokenizer.decode), raising=False)
    padding = {"metadata": {"x": "y" * 20_000}}
    assert api.chat(**padding).status_code == 200
    assert api.complete(prompt=[65, 66], echo=True, **padding).json()["choices"][0]["text"].startswith("AB")
    assert api.complete(prompt=[65], echo=True).status_code == 200
    assert len(threads) == 5 and threads[3] != threads[0]  # a small body is checked on the event loop
    assert all(name.startswith("api-worker") for i, name in enumerate(threads) if i != 3)


def test_engine_stopped(api):
    api.engine.stopped = True
    response = api.chat()
    error = error_of(response, 503)
    assert error["code"] == "engine_stopped" and int(response.headers["retry-after"]) >= 1
    api.engine.ready = False
    assert error_of(api.chat(), 503)["code"] == "engine_not_ready"


def test_unexpected_failure_says_nothing_about_itself(api, caplog):
    with caplog.at_level(logging.ERROR):
        response = api.chat(messages=[{"role": "user", "content": "explode"}])
    error = error_of(response, 500)
    assert error["type"] == "server_error" and "secret" not in response.text
    assert response.headers["x-request-id"] in error["message"]
    assert response.headers["x-request-id"] in caplog.text and "KeyError" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/", 405), ("GET", "/v1", 404), ("POST", "/v1/nothing", 404),
     ("GET", "/v1/chat/completions", 405),
     ("DELETE", "/v1/completions", 405), ("POST", "/v1/models", 405), ("POST", "/healthz", 405),
     ("GET", "/v1/models/", 404), ("PATCH", "/%00%ff", 404), ("OPTIONS", CHAT, 405)],
)  # fmt: skip
def test_unknown_paths_and_methods(api, method, path, status):
    response = api.client.request(method, path)
    error = error_of(response, status)
    if status == 405:
        assert response.headers["allow"] and error["code"] == "method_not_supported"
    elif error["code"] != "model_not_found":
        assert error["code"] == "unknown_url" and method in error["message"]


def test_no_cors(api):
    response = api.client.options(CHAT, headers={"origin": "http://evil", "access-control-request-method": "POST"})
    assert response.status_code == 405
    assert not any(
        name.startswith("access-control") for name in api.client.get("/v1/models", headers={"origin": "x"}).headers
    )


def test_tls_on_a_plain_port(api):
    with pytest.raises((httpx.HTTPError, ssl.SSLError)):
        httpx.get(api.url.replace("http", "https"), verify=False)
    assert api.client.get("/healthz").status_code == 200
