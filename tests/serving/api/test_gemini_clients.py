"""Google's Python client, as it is."""

from __future__ import annotations

import asyncio
import json

import pytest
from google import genai
from google.genai import errors, types

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.serving.engine import Emission, Usage

TEXT = "Hello, wörld 🎉"


@pytest.fixture
def client(api):
    with genai.Client(api_key="any", http_options={"base_url": api.url}) as one:
        yield one


@pytest.fixture(params=["v1", "v1beta", "v1alpha"])
def versioned(api, request):
    with genai.Client(api_key="any", http_options={"base_url": api.url, "api_version": request.param}) as one:
        yield one


def echo(make_answer):
    """An engine that answers with its prompt's last line."""
    return lambda prompt, params: make_answer(f"re {bytes(prompt).decode().splitlines()[-1]}")


def test_generate(versioned, api):
    answer = versioned.models.generate_content(model="fake", contents="Hi")
    assert answer.text == TEXT and answer.candidates[0].finish_reason == types.FinishReason.STOP
    assert answer.model_version == "fake" and answer.response_id
    used = answer.usage_metadata
    assert used.prompt_token_count == len("user: Hi\n") and used.candidates_token_count == len(TEXT.encode())
    assert used.total_token_count == used.prompt_token_count + used.candidates_token_count
    assert answer.sdk_http_response.headers["x-goog-billing-tokens"] == str(used.total_token_count)
    counted = versioned.models.count_tokens(model="fake", contents="Hi")
    assert counted.total_tokens == used.prompt_token_count


def test_stream(versioned):
    chunks = list(versioned.models.generate_content_stream(model="fake", contents="Hi"))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert len(chunks) > 2 and len({chunk.response_id for chunk in chunks}) == 1
    assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata.total_token_count == len("user: Hi\n") + len(TEXT.encode())


def test_models(versioned):
    (listed,) = versioned.models.list()
    assert listed.name == "models/fake" and "generateContent" in listed.supported_actions
    one = versioned.models.get(model="fake")
    assert one == versioned.models.get(model="models/fake") and one.input_token_limit == 999
    with pytest.raises(errors.ClientError) as refused:
        versioned.models.get(model="no-such")
    assert refused.value.code == 404 and refused.value.status == "NOT_FOUND" and "no-such" in refused.value.message


def test_config(client, api):
    config = types.GenerateContentConfig(
        system_instruction=["be ", "nice"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        candidate_count=2,
        max_output_tokens=50,
        stop_sequences=["a", "b"],
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        response_logprobs=True,
        logprobs=2,
        response_mime_type="text/plain",
        response_modalities=["TEXT"],
        thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=0),
        safety_settings=[
            types.SafetySetting(
                category=types.HarmCategory.HARM_CATEGORY_HATE_SPEECH, threshold=types.HarmBlockThreshold.BLOCK_NONE
            )
        ],
    )
    answer = client.models.generate_content(model="fake", contents=["a", "b"], config=config)
    params = api.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 40, 7)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.max_tokens == 50 and params.stop == ("a", "b") and params.logprobs == 2
    assert bytes(api.engine.submitted[0].prompt).decode() == "system: be nice\nuser: ab\n"
    assert [candidate.index for candidate in answer.candidates] == [0, 1]
    result = answer.candidates[0].logprobs_result
    assert "".join(one.token for one in result.chosen_candidates) == TEXT
    assert len(result.top_candidates) == len(result.chosen_candidates) == len(TEXT.encode())
    assert [one.token for one in result.top_candidates[0].candidates] == ["A", "B"]
    assert answer.candidates[0].avg_logprobs == -0.5
    assert answer.usage_metadata.candidates_token_count == 2 * len(TEXT.encode())


def test_chat(client, api, make_answer):
    api.engine.plan = echo(make_answer)
    chat = client.chats.create(model="fake")
    assert chat.send_message("one").text == "re user: one"
    assert chat.send_message("two").text == "re user: two"
    assert bytes(api.engine.submitted[-1].prompt).decode() == "user: one\nassistant: re user: one\nuser: two\n"
    assert len(chat.get_history(curated=True)) == 4


