"""Programs that talk to the server: our own terminal chat, and OpenAI's client."""

from __future__ import annotations

import io

import openai
import pytest

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.scripts import chat
from umbra.serving.engine import Emission


@pytest.fixture
def ask(monkeypatch, capsys):
    """Pipe lines into chat.py; its exit code, stdout and stderr."""

    def run(*lines, args=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = chat.main(list(args))
        return code, *capsys.readouterr()

    return run


def test_chat_with_a_server(api, ask, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"You said {bytes(prompt).decode().splitlines()[-1]!r} 🎉")
    code, out, err = ask("one", "two", args=["--url", api.url + "/v1", "--temperature", "0.5", "--seed", "3"])
    assert code == 0
    assert out == "You said 'user: one' 🎉\nYou said 'user: two' 🎉\n"
    assert err.count("tokens/s") == 2
    params = api.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 1.0, 3, 1000)


def test_chat_reports_errors(api, ask, make_answer):
    plans = [
        [Emission("a", (97,)), Emission("", finish_reason="error", error="the step failed")],
        make_answer("b"),
    ]
    api.engine.plan = lambda prompt, params: plans.pop(0)
    code, out, err = ask("x" * 2000, "one", "two", args=["--url", api.url])
    assert code == 1 and out == "a\nb\n"
    assert "maximum context length" in err and "engine failed" in err and "the step failed" not in err


def test_chat_with_a_wrong_model(api, ask):
    code, _, err = ask("one", args=["--url", api.url, "--model", "other"])
    assert code == 1 and "'other' does not exist" in err


def test_chat_with_a_key(start_api, ask, monkeypatch):
    monkeypatch.delenv("UMBRA_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    api = start_api(ServerConfig(api_keys=plain_keys("k")))
    code, _, err = ask("one", args=["--url", api.url])
    assert code == 1 and "API key" in err and err.count("\n") == 1
    assert ask("one", args=["--url", api.url, "--api-key", "k"])[:2] == (0, "Hello, wörld 🎉\n")


def test_openai_client(api):
    with openai.OpenAI(base_url=api.url + "/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "Hello, wörld 🎉"
        messages = [{"role": "user", "content": "Hi"}]
        with client.chat.completions.create(
            model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, wörld 🎉"
        assert chunks[-1].usage == answer.usage
        assert client.completions.create(model="fake", prompt=["a", "b"], n=2).choices[3].text == "Hello, wörld 🎉"
        assert [model.id for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="fake", messages=[], temperature=5)
        assert refused.value.param == "messages"
