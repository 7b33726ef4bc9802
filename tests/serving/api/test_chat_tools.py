"""Tools of chat completions: what the model is told, how its calls reach the client, and what comes back."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.serving.api.answer_form import answer_grammar
from umbra.serving.api.openai_chat import _ChatShape
from umbra.serving.api.service import Loaded
from umbra.serving.api.tool_calls import GENERIC, Tools
from umbra.serving.engine import Emission

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
LOADED = Loaded(None, SimpleNamespace(name="fake", tokenizer=None))
QUESTION = [{"role": "user", "content": "How is it in Zürich?"}]


@pytest.fixture
def client(api):
    with openai.OpenAI(base_url=api.url + "/v1", api_key="any", max_retries=0) as one:
        yield one


def prompt_of(api, at=-1):
    return bytes(api.engine.submitted[at].prompt).decode()


def test_a_call_and_its_result(api, client, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"Let me see.\n{CALL}")
    answer = client.chat.completions.create(model="fake", messages=QUESTION, tools=[WEATHER])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Zürich"}
    told = prompt_of(api)
    assert told.startswith("system: ") and '"get_weather"' in told and "<tool_call>" in told
    assert api.engine.submitted[0].params.grammar is None

    api.engine.plan = lambda prompt, params: make_answer("Three degrees.")
    history = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temp": 3}'}]
    after = client.chat.completions.create(model="fake", messages=history, tools=[WEATHER])
    assert after.choices[0].message.content == "Three degrees." and after.choices[0].finish_reason == "stop"
    assert after.choices[0].message.tool_calls is None
    assert prompt_of(api).endswith(
        'assistant: Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        'user: <tool_response>\n{"temp": 3}\n</tool_response>\n'
    )


def test_a_stream_of_calls(api, client, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(f"{CALL}\n{CALL}")
    with client.chat.completions.stream(model="fake", messages=QUESTION, tools=[WEATHER], n=2) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert [event.type for event in events].count("tool_calls.function.arguments.done") == 4
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2
        assert {json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls} == {"Zürich"}
        assert len({call.id for call in choice.message.tool_calls}) == 2


def test_functions_of_the_older_kind(api, client, make_answer):
    """One call in an answer, in the form that clients had before there were tools."""
    functions, call = [WEATHER["function"]], WEATHER["function"]["name"]
    api.engine.plan = lambda prompt, params: make_answer(CALL)
    (choice,) = client.chat.completions.create(model="fake", messages=QUESTION, functions=functions).choices
    assert choice.finish_reason == "function_call" and choice.message.content is None
    assert choice.message.tool_calls is None and choice.message.function_call.name == call
    assert json.loads(choice.message.function_call.arguments) == {"city": "Zürich"}
    same = prompt_of(api)
    client.chat.completions.create(model="fake", messages=QUESTION, tools=[WEATHER])
    assert prompt_of(api) == same

    chunks = list(client.chat.completions.create(model="fake", messages=QUESTION, functions=functions, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    parts = [delta.function_call for delta in deltas if delta.function_call]
    assert parts[0].name == call and not any(part.name for part in parts[1:])
    assert json.loads("".join(part.arguments for part in parts)) == {"city": "Zürich"}
    assert chunks[-1].choices[0].finish_reason == "function_call" and not any(delta.tool_calls for delta in deltas)

    api.engine.plan = lambda prompt, params: make_answer("Three degrees.")
    history = [*QUESTION, choice.message, {"role": "function", "name": call, "content": '{"temp": 3}'}]
    after = client.chat.completions.create(model="fake", messages=history, functions=functions, function_call="auto")
    assert after.choices[0].message.content == "Three degrees." and after.choices[0].finish_reason == "stop"
    told = [{"id": "1", "type": "function", "function": choice.message.function_call.model_dump()}]
    result = {"role": "tool", "tool_call_id": "1", "content": '{"temp": 3}'}
    same = prompt_of(api)
    client.chat.completions.create(
        model="fake", messages=[*QUESTION, {"role": "assistant", "tool_calls": told}, result], tools=[WEATHER]
    )
    assert prompt_of(api) == same


@pytest.mark.parametrize(
    ("choice", "required"), [("none", None), ("auto", False), (None, False), ({"name": "get_weather"}, True)]
)
def test_the_choice_among_functions_of_the_older_kind(api, client, choice, required):
    client.chat.completions.create(
        model="fake",
        messages=QUESTION,
        functions=[WEATHER["function"]],
        **({"function_call": choice} if choice else {}),
    )
    assert ("get_weather" in prompt_of(api)) == (required is not None)
    assert (api.engine.submitted[0].params.grammar is not None) == bool(required)


def test_only_the_first_call_is_one_of_the_older_kind(api, client, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(CALL + CALL)
    answer = client.chat.completions.create(model="fake", messages=QUESTION, functions=[WEATHER["function"]])
    message = answer.choices[0].message
    assert message.function_call.name == "get_weather" and message.content.startswith("<tool_call>")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("<tool_call>{bad}</tool_call> end", "<tool_call>{bad}</tool_call>end"),
        ('a <tool_call>{"name": "get_w', 'a<tool_call>{"name": "get_w'),
    ],
)
def test_what_is_no_call_stays_text(api, client, make_answer, text, content):
    api.engine.plan = lambda prompt, params: make_answer(text)
    answer = client.chat.completions.create(model="fake", messages=QUESTION, tools=[WEATHER])
    assert answer.choices[0].message.content == content and answer.choices[0].finish_reason == "stop"


def test_a_single_forced_call_is_not_ended_early():
    """Nothing in it puts off its end by a whole call, so that a short answer has room for arguments."""
    tools = Tools(GENERIC, [WEATHER], mode="required")
    single, several = (answer_grammar(dataclasses.replace(tools, parallel=more), None) for more in (False, True))
    assert 0 < single.longest_part < 40 and several.longest_part > single.longest_part + len(GENERIC.open)


def test_no_tools_no_parsing(api, client, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(CALL)
    for how in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = client.chat.completions.create(model="fake", messages=QUESTION, **how)
        assert answer.choices[0].message.content == CALL
        assert "get_weather" not in prompt_of(api)


def test_a_prediction(api, client):
    answer = client.chat.completions.create(
        model="fake", messages=QUESTION, prediction={"type": "content", "content": [{"type": "text", "text": "Hello"}]}
    )
    assert answer.choices[0].message.content == "Hello, wörld 🎉"
    assert bytes(api.engine.submitted[0].params.prediction) == b"Hello"
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    with pytest.raises(openai.BadRequestError, match="prediction.type"):
        client.chat.completions.create(model="fake", messages=QUESTION, prediction={"type": "image", "content": ""})


def told(deltas):
    """A message out of the pieces of a stream."""
    text, calls, finish = "", {}, None
    for piece in deltas:
        delta = piece["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            held = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            held["name"] += call["function"].get("name", "")
            held["arguments"] += call["function"]["arguments"]
        finish = piece["finish_reason"] or finish
    return text, [calls[i] for i in sorted(calls)], finish


WORDS = ["<tool_call>", "</tool_call>", CALL, "\n", " ", "hello ", '{"name": "get_weather"}', "é🎉", '"</tool_call>"']


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=8), st.sampled_from([1, 2, 3, 1000]), st.booleans())
def test_chunks_change_nothing(words, size, cut):
    """1, 2, 3 and all characters in an emission."""
    text, finish = "".join(words), "max_tokens" if cut else "stop_token"
    shape = lambda: _ChatShape(LOADED, False, Tools(GENERIC, [WEATHER]))  # noqa: E731
    whole = shape().whole(0, Emission(text, finish_reason=finish))
    streamed = shape()
    pieces = [p for i in range(0, len(text), size) for p in streamed.pieces(0, Emission(text[i : i + size]))]
    pieces += streamed.pieces(0, Emission("", finish_reason=finish))
    content, calls, reason = told(pieces)
    message = whole["message"]
    assert (message["content"] or "", reason) == (content, whole["finish_reason"])
    assert [call["function"] for call in message.get("tool_calls", [])] == calls