def test_streamed_chat(client, api, make_answer):
    """The client sends a streamed answer back as many contents: they are one turn."""
    api.engine.plan = echo(make_answer)
    chat = client.chats.create(model="fake")
    for word in ("one", "two", "three"):
        assert "".join(chunk.text for chunk in chat.send_message_stream(word)) == f"re user: {word}"
    prompt = "user: one\nassistant: re user: one\nuser: two\nassistant: re user: two\nuser: three\n"
    assert bytes(api.engine.submitted[-1].prompt).decode() == prompt


def test_thoughts(client, api):
    steps = [
        Emission("", (1, 2, 3), thought="Let me "),
        Emission("ok", (4, 5, 6, 7), thought="think."),
        Emission("", finish_reason="stop_token", usage=Usage(9, 7, thought_tokens=5)),
    ]
    api.engine.plan = lambda prompt, params: steps
    for show in (True, False):
        config = {"thinking_config": {"include_thoughts": show, "thinking_level": "LOW"}}
        answer = client.models.generate_content(model="fake", contents="Hi", config=config)
        assert api.engine.submitted[-1].params.level == "low" and api.engine.submitted[-1].params.thinking is not None
        assert answer.text == "ok"
        assert [part.text for part in answer.parts if part.thought] == (["Let me think."] if show else [])
        used = answer.usage_metadata
        assert (used.thoughts_token_count, used.candidates_token_count) == (5, 2)
        assert used.total_token_count == used.prompt_token_count + 7
        chunks = list(client.models.generate_content_stream(model="fake", contents="Hi", config=config))
        parts = [part for chunk in chunks for part in chunk.parts]
        assert "".join(part.text for part in parts if not part.thought) == "ok"
        assert "".join(part.text for part in parts if part.thought) == ("Let me think." if show else "")


@pytest.mark.parametrize(
    ("config", "field"),
    [({"temperature": 3}, "generationConfig.temperature"), ({"candidate_count": 9}, "generationConfig.candidateCount"),
     ({"tools": [{"google_search": {}}]}, "tools[0].googleSearch")],
)  # fmt: skip
def test_refusals(client, config, field):
    for call in (
        client.models.generate_content,
        lambda **request: list(client.models.generate_content_stream(**request)),
    ):
        with pytest.raises(errors.ClientError) as refused:
            call(model="fake", contents="Hi", config=config)
        assert (
            refused.value.code == 400 and refused.value.status == "INVALID_ARGUMENT" and field in refused.value.message
        )
        assert refused.value.details["error"]["details"][0]["fieldViolations"][0]["field"] == field


def test_failures(client, api):
    api.engine.plan = lambda prompt, params: [Emission("a", (97,)), Emission("", finish_reason="error", error="secret")]
    with pytest.raises(errors.ServerError) as failed:
        client.models.generate_content(model="fake", contents="Hi")
    assert failed.value.code == 500 and failed.value.status == "INTERNAL" and "secret" not in failed.value.message
    stream = client.models.generate_content_stream(model="fake", contents="Hi")
    assert next(stream).text == "a"
    with pytest.raises(errors.ServerError) as failed:
        list(stream)
    assert failed.value.code == 500
    api.engine.max_queue = 0
    for call in (
        client.models.generate_content,
        lambda **request: list(client.models.generate_content_stream(**request)),
    ):
        with pytest.raises(errors.ClientError) as busy:
            call(model="fake", contents="Hi")
        assert busy.value.code == 429 and busy.value.status == "RESOURCE_EXHAUSTED"


def test_silence_is_bridged(client, api):
    """The client knows no keep-alive but a blank line."""
    api.engine.plan = lambda prompt, params: iter(
        [*[None] * 200, Emission("a", (97,)), *[None] * 200, Emission("b", (98,), finish_reason="max_tokens")]
    )
    chunks = list(client.models.generate_content_stream(model="fake", contents="Hi"))
    assert [chunk.text for chunk in chunks] == ["a", "b"]
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


