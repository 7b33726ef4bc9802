"""More than a hundred kinds of requests that no server should answer with anything but a refusal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
CONTENTS: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}


@dataclasses.dataclass(frozen=True)
class Bad:
    """A request and what is wrong with it."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def google(self) -> bool:
        """Whether the refusal has Google's shape."""
        return "/v1beta" in self.path or self.path.startswith("/models/")


def bad_requests(model: str) -> list[Bad]:
    """All of them, for a server that has `model` and asks for no key."""
    return [*_not_json(model), *_openai(model), *_gemini(model), *_paths(model), *_headers(model)]


def _not_json(model: str) -> Iterator[Bad]:
    paths = (CHAT, COMPLETIONS, RESPONSES, f"/v1beta/models/{model}:generateContent")
    bodies = {
        "nothing": b"", "half an object": b'{"model"', "a list": b"[]", "a number": b"7", "null": b"null",
        "not UTF-8": b'{"model": "\xff\xfe"}', "NaN": b'{"temperature": NaN}', "comment": b"{} // no",
        "deep": b'{"a":' * 3000 + b"1" + b"}" * 3000, "a form": b"model=x&prompt=y",
    }  # fmt: skip
    for path in paths:
        for name, body in bodies.items():
            yield Bad(f"{path}: {name}", "POST", path, body)


def _openai(model: str) -> Iterator[Bad]:
    chat: dict[str, dict[str, Any]] = {
        "no messages": {}, "messages null": {"messages": None}, "messages empty": {"messages": []},
        "messages text": {"messages": "Hi"}, "message null": {"messages": [None]}, "role missing": _said(content="x"),
        "role unknown": _said(role="wizard", content="x"), "content a number": _said(role="user", content=7),
        "content null": _said(role="user", content=None), "part null": _said(role="user", content=[None]),
        "part unknown": _said(role="user", content=[{"type": "video", "video": "x"}]),
        "image": _said(role="user", content=[{"type": "image_url", "image_url": {"url": "data:,"}}]),
        "text part without text": _said(role="user", content=[{"type": "text"}]),
        **{f"{name} = {value!r}": {**HI, name: value} for name, value in (
            ("model", "no-such-model"), ("model", 7), ("model", ""), ("temperature", -1), ("temperature", "hot"),
            ("temperature", 1e9), ("top_p", 2), ("top_p", -0.1), ("n", 0), ("n", 10**9), ("n", 1.5), ("n", "two"),
            ("max_tokens", 0), ("max_tokens", -5), ("max_completion_tokens", "many"), ("stop", [""]), ("stop", [7]),
            ("stop", ["x"] * 100), ("seed", 2**70), ("seed", "lucky"), ("logprobs", "yes"), ("top_logprobs", 5),
            ("logit_bias", {"x": 1}), ("logit_bias", {"1": 1000}), ("logit_bias", [1]), ("presence_penalty", 9),
            ("frequency_penalty", -9), ("stream", "yes"), ("stream_options", {"include_usage": True}),
            ("tools", 7), ("tool_choice", "sometimes"), ("response_format", {"type": "poem"}),
            ("response_format", "json"), ("reasoning_effort", "enormous"), ("modalities", ["audio"]),
            ("priority", "urgent"), ("context_policy", "all"), ("level", "turbo"), ("stop_token_ids", [-1]),
            ("stop_token_ids", [10**12]), ("min_p", 7), ("top_k", -7),
        )},
    }  # fmt: skip
    for name, body in chat.items():
        yield Bad(f"chat: {name}", "POST", CHAT, _json({"model": model, **body}))
    completions: dict[str, dict[str, Any]] = {
        "no prompt": {}, "prompt null": {"prompt": None}, "prompt empty": {"prompt": []}, "ids": {"prompt": [-1]},
        "ids too large": {"prompt": [10**12]}, "mixed": {"prompt": ["x", 1]}, "nested": {"prompt": [[["x"]]]},
        "best_of": {"prompt": "x", "best_of": 5}, "suffix": {"prompt": "x", "suffix": "y"}, "no id": {"prompt": [[]]},
        "logprobs": {"prompt": "x", "logprobs": 1000}, "too long": {"prompt": "x " * 400_000},
    }  # fmt: skip
    for name, body in completions.items():
        yield Bad(f"completions: {name}", "POST", COMPLETIONS, _json({"model": model, **body}))
    responses: dict[str, dict[str, Any]] = {
        "no input": {}, "input null": {"input": None}, "input number": {"input": 7}, "item": {"input": [{"type": "x"}]},
        "previous": {"input": "x", "previous_response_id": "resp_none"}, "max": {"input": "x", "max_output_tokens": 0},
        "format": {"input": "x", "text": {"format": {"type": "poem"}}},
        "tools": {"input": "x", "tools": [{"type": "x"}]},
    }  # fmt: skip
    for name, body in responses.items():
        yield Bad(f"responses: {name}", "POST", RESPONSES, _json({"model": model, **body}))


