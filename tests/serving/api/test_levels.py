"""Levels and thinking over HTTP: what requests say, what the engine gets, how thoughts come back."""

from __future__ import annotations

import json

import pytest

from umbra.configs.server import ServerConfig
from umbra.serving.engine import Emission, Usage
from umbra.serving.engine.thoughts import Channels

CLOSE = b"</think>"


def thinks(thoughts, answer, params, sizes=(1,), finish="stop_token"):
    """The steps of an answer with thoughts, a byte a token, in steps of these sizes again and again."""
    tokens = list(thoughts.encode() + (CLOSE + b"\n\n" + answer.encode() if answer is not None else b""))
    channels, steps, at, prompt = Channels(lambda token: bytes([token]), params.stop, params.thinking), [], 0, 0
    for n in range(10_000):
        step = tokens[at : at + sizes[n % len(sizes)]]
        at += len(step)
        if not step:
            break
        thought, text, _ = channels.push(step)
        steps.append(Emission(text, tuple(step), thought=thought))
    thought, text = channels.finish()
    usage = Usage(prompt, len(tokens), thought_tokens=channels.thought_tokens)
    return [*steps, Emission(text, thought=thought, finish_reason=finish, usage=usage)]


def script(api, thoughts, answer, **options):
    api.engine.plan = lambda prompt, params: thinks(thoughts, answer, params, **options)


def sent(api):
    """What the engine got last."""
    return api.engine.submitted[-1]


def events(response):
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == 200 and data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


@pytest.mark.parametrize(
    ("body", "level", "budget"),
    [
        ({}, "medium", None),
        ({"reasoning_effort": None}, "medium", None),
        ({"reasoning_effort": "none"}, "medium", None),
        ({"reasoning_effort": "minimal"}, "minimal", None),
        ({"reasoning_effort": "low"}, "low", 1024),
        ({"reasoning_effort": "medium"}, "medium", 7500),
        ({"reasoning_effort": "high"}, "high", 16384),
        ({"reasoning_effort": "xhigh"}, "high", 16384),
        ({"reasoning_effort": "HIGH"}, "high", 16384),
        ({"reasoning": {"effort": "low"}}, "low", 1024),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "low", 1024),
        ({"reasoning": {"max_tokens": 50}}, "medium", 50),
        ({"reasoning": {}}, "medium", None),
        ({"thinking_budget": 70}, "medium", 70),
        ({"thinking_budget": 0, "reasoning_effort": "high"}, "high", None),
        ({"thinking_budget": 70, "reasoning_effort": "low"}, "low", 70),
        ({"thinking": {"type": "enabled", "budget_tokens": 90}}, "medium", 90),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, "low", 1024),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "low", None),
        ({"level": "low"}, "low", 1024),
        ({"level": "LOW", "reasoning_effort": "none"}, "low", None),
        ({"level": "minimal", "reasoning_effort": "high"}, "minimal", 16384),
        ({"level": "minimal", "thinking_budget": 30}, "minimal", 30),
    ],
)
def test_what_requests_say(api, monkeypatch, body, level, budget):
    monkeypatch.setattr(api.engine, "context_length", 60_000)
    response = api.chat(**body)
    assert response.status_code == 200, response.text
    params = sent(api).params
    assert params.level == level
    assert (params.thinking and params.thinking.most) == budget
    assert response.headers["x-umbra-level"] == level
    assert response.headers.get("x-umbra-thinking", "off") == (str(budget) if budget else "off")
    assert bytes(sent(api).prompt).endswith(b"<think>\n") == (budget is not None)


def test_the_default_level_of_the_server_makes_nobody_think(start_api):
    api = start_api(ServerConfig(level="high"))
    api.chat()
    assert sent(api).params.level == "high" and sent(api).params.thinking is None
    api.complete()
    assert sent(api).params.level == "high"
    api.chat(reasoning_effort="low")
    assert sent(api).params.level == "low"
    with pytest.raises(ValueError, match="supported: minimal, low, medium, high"):
        ServerConfig(level="xhigh")


@pytest.mark.parametrize(("question", "budget"), [("Hi", None), ("What is 17 * 23?", 512)])
def test_adaptive_budgets_explain_themselves(api, monkeypatch, question, budget):
    monkeypatch.setattr(api.engine, "context_length", 60_000)
    for body in ({"thinking_budget": -1}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "enabled"}}):
        response = api.chat(messages=[{"role": "user", "content": question}], **body)
        thinking = sent(api).params.thinking
        assert (thinking and thinking.most) == budget
        said = response.headers["x-umbra-thinking"]
        assert said == ("512; adaptive: score 2 (maths 1, numbers 1)" if budget else "off; adaptive: score 0")


