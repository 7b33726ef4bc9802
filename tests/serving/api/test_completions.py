from __future__ import annotations

import json

import pytest

from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"


def stream(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks, index=0):
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_whole(api):
    body = api.complete().json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 3
    assert api.engine.submitted[0].params.max_tokens == 16


def test_stream(api):
    chunks = stream(api.complete(stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == TEXT
    assert chunks[0]["object"] == "text_completion"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["usage"]["total_tokens"] == 3 + 18


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([1, 2, 299], [[1, 2, 299]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompt_forms(api, prompt, expected):
    body = api.complete(prompt=prompt).json()
    assert [one.prompt for one in api.engine.submitted] == expected
    assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_prompts_times_choices(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"{bytes(prompt).decode()}{params.seed}")
    body = api.complete(prompt=["x", "yy"], n=2, seed=5).json()
    assert [c["text"] for c in body["choices"]] == ["x5", "x6", "yy5", "yy6"]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 2 + 2 + 3 + 3
    chunks = stream(api.complete(prompt=["x", "yy"], n=2, seed=5, stream=True, echo=True))
    assert [joined(chunks, i) for i in range(4)] == ["xx5", "xx6", "yyyy5", "yyyy6"]


def test_echo(api):
    assert api.complete(echo=True).json()["choices"][0]["text"] == "Say" + TEXT
    assert api.complete(prompt=[72, 105], echo=True).json()["choices"][0]["text"] == "Hi" + TEXT


def test_special_tokens_only_when_asked_for(api):
    api.complete(prompt="<|im_start|>")
    api.complete(prompt="<|im_start|>", parse_special=True)
    assert [len(one.prompt) for one in api.engine.submitted] == [12, 1]


def test_logprobs(api):
    for chunks in ([api.complete(logprobs=1).json()], stream(api.complete(logprobs=1, stream=True))):
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        tokens = [token for part in parts for token in part["tokens"]]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        assert tokens[:9] == ["H", "e", "l", "l", "o", ",", " ", "w", "bytes:\\xc3"]
        assert offsets[:9] == list(range(9)) and offsets[9] == 8, "both bytes of ö begin at the same character"
        assert len(tokens) == len(TEXT.encode())
        assert [part["top_logprobs"] for part in parts][0][0] == {"A": -65.0}


def test_best_of_n_is_fine(api):
    assert api.complete(best_of=2, n=2).status_code == 200


@pytest.mark.parametrize(
    ("options", "param"),
    [({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"best_of": 0}, "best_of"), ({"prompt": []}, "prompt"),
     ({"prompt": [[]]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [300]}, "prompt[0]"),
     ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"), ({"prompt": [10**30]}, "prompt[0]"), ({"prompt": 5}, "prompt"),
     ({"prompt": None}, "prompt"), ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": ["a"] * 9}, "n"),
     ({"echo": True, "logprobs": 1}, "echo"), ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"),
     ({"logprobs": True}, "logprobs"), ({"max_tokens": 0}, "max_tokens")],
)  # fmt: skip
def test_refused(api, options, param):
    response = api.complete(**options)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text
    assert not api.engine.submitted


def test_one_bad_prompt_cancels_the_others(api, wait):
    api.engine.plan = lambda prompt, params: iter([None] * 10_000)
    response = api.complete(prompt=["short", "x" * 2000])
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    wait(lambda: len(api.engine.cancelled) == 1 and not api.engine.running)


def test_without_a_tokenizer(api):
    tokenizer, api.model.tokenizer = api.model.tokenizer, None
    api.engine.plan = lambda prompt, params: [Emission("", (1, 2)), Emission("", (3,), finish_reason="max_tokens")]
    try:
        assert api.complete(prompt="text").json()["error"]["param"] == "prompt"
        body = api.complete(prompt=[1, 2], logprobs=0).json()
    finally:
        api.model.tokenizer = tokenizer
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 3
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3