def _gemini(model: str) -> Iterator[Bad]:
    config = {
        **{f"{name} = {value!r}": {name: value} for name, value in (
            ("temperature", -1), ("temperature", "hot"), ("topP", 2), ("topK", -1), ("candidateCount", 0),
            ("candidateCount", 10**6), ("maxOutputTokens", 0), ("stopSequences", [""]), ("stopSequences", "x"),
            ("seed", 2**70), ("logprobs", 5), ("responseMimeType", "image/png"), ("responseSchema", {"type": "POEM"}),
            ("thinkingConfig", {"thinking_level": "ENORMOUS"}), ("thinkingConfig", {"thinking_budget": -7}),
            ("presencePenalty", 9), ("responseModalities", ["AUDIO"]),
        )}
    }  # fmt: skip
    bodies: dict[str, dict[str, Any]] = {
        "no contents": {}, "empty": {"contents": []}, "null part": {"contents": [{"parts": [None]}]},
        "no parts": {"contents": [{"role": "user"}]},
        "role": {"contents": [{"role": "wizard", "parts": [{"text": "x"}]}]},
        "empty part": {"contents": [{"parts": [{}]}]}, "number": {"contents": [{"parts": [{"text": 7}]}]},
        "image": {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]}]},
        "other model": {**CONTENTS, "model": "models/other"},
        "cache": {**CONTENTS, "cachedContent": "cachedContents/none"},
        "tools": {**CONTENTS, "tools": 7}, "mode": {**CONTENTS, "toolConfig": {"functionCallingConfig": {"mode": "X"}}},
        **{f"config {name}": {**CONTENTS, "generationConfig": one} for name, one in config.items()},
    }  # fmt: skip
    for name, body in bodies.items():
        for method in ("generateContent", "streamGenerateContent?alt=sse"):
            yield Bad(f"{method}: {name}", "POST", f"/v1beta/models/{model}:{method}", _json(body))
    count = f"/v1beta/models/{model}:countTokens"
    yield Bad("countTokens: nothing", "POST", count, b"{}")
    yield Bad("countTokens: both", "POST", count, _json({**CONTENTS, "generateContentRequest": CONTENTS}))


def _paths(model: str) -> Iterator[Bad]:
    for method, path in (
        ("GET", "/nowhere"), ("GET", "/v1/nowhere"), ("POST", "/v1/models"), ("GET", CHAT), ("PUT", CHAT),
        ("DELETE", "/v1/models/x"), ("GET", "/v1/models/no-such"), ("GET", "/v1beta/models/no-such"),
        ("GET", "/v1/responses/resp_none"), ("DELETE", "/v1/responses/resp_none"), ("POST", "/v1beta/models/x:y"),
        ("POST", f"/v1beta/models/{model}:dance"), ("POST", f"/v1beta/models/{model}"),
        ("POST", "/models/x:countTokens"),
        ("GET", "/../../etc/passwd"), ("GET", "/%2e%2e/%2e%2e/etc/passwd"), ("GET", "/v1/models/%00"),
        ("BREW", "/v1/models"), ("GET", "/" + "a" * 5000), ("POST", f"/v1beta/models/{model}:generateContent?alt=xml"),
    ):  # fmt: skip
        yield Bad(f"{method} {path[:40]}", method, path, _json(CONTENTS) if method == "POST" else b"")


def _headers(model: str) -> Iterator[Bad]:
    body = _json({"model": model, **HI})
    for headers in (
        {"content-encoding": "gzip"}, {"content-encoding": "br"}, {"x-goog-priority": "urgent"},
        {"x-goog-context-policy": "everything"},
    ):  # fmt: skip
        name, value = next(iter(headers.items()))
        yield Bad(f"{name}: {value}", "POST", CHAT, body, headers)


def _said(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
