"""Forms of answers, with an engine that follows them: unmodified clients of OpenAI and Google against a server."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from umbra.configs.engine import EngineConfig
from umbra.serving.engine import Engine

ENDS = (0, 257)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Zürich"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
    },
    "required": ["city", "days"],
}
WEATHER = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(random_model, random_shadow, start_tiny):
    """A server whose engine is a small random trunk, which says nothing but what a grammar makes it say."""
    loaded = random_model("tiny", eos_ids=ENDS)
    base = type(loaded.tokenizer)

    class WithEnds(base):
        special_ids = {"<end>": 257}

        def token_bytes(self, token):
            return b"" if token in ENDS else base.token_bytes(self, token)

        def encode_parts(self, parts, *, add_bos=False):
            return [i for part in parts for i in (self.encode(part) if isinstance(part, str) else [part])]

    model = dataclasses.replace(loaded, tokenizer=WithEnds(), shadow=random_shadow(512, loaded.config.d_model))
    with Engine(model, EngineConfig(slots=4, context_length=2048, blocks=70, draft_rows=24)) as engine:
        engine.start(warm=False)
        yield start_tiny(engine, model)
        engine.check()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def google(server):
    with genai.Client(api_key="any", http_options={"base_url": server.url}) as one:
        yield one


def chat(client, **how):
    return client.chat.completions.create(model="tiny", messages=HI, seed=5, max_tokens=900, **how)


@pytest.mark.parametrize("strict", [True, False, None])
def test_openai_json_schema(client, strict):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}
    answer = chat(client, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), {**SCHEMA, "additionalProperties": False})
    stream = client.chat.completions.create(
        model="tiny", messages=HI, seed=5, max_tokens=900, response_format=form, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == answer.choices[0].message.content


def test_openai_parse_and_other_forms(client):
    class Trip(pydantic.BaseModel):
        """A trip."""

        city: Literal["Rome", "Zürich"]
        day: int = pydantic.Field(ge=1, le=31)

    parsed = client.chat.completions.parse(model="tiny", messages=HI, response_format=Trip, max_tokens=300)
    assert parsed.choices[0].message.parsed.city in ("Rome", "Zürich")
    picked = chat(client, extra_body={"guided_choice": ["yes", "no"]})
    assert picked.choices[0].message.content in ("yes", "no")
    matched = client.completions.create(model="tiny", prompt="x", extra_body={"guided_regex": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", matched.choices[0].text)
    written = chat(client, extra_body={"guided_grammar": 'root ::= "a" ("b" | "c"){2,5}'})
    assert re.fullmatch("a[bc]{2,5}", written.choices[0].message.content)
    response = client.responses.parse(model="tiny", input="Hi", text_format=Trip, max_output_tokens=300)
    assert response.output_parsed.city in ("Rome", "Zürich")


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "clock"}), ({"type": "function", "function": {"name": "clock"}}, {"clock"})],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_openai_forced_calls(client, choice, names, parallel):
    tools = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
    answer = chat(client, tools=tools, tool_choice=choice, parallel_tool_calls=parallel).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert 1 <= len(answer.message.tool_calls) <= (8 if parallel else 1)
    for call in answer.message.tool_calls:
        assert call.function.name in names
        if call.function.name == "get_weather":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_openai_responses_forced_calls(client):
    tools = [{"type": "function", **WEATHER}, {"type": "function", **CLOCK}]
    response = client.responses.create(
        model="tiny", input="Hi", tools=tools, tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=900,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call" and call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_calls_or_json(client):
    """An answer of a form, unless it calls."""
    tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=HI, seed=seed, tools=tools, response_format=form, max_tokens=900
        ).choices[0]
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        else:
            assert answer.message.tool_calls


def test_google_schemas(google):
    class Trip(pydantic.BaseModel):
        city: Literal["Rome", "Zürich"]
        day: int = pydantic.Field(ge=1, le=31)

    def ask(**config):
        config = types.GenerateContentConfig(max_output_tokens=900, seed=3, **config)
        return google.models.generate_content(model="tiny", contents="Hi", config=config)

    assert ask(response_mime_type="application/json", response_schema=Trip).parsed.day in range(1, 32)
    answer = ask(response_mime_type="application/json", response_json_schema=SCHEMA)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    dialect = types.Schema(
        type="OBJECT", properties={"b": {"type": "BOOLEAN"}, "a": {"type": "STRING", "enum": ["x"], "nullable": True}},
        property_ordering=["a", "b"], required=["a", "b"],
    )  # fmt: skip
    assert list(json.loads(ask(response_mime_type="application/json", response_schema=dialect).text)) == ["a", "b"]
    enum = {"type": "STRING", "enum": ["left", "right"]}
    assert ask(response_mime_type="text/x.enum", response_schema=enum).text in ("left", "right")


@pytest.mark.parametrize("allowed", [None, ["clock"]])
def test_google_forced_calls(google, allowed):
    declared = types.Tool(
        function_declarations=[
            {"name": "get_weather", "parameters_json_schema": SCHEMA},
            {"name": "clock"},
        ]  # fmt: skip
    )
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=allowed)
    config = types.GenerateContentConfig(
        tools=[declared], tool_config=types.ToolConfig(function_calling_config=calling), max_output_tokens=900
    )
    answer = google.models.generate_content(model="tiny", contents="Hi", config=config)
    (call,) = answer.function_calls
    assert call.name in (allowed or ["get_weather", "clock"])
    if call.name == "get_weather":
        jsonschema.validate(call.args, SCHEMA)
    chunks = list(google.models.generate_content_stream(model="tiny", contents="Hi", config=config))
    assert sum(len(chunk.function_calls or ()) for chunk in chunks) == 1


IMPOSSIBLE = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]}


def test_impossible_schemas_are_refused(client, google, server, wait):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": IMPOSSIBLE}})
    assert refused.value.param == "response_format.json_schema.schema" and "nsatisfiable" in str(refused.value)
    with pytest.raises(openai.BadRequestError) as refused:
        function = {"name": "f", "parameters": IMPOSSIBLE}
        chat(client, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert refused.value.param == "tools"
    with pytest.raises(errors.ClientError) as failed:
        config = types.GenerateContentConfig(response_mime_type="application/json", response_json_schema=IMPOSSIBLE)
        google.models.generate_content(model="tiny", contents="Hi", config=config)
    assert failed.value.code == 400 and "responseJsonSchema" in failed.value.message
    wait(lambda: server.service.inflight == 0)