def test_a_budget_is_at_most_a_third_of_the_room(api):
    response = api.chat(reasoning_effort="high")
    room = api.engine.context_length - len(sent(api).prompt)
    assert sent(api).params.thinking.most == room // 3
    assert response.headers["x-umbra-thinking"] == f"{room // 3} of 16384"
    api.chat(reasoning_effort="high", max_completion_tokens=90)
    assert sent(api).params.thinking.most == 30 and sent(api).params.max_tokens == 90
    response = api.chat(reasoning_effort="high", max_tokens=10)
    assert sent(api).params.thinking is None and bytes(sent(api).prompt) == b"user: Hi\n"
    assert response.headers["x-umbra-thinking"] == "off: no room for 16384"


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 8), (100,)])
def test_thoughts_and_answer_whole(api, sizes):
    script(api, "Hm, wörds.\n", "It is 5.", sizes=sizes)
    body = api.chat(reasoning_effort="low").json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It is 5.",
        "refusal": None,
        "reasoning_content": "Hm, wörds.",
    }
    thought_tokens = len("Hm, wörds.\n".encode() + CLOSE)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought_tokens
    assert body["usage"]["completion_tokens"] == thought_tokens + len("\n\nIt is 5.")


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 8), (100,)])
def test_thoughts_and_answer_streamed(api, sizes):
    script(api, "Hm, wörds.\n", "It is 5.", sizes=sizes)
    chunks = events(api.chat(reasoning_effort="low", stream=True, stream_options={"include_usage": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, wörds."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 5."
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True), "thoughts come before the answer"
    assert not any("reasoning_content" in delta and "content" in delta for delta in deltas)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm, wörds.\n".encode() + CLOSE)


def test_thoughts_that_used_up_all_tokens(api):
    script(api, "on and on", None, finish="max_tokens")
    choice = api.chat(reasoning_effort="low").json()["choices"][0]
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"] == "on and on"
    assert choice["finish_reason"] == "length"


def test_without_thinking_there_is_no_reasoning_content(api):
    assert "reasoning_content" not in api.chat().json()["choices"][0]["message"]
    assert all("reasoning_content" not in c["choices"][0]["delta"] for c in events(api.chat(stream=True)))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_the_answer_only(api, stream):
    script(api, "so", " 42", sizes=(4,))
    response = api.chat(reasoning_effort="low", logprobs=True, stream=stream)
    choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
    listed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in listed] == ["4", "2"]


def test_choices_think_each(api):
    api.engine.plan = lambda prompt, params: thinks(f"thought {params.seed}", f"answer {params.seed}", params)
    for choice in api.chat(reasoning_effort="low", n=2, seed=5).json()["choices"]:
        seed = 5 + choice["index"]
        assert choice["message"]["content"] == f"answer {seed}"
        assert choice["message"]["reasoning_content"] == f"thought {seed}"


def test_thoughts_of_an_earlier_answer_reach_the_template(api):
    seen = []
    template = api.model.chat_template

    class Watching(type(template)):
        def encode(self, tokenizer, messages, **variables):
            seen.extend(messages)
            return [1]

    api.model.chat_template = Watching()
    api.attach()
    try:
        turns = [
            {"role": "user", "content": "a", "reasoning_content": "mine"},
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
            {"role": "user", "content": "c"},
        ]
        assert api.chat(messages=turns).status_code == 200
        turns[1]["reasoning_content"] = 3
        error = api.chat(messages=turns).json()["error"]
    finally:
        api.model.chat_template = template
    assert [message.get("reasoning_content") for message in seen] == [None, "because", None]
    assert error["param"] == "messages[1].reasoning_content"


def test_a_model_that_cannot_think_says_so(api):
    loaded = api.service.loaded
    loaded.thinker.close = ()
    error = api.chat(reasoning_effort="low").json()["error"]
    assert error["param"] == "reasoning_effort" and "supported for this model: no thinking" in error["message"]
    assert api.chat(reasoning_effort="none").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"thinking": {"type": "enabled"}},
        {"thinking_budget": 5},
        {"level": "turbo"},
    ],
)
def test_texts_without_turns_have_no_thoughts(api, body):
    response = api.complete(**body)
    assert response.status_code == 400 and "supported" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == next(iter(body))


def test_texts_without_turns_have_a_level(api):
    response = api.complete(level="low", reasoning_effort="none", thinking_budget=0)
    assert response.status_code == 200 and sent(api).params.level == "low" and sent(api).params.thinking is None
    assert response.headers["x-umbra-level"] == "low"
