"""`/v1/responses`, on the wire and with OpenAI's client."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.model.chat_template import ChatTemplateError
from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"
URL = "/v1/responses"


def ask(api, given="Hi", **body):
    return api.client.post(URL, json={"model": "fake", "input": given, **body})


def stream(api, given="Hi", **body):
    response = ask(api, given, stream=True, **body)
    assert response.status_code == 200, response.text
    return events(response.text)


def events(text):
    out = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            out.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {out[-1]['type']}"
    assert [one["sequence_number"] for one in out] == list(range(len(out)))
    return out


def text_of(response):
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


def echo(make_answer):
    return lambda prompt, params: make_answer(f"re {bytes(prompt).decode().splitlines()[-1]}")


@pytest.fixture
def client(api):
    with openai.OpenAI(base_url=api.url + "/v1", api_key="any", max_retries=0) as one:
        yield one


def test_whole_answer(api):
    response = ask(api, metadata={"a": "b"}, instructions="be nice", temperature=0.5)
    body = response.json()
    (item,) = body["output"]
    assert item == {
        "type": "message", "id": item["id"], "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }  # fmt: skip
    prompt, answer = len("system: be nice\nuser: Hi\n"), len(TEXT.encode())
    assert body["usage"] == {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": answer, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + answer,
    }  # fmt: skip
    assert (body["object"], body["status"], body["model"], body["store"]) == ("response", "completed", "fake", True)
    assert (body["metadata"], body["temperature"], body["instructions"]) == ({"a": "b"}, 0.5, "be nice")
    assert response.headers["x-umbra-level"] == "medium"
    assert api.client.get(f"{URL}/{body['id']}").json() == body


def test_streamed_answer(api):
    seen = stream(api)
    assert [one["type"] for one in seen[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert [one["type"] for one in seen[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    deltas = [one for one in seen if one["type"] == "response.output_text.delta"]
    assert "".join(one["delta"] for one in deltas) == TEXT == seen[-4]["text"]
    last = seen[-1]["response"]
    assert text_of(last) == TEXT and last["usage"]["total_tokens"] == 9 + len(TEXT.encode())
    assert {one["item_id"] for one in deltas} == {last["output"][0]["id"]}
    assert seen[0]["response"]["output"] == [] and seen[0]["response"]["status"] == "in_progress"
    assert api.client.get(f"{URL}/{last['id']}").json() == last


def test_replay(api):
    for body in (stream(api)[-1]["response"], ask(api).json()):
        url = f"{URL}/{body['id']}?stream=true"
        whole = events(api.client.get(url).text)
        assert whole[-1]["response"] == body and whole[0]["type"] == "response.created"
        rest = api.client.get(f"{url}&starting_after=3").text
        assert rest and api.client.get(url).text.endswith(rest)
        assert json.loads(rest.split("\n")[1].removeprefix("data: "))["sequence_number"] == 4
        assert api.client.get(f"{url}&starting_after={len(whole) - 1}").text == ""
        for bad in ("x", "-2", str(len(whole))):
            assert api.client.get(f"{url}&starting_after={bad}").json()["error"]["param"] == "starting_after"


def test_conversations_go_on_and_branch(api, make_answer):
    api.engine.plan = echo(make_answer)
    first = ask(api, "one", instructions="be nice").json()
    second = ask(api, "two", previous_response_id=first["id"]).json()
    assert prompt_of(api) == "user: one\nassistant: re user: one\nuser: two\n"  # rendered anew: other instructions
    third = stream(api, "three", previous_response_id=second["id"], instructions="be rude")[-1]["response"]
    turns = "user: one\nassistant: re user: one\nuser: two\nassistant: re user: two\nuser: three\n"
    assert prompt_of(api) == "system: be rude\n" + turns
    assert third["previous_response_id"] == second["id"]
    ask(api, "other", previous_response_id=first["id"])
    assert prompt_of(api) == "user: one\nassistant: re user: one\nuser: other\n"


def test_token_ids_go_on_as_they_are(api, make_answer):
    api.engine.plan = echo(make_answer)
    first = ask(api, "one", instructions="be nice").json()
    second = ask(api, "two", previous_response_id=first["id"], instructions="be nice").json()
    start = api.engine.submitted[-2].prompt + list(text_of(first).encode())
    assert api.engine.submitted[-1].prompt == start + list(b"\nuser: two\n")
    assert second["usage"]["input_tokens"] == len(api.engine.submitted[-1].prompt)


def test_storing_is_optional(api):
    body = ask(api, store=False).json()
    assert body["store"] is False
    missing = api.client.get(f"{URL}/{body['id']}")
    assert missing.status_code == 404 and body["id"] in missing.json()["error"]["message"]
    error = ask(api, previous_response_id=body["id"])
    assert error.status_code == 400 and error.json()["error"]["code"] == "previous_response_not_found"


def test_deleting(api):
    url = f"{URL}/{ask(api).json()['id']}"
    assert api.client.post(f"{url}/cancel").status_code == 400
    assert api.client.delete(url).json() == {"id": url.split("/")[-1], "object": "response.deleted", "deleted": True}
    for method, path in (("GET", url), ("DELETE", url), ("POST", f"{url}/cancel"), ("GET", f"{url}/input_items")):
        assert api.client.request(method, path).status_code == 404


def test_input_items(api):
    given = [
        {"role": "developer", "content": "be nice"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "d"},
    ]
    url = f"{URL}/{ask(api, given).json()['id']}/input_items"
    assert prompt_of(api) == "system: be nice\nuser: ab\nassistant: c\nuser: d\n"
    page = api.client.get(f"{url}?order=asc&limit=2").json()
    assert [item["role"] for item in page["data"]] == ["developer", "user"] and page["has_more"]
    assert (page["first_id"], page["last_id"]) == tuple(item["id"] for item in page["data"])
    rest = api.client.get(f"{url}?order=asc&after={page['last_id']}").json()
    assert [item["type"] for item in rest["data"]] == ["message", "reasoning", "message"] and not rest["has_more"]
    assert api.client.get(url).json()["data"] == [*page["data"], *rest["data"]][::-1]
    for query in ("order=up", "limit=0", "limit=x", "after=nothing"):
        assert api.client.get(f"{url}?{query}").status_code == 400


def test_input_tokens(api):
    counted = api.client.post(f"{URL}/input_tokens", json={"model": "fake", "input": "Hi", "instructions": "x"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len("system: x\nuser: Hi\n")}
    assert not api.engine.submitted


@pytest.mark.parametrize(("reason", "status"), [("stop_token", "completed"), ("max_tokens", "incomplete"),
                                                ("context_length", "incomplete")])  # fmt: skip
def test_how_answers_end(api, make_answer, reason, status):
    api.engine.plan = lambda prompt, params: make_answer("ab", reason)
    for body in (ask(api).json(), stream(api)[-1]["response"]):
        assert body["status"] == body["output"][0]["status"] == status
        assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert stream(api)[-1]["type"] == f"response.{status}"


def test_a_failing_answer(api):
    plan = [Emission("a", (97,)), Emission("", finish_reason="error", error="secret")]
    api.engine.plan = lambda prompt, params: plan
    assert ask(api).status_code == 500
    seen = stream(api)
    assert [one["type"] for one in seen[-2:]] == ["error", "response.failed"]
    assert seen[-2]["code"] == "engine_error" and "secret" not in json.dumps(seen)
    failed = seen[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "engine_error"
    assert api.client.get(f"{URL}/{failed['id']}").json() == failed


def test_a_client_that_leaves(api, wait):
    api.engine.plan = lambda prompt, params: (Emission("word ", (97,)) for _ in itertools.count())
    with api.client.stream("POST", URL, json={"model": "fake", "input": "x", "stream": True}) as response:
        next(response.iter_raw())
    wait(lambda: len(api.engine.cancelled) == 1)


BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"model": "no-such"}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"instructions": 5}, "instructions"),
    ({"background": True, "store": False}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "x"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"include": ["everything"]}, "include[0]"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"wish": 1}}, "reasoning.wish"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ({"input": "refuse this"}, "input"),
    ({"input": "x" * 5000}, "input"),
    ({"input": [{"role": "user", "content": ""}] * 1001}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "param"), BAD)
def test_bad_request_names_the_parameter(api, option, param):
    for streamed in ({}, {"stream": True}):
        response = api.client.post(URL, json={"model": "fake", "input": "Hi", **streamed, **option})
        error = response.json()["error"]
        assert response.status_code == (404 if param == "model" else 400), error
        assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert not api.engine.submitted


def test_tenants_see_nothing_of_each_other(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("a", "b")))
    mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    body = api.client.post(URL, json={"model": "fake", "input": "Hi"}, headers=mine).json()
    url = f"{URL}/{body['id']}"
    for method, path in (("GET", url), ("GET", f"{url}/input_items"), ("DELETE", url), ("POST", f"{url}/cancel")):
        assert api.client.request(method, path, headers=other).status_code == 404
    more = {"model": "fake", "input": "Hi", "previous_response_id": body["id"]}
    assert api.client.post(URL, json=more, headers=other).status_code == 400
    assert api.client.post(URL, json=more, headers=mine).status_code == 200
    assert api.client.get(url, headers={"x-goog-api-key": "a"}).status_code == 200


def test_thoughts(api, spoken):
    api.engine.plan = lambda prompt, params: spoken("Let me see.\n", "ok", params, itertools.repeat(3))
    for summary in (None, "auto"):
        reasoning = {"effort": "low", "summary": summary}
        seen = stream(api, reasoning=reasoning)
        for body in (ask(api, reasoning=reasoning).json(), seen[-1]["response"]):
            thought, message = body["output"]
            shown = [{"type": "summary_text", "text": "Let me see."}] if summary else []
            assert (thought["type"], thought["summary"]) == ("reasoning", shown)
            assert message["content"][0]["text"] == "ok"
            assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Let me see.\n</think>")
            assert body["reasoning"] == {"effort": "low", "summary": summary}
        deltas = [one["delta"] for one in seen if one["type"] == "response.reasoning_summary_text.delta"]
        assert "".join(deltas) == ("Let me see." if summary else "")
    assert api.engine.submitted[-1].params.level == "low"


class Tools:
    """A template whose model calls tools."""

    source = "{% for tool in tools %}{% endfor %}<tool_call>{'arguments': 1}</tool_call>"
    variables = frozenset({"tools", "messages"})

    def render(self, messages, **_):
        return ""

    def encode(self, tokenizer, messages, *, tools=None, known=None, **_):
        if known is not None:
            raise ChatTemplateError("this template shows no text as it is")
        return list(json.dumps([tools, messages]).encode())


@pytest.fixture
def with_tools(api):
    template, api.model.chat_template = api.model.chat_template, Tools()
    api.attach()
    yield
    api.model.chat_template = template


DECLARED = [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}]


def test_a_round_of_calls(api, with_tools, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(
        'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    )
    seen = stream(api, tools=DECLARED)
    body = seen[-1]["response"]
    message, call = body["output"]
    assert message["content"][0]["text"] == "Well." and body["status"] == "completed"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": 1})
    kinds = [one["type"] for one in seen if one.get("item_id") == call["id"]]
    assert kinds == ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    api.engine.plan = lambda prompt, params: make_answer("21 degrees")
    again = ask(api, [result], previous_response_id=body["id"], tools=DECLARED).json()
    told = {"type": "function", "id": call["call_id"], "function": {"name": "f", "arguments": {"a": 1}}}
    tools, messages = json.loads(prompt_of(api))
    assert text_of(again) == "21 degrees" and tools[0]["function"]["name"] == "f"
    assert messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [told]},
        {"role": "tool", "name": "f", "content": "21", "tool_call_id": call["call_id"]},
    ]
    ask(api, [{"role": "user", "content": "Hi"}, *body["output"], result], tools=DECLARED)
    assert json.loads(prompt_of(api))[1] == messages, "the same without a stored response"
    assert ask(api, [result]).json()["error"]["param"] == "input[0].call_id"
    bad = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}
    assert ask(api, [bad]).json()["error"]["param"] == "input[0].arguments"


WORDS = ["a", "ö", "🎉", " ", "\n", "<tool_call>", "</tool_call>", '{"name": "f"}', '{"name": "g"}', "<tool"]
PIECES = st.lists(st.sampled_from(WORDS), max_size=12)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(thought=PIECES, answer=PIECES, finish=st.sampled_from(["stop_token", "max_tokens"]), tools=st.booleans(),
       think=st.booleans())  # fmt: skip
def test_grouping_changes_nothing(api, spoken, thought, answer, finish, tools, think):
    """However many tokens come at once, the items and the usage are the same; events add up to the items."""
    template, body = api.model.chat_template, {"include": [] if tools else ["message.output_text.logprobs"]}
    if think:
        body["reasoning"] = {"effort": "low", "summary": "auto"}
    if tools:
        body["tools"] = DECLARED
        api.model.chat_template = Tools()
    api.attach()
    try:
        seen = []
        for sizes in ([1], [2], [1, 3, 2, 8], [10_000], None):
            cycle = itertools.cycle(sizes or [3])
            api.engine.plan = lambda prompt, params, c=cycle: spoken(
                "".join(thought), "".join(answer), params, c, finish
            )
            told = stream(api, **body) if sizes else [{"type": "", "response": ask(api, **body).json()}]
            seen.append(plain(told[-1]["response"]))
            if sizes:
                deltas = "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta")
                assert deltas == text_of(told[-1]["response"])
    finally:
        api.model.chat_template = template
    assert all(one == seen[0] for one in seen)


def plain(response):
    """A response without what is different every time."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return items, response["usage"], response["status"]


