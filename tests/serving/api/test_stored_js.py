"""What is stored and what has a session, with the JavaScript clients, where there is Node."""

from __future__ import annotations

import itertools

import pytest

from umbra.serving.engine import Emission

from .javascript import GOOGLE, OPENAI, run


@pytest.fixture
def url(api):
    """Of a server that echoes."""

    def plan(prompt, params):
        line = bytes(prompt).decode().splitlines()[-1]
        if line.endswith("slow"):
            return (Emission("word ", (97,)) for _ in itertools.count())
        return [*(Emission(c, tuple(c.encode())) for c in f"re {line}"), Emission("", finish_reason="stop_token")]

    api.engine.plan = plan
    return api.url


def test_google(url):
    out = run("stored.mjs", GOOGLE, url)
    prompt = len("user: one\nre user: one\nuser: two\n")
    assert out["whole"] == ["re user: one", "re user: two", "completed", prompt + len("re user: two")]
    assert out["streamed"]["text"] == "re user: three" and out["streamed"]["kinds"][0] == "interaction.created"
    assert out["streamed"]["kinds"][-1] == "interaction.completed"
    assert out["replayed"] == ["re user: three", True]
    assert (out["background"], out["cancelled"]) == ("in_progress", "cancelled")
    assert out["gone"]["status"] == 404 and out["bad"]["status"] == 400
    tokens = len("user: a document ")
    assert out["cache"] == {
        "listed": True, "later": True, "tokens": [tokens, tokens], "text": "re user: a document What?"
    }  # fmt: skip
    live = out["live"]
    assert live["texts"] == ["re user: one", "re user: two", ""] and live["handle"]
    assert live["usage"]["responseTokenCount"] == len("re user: two") and live["usage"]["promptTokenCount"] == prompt
    assert out["badLive"] == 1008


def test_openai(url):
    out = run("responses.mjs", OPENAI, url)
    assert out["texts"] == ["re user: one", "re user: two"] and out["text"] == "re user: three"
    assert out["numbers"] and out["last"] == "response.completed"
    assert out["cancelled"] == ["in_progress", "cancelled"] and out["gone"] == 404