def test_the_client_s_timeout_ends_the_work(api, wait):
    api.engine.plan = lambda prompt, params: iter([None] * 10_000)
    with genai.Client(api_key="any", http_options={"base_url": api.url, "timeout": 200}) as one:
        with pytest.raises(Exception, match="timed out|Timeout|X-Server-Timeout"):
            one.models.generate_content(model="fake", contents="Hi")
        wait(lambda: not api.engine.running)


def test_keys(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("secret")))
    for key, good in (("secret", True), ("wrong", False)):
        with genai.Client(api_key=key, http_options={"base_url": api.url}) as one:
            if good:
                assert one.models.generate_content(model="fake", contents="Hi").text == TEXT
                continue
            for call in (one.models.generate_content, one.models.count_tokens):
                with pytest.raises(errors.ClientError) as refused:
                    call(model="fake", contents="Hi")
                assert refused.value.code == 401 and refused.value.status == "UNAUTHENTICATED"


def test_async(api, make_answer):
    api.engine.plan = echo(make_answer)

    async def run():
        async with genai.Client(api_key="any", http_options={"base_url": api.url + "/"}).aio as one:
            chat = one.chats.create(model="fake")
            texts = [(await chat.send_message("one")).text]
            stream = await chat.send_message_stream("two")
            texts.append("".join([chunk.text async for chunk in stream]))
            texts += [answer.text for answer in await asyncio.gather(
                *(one.models.generate_content(model="fake", contents=str(i)) for i in range(4))
            )]  # fmt: skip
            return texts

    assert asyncio.run(run()) == ["re user: one", "re user: two", *(f"re user: {i}" for i in range(4))]


class ToolTemplate:
    """A template with tools, of the kind whose calls are JSON between markers."""

    source = "{% for tool in tools %}{% endfor %} <tool_call>{'name': , 'arguments': }</tool_call>"
    variables = frozenset({"tools", "messages"})

    def render(self, messages, **_):
        return ""

    def encode(self, tokenizer, messages, *, tools=None, **_):
        lines = [f"tools: {json.dumps(tools)}"] if tools else []
        for message in messages:
            calls = json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
            lines.append(f"{message['role']}: {message['content']}{calls}")
        return list("".join(f"{line}\n" for line in lines).encode())


@pytest.fixture
def tools_model(api):
    template, api.model.chat_template = api.model.chat_template, ToolTemplate()
    api.attach()
    yield
    api.model.chat_template = template


def test_functions(tools_model, client, api, make_answer):
    """The client runs the function that the model calls and asks again with the result."""

    def get_weather(city: str) -> dict:
        """The weather in a city."""
        return {"city": city, "temperature": 21}

    answers = [
        'Let me look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
        "It is 21 degrees.",
    ]
    api.engine.plan = lambda prompt, params: make_answer(answers[len(api.engine.submitted)])
    answer = client.models.generate_content(model="fake", contents="Weather?", config={"tools": [get_weather]})
    assert answer.text == "It is 21 degrees."
    first, second = (bytes(one.prompt).decode() for one in api.engine.submitted)
    shown = json.loads(first.splitlines()[0].removeprefix("tools: "))[0]["function"]
    assert shown["name"] == "get_weather" and shown["parameters"]["properties"]["city"]["type"].lower() == "string"
    assert (
        second.splitlines()[2].startswith("assistant: Let me look.[")
        and "Zürich"
        in json.loads(second.splitlines()[2].removeprefix("assistant: Let me look."))[0]["function"]["arguments"][
            "city"
        ]
    )
    assert json.loads(second.splitlines()[3].removeprefix("tool: "))["result"]["temperature"] == 21


def test_streamed_function_call(tools_model, client, api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    )
    declarations = [
        {"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}},
        {"name": "g"},
    ]
    config = {
        "tools": [{"function_declarations": declarations}],
        "automatic_function_calling": {"disable": True},
    }
    chunks = list(client.models.generate_content_stream(model="fake", contents="Go", config=config))
    calls = [call for chunk in chunks for call in chunk.function_calls or ()]
    assert [(call.name, call.args) for call in calls] == [("f", {"a": 1}), ("g", {})]
    assert len({call.id for call in calls}) == 2 and chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    whole = client.models.generate_content(model="fake", contents="Go", config=config)
    assert [call.name for call in whole.function_calls] == ["f", "g"]