def test_openai_client(client, api):
    answer = client.responses.create(model="fake", input="Hi", reasoning={"effort": "none"})
    assert answer.output_text == TEXT and answer.usage.total_tokens == 9 + len(TEXT.encode())
    again = client.responses.create(
        model="fake", input=[{"role": "user", "content": "More"}], previous_response_id=answer.id
    )
    assert prompt_of(api) == f"user: Hi\n{TEXT}\nuser: More\n"
    with client.responses.create(model="fake", input="Hi", stream=True) as events:
        listed = list(events)
    assert "".join(e.delta for e in listed if e.type == "response.output_text.delta") == TEXT
    assert listed[-1].type == "response.completed" and listed[-1].response.output_text == TEXT
    with client.responses.stream(model="fake", input="Hi") as helper:
        assert "".join(e.delta for e in helper if e.type == "response.output_text.delta") == TEXT
        assert helper.get_final_response().output_text == TEXT
    assert client.responses.retrieve(again.id).output_text == TEXT
    replayed = list(client.responses.retrieve(again.id, stream=True, starting_after=2))
    assert replayed[0].sequence_number == 3 and replayed[-1].response.id == again.id
    assert [item.type for item in client.responses.input_items.list(again.id)] == ["message"]
    assert client.responses.input_tokens.count(model="fake", input="Hi").input_tokens == 9
    client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="Hi", background=True, store=False)
    assert refused.value.param == "background"


def test_openai_client_with_logprobs(client):
    answer = client.responses.create(model="fake", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2)
    listed = answer.output[0].content[0].logprobs
    assert bytes(byte for one in listed for byte in one.bytes).decode() == TEXT
    assert [one.token for one in listed[0].top_logprobs] == ["A", "B"]
