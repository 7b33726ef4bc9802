"""The Interactions API on the wire: bodies, events, life cycle, errors."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.serving.api import run
from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"
URL = "/v1beta/interactions"


def ask(api, given="Hi", **body):
    return api.client.post(URL, json={"model": "fake", "input": given, **body})


def stream(api, given="Hi", **body):
    response = ask(api, given, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text):
    assert text.endswith("event: done\ndata: [DONE]\n\n")
    out = []
    for block in text.split("\n\n")[:-2]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            out.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {out[-1]['event_type']}"
    ids = [one["event_id"] for one in out]
    assert len(set(ids)) == len(ids)
    return out


def content(seen):
    """Events without checkpoints."""
    return [one for one in seen if "continuation_token" not in one]


def deltas(seen, kind="text"):
    return "".join(e["delta"]["text"] for e in seen if e["event_type"] == "step.delta" and e["delta"]["type"] == kind)


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


def get(api, id, **query):
    return api.client.get(f"{URL}/{id}", params=query)


def slow(text, step=3):
    """An answer that takes its time: nothing in most steps."""
    for byte in text.encode():
        yield Emission(chr(byte), (byte,))
        yield from [None] * step
    yield Emission("", finish_reason="stop_token")


def test_whole_answer(api):
    response = ask(api, labels={"a": "b"}, system_instruction="be nice")
    body = response.json()
    prompt, answer = len("system: be nice\nuser: Hi\n"), len(TEXT.encode())
    assert body["steps"] == [{"type": "model_output", "content": [{"type": "text", "text": TEXT}]}]
    assert body["status"] == "completed" and body["object"] == "interaction" and body["labels"] == {"a": "b"}
    used = body["usage"]
    assert (used["total_input_tokens"], used["total_output_tokens"], used["total_cached_tokens"]) == (prompt, answer, 4)
    assert used["total_tokens"] == prompt + answer and used["total_thought_tokens"] == 0
    assert get(api, body["id"]).json() == body
    assert get(api, body["id"], stream="false", include_input="true").json() == {**body, "input": "Hi"}
    assert response.headers["x-goog-billing-tokens"] == str(prompt + answer)


def test_streamed_answer_and_replay(api):
    seen = content(stream(api))
    kinds = [one["event_type"] for one in seen]
    assert kinds[:3] == ["interaction.created", "interaction.status_update", "step.start"]
    assert kinds[-2:] == ["step.stop", "interaction.completed"] and set(kinds[3:-2]) == {"step.delta"}
    assert deltas(seen) == TEXT
    last = seen[-1]["interaction"]
    assert last["status"] == "completed" and last["usage"]["total_tokens"] == 9 + len(TEXT.encode())
    for version in ("v1", "v1beta", "v1alpha"):
        url = f"/{version}/interactions/{last['id']}"
        assert events(api.client.get(url, params={"stream": "true"}).text) == seen
        for cut in (0, 3, len(seen) - 2):
            query = {"stream": "true", "last_event_id": seen[cut]["event_id"]}
            assert events(api.client.get(url, params=query).text) == seen[cut + 1 :]
    assert get(api, last["id"]).json()["steps"][0]["content"][0]["text"] == TEXT
    for bad in ("e0", "e999", "x"):
        refused = get(api, last["id"], stream="true", last_event_id=bad)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_request"


def test_input_forms(api):
    text = {"type": "text", "text": "Hi"}
    for form in ("Hi", text, [text], [{"type": "user_input", "content": [text]}]):
        assert ask(api, form).status_code == 200
        assert prompt_of(api) == "user: Hi\n"
    ask(api, [{"type": "user_input", "content": [text]}, {"type": "thought", "signature": "x"},
              {"type": "model_output", "content": [text]}, {"type": "user_input", "content": [text]}])  # fmt: skip
    assert prompt_of(api) == "user: Hi\nassistant: Hi\nuser: Hi\n"


def test_conversations_go_on_and_branch(api):
    first = ask(api, "one").json()
    second = ask(api, "two", previous_interaction_id=first["id"]).json()
    assert prompt_of(api) == f"user: one\n{TEXT}\nuser: two\n" and second["previous_interaction_id"] == first["id"]
    ask(api, "three", previous_interaction_id=second["id"])
    assert prompt_of(api) == f"user: one\n{TEXT}\nuser: two\n{TEXT}\nuser: three\n"
    ask(api, "other", previous_interaction_id=first["id"])
    assert prompt_of(api) == f"user: one\n{TEXT}\nuser: other\n"
    ask(api, "new", previous_interaction_id=second["id"], system_instruction="be rude")
    told = f"user: one\nassistant: {TEXT}\nuser: two\nassistant: {TEXT}\nuser: new\n"
    assert prompt_of(api) == "system: be rude\n" + told
    api.client.delete(f"{URL}/{first['id']}")
    ask(api, "more", previous_interaction_id=second["id"])
    assert prompt_of(api) == f"user: one\n{TEXT}\nuser: two\n{TEXT}\nuser: more\n"
    refused = ask(api, "new", previous_interaction_id=second["id"], system_instruction="x")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "failed_precondition"


def test_an_answer_that_was_cut_can_be_gone_on_with(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer("cut o", "max_tokens")
    first = ask(api, generation_config={"max_output_tokens": 5}).json()
    assert first["status"] == "incomplete"
    ask(api, "on", previous_interaction_id=first["id"])
    assert prompt_of(api) == "user: Hi\ncut o\nuser: on\n"


def test_background(api, wait):
    api.engine.plan = lambda prompt, params: slow("abcdefgh")
    begun = ask(api, background=True).json()
    assert begun["status"] == "in_progress" and begun["steps"] == []
    busy = ask(api, previous_interaction_id=begun["id"])
    assert busy.status_code == 400 and busy.json()["error"]["code"] == "failed_precondition"
    wait(lambda: get(api, begun["id"]).json()["status"] == "completed")
    done = get(api, begun["id"]).json()
    assert done["steps"][0]["content"][0]["text"] == "abcdefgh" and done["usage"]["total_output_tokens"] == 8
    assert deltas(events(get(api, begun["id"], stream="true").text)) == "abcdefgh"


def test_a_stream_can_be_left_and_found_again(api):
    text = "abcdefghijklmnopqrstuvwxyz"
    for background in (True, False):
        api.engine.plan = lambda prompt, params: slow(text)
        seen = ""
        with api.client.stream(
            "POST", URL, json={"model": "fake", "input": "x", "stream": True, "background": background}
        ) as response:
            for piece in response.iter_text():
                seen += piece
                if '"text":"e"' in seen:
                    break
        blocks = [b for b in seen.split("\n\n")[:-1] if "continuation" not in b]
        before = [json.loads(b.split("data: ")[1]) for b in blocks]
        id = before[0]["interaction"]["id"]
        after = events(get(api, id, stream="true", last_event_id=before[-1]["event_id"]).text)
        assert deltas(before) + deltas(after) == text
        assert events(get(api, id, stream="true").text) == before + after
        assert get(api, id).json()["status"] == "completed"


def test_an_abandoned_stream_ends_after_a_while(start_api, wait):
    api = start_api(ServerConfig(resume_grace=0.05))
    api.engine.plan = lambda prompt, params: (Emission("word ", (97,)) for _ in itertools.count())
    with api.client.stream("POST", URL, json={"model": "fake", "input": "x", "stream": True}) as response:
        id = json.loads(next(response.iter_text()).split("data: ")[1].split("\n")[0])["interaction"]["id"]
    wait(lambda: len(api.engine.cancelled) == 1)
    wait(lambda: get(api, id).json()["status"] == "incomplete")
    assert get(api, id).json()["steps"][0]["content"][0]["text"].startswith("word ")


def test_a_whole_answer_ends_with_its_client(api, wait):
    import httpx

    api.engine.plan = lambda prompt, params: itertools.repeat(None)
    with pytest.raises(httpx.ReadTimeout):
        api.client.post(URL, json={"model": "fake", "input": "x"}, timeout=0.1)
    wait(lambda: len(api.engine.cancelled) == 1)


def test_cancelling(api, wait):
    api.engine.plan = lambda prompt, params: slow("a" * 1000)
    begun = ask(api, background=True).json()
    wait(lambda: get(api, begun["id"]).json()["steps"])
    done = api.client.post(f"{URL}/{begun['id']}/cancel").json()
    assert done["status"] == "cancelled" and len(api.engine.cancelled) == 1
    assert set(done["steps"][0]["content"][0]["text"]) == {"a"}
    assert get(api, begun["id"]).json() == done == api.client.post(f"{URL}/{begun['id']}/cancel").json()
    last = events(get(api, begun["id"], stream="true").text)[-1]
    assert last["event_type"] == "interaction.completed" and last["interaction"]["status"] == "cancelled"


def test_deleting(api, wait):
    api.engine.plan = lambda prompt, params: slow("a" * 1000)
    for id in (ask(api, "x", background=True).json()["id"], None):
        if id is None:
            api.engine.plan = lambda prompt, params: slow("a")
            id = ask(api).json()["id"]
        response = api.client.delete(f"{URL}/{id}")
        assert (response.status_code, response.json()) == (200, {})
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            missing = api.client.request(method, f"{URL}/{id}{path}")
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    assert len(api.engine.cancelled) == 1


def test_storing_is_optional(api):
    id = ask(api, store=False).json()["id"]
    assert get(api, id).status_code == 404
    refused = ask(api, previous_interaction_id=id)
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "not_found"
    seen = stream(api, store=False)
    id = seen[0]["interaction"]["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert api.client.request(method, f"{URL}/{id}{path}").status_code == 404
    assert ask(api, previous_interaction_id=id).status_code == 404


def test_status_updates_are_rare(api, monkeypatch):
    """One at the beginning. A checkpoint comes some time after something new, also when nothing follows it."""
    api.engine.plan = lambda prompt, params: slow("abcdefghij", 10)
    told = [e for e in stream(api) if e["event_type"] == "interaction.status_update"]
    assert len(told) == 1 and "continuation_token" not in told[0]
    monkeypatch.setattr(run, "CHECKPOINT_EVERY", 0.03)
    api.engine.plan = lambda prompt, params: [*slow("abcdefghij", 2)][:-1] + [None] * 400 + [*slow("k")]
    seen = stream(api)
    at = [i for i, e in enumerate(seen) if "continuation_token" in e]
    assert 1 <= len(at) < 8 and [e["event_id"] for e in seen[at[-1] : at[-1] + 2]] == ["e13c", "e14"]
    assert api.client.get(f"{URL}/{seen[0]['interaction']['id']}").json()["steps"][0]["content"][0]["text"][-1] == "k"


@pytest.mark.parametrize("store", [True, False])
def test_a_broken_stream_is_gone_on_with_by_its_token(api, monkeypatch, store):
    monkeypatch.setattr(run, "CHECKPOINT_EVERY", 0.0)
    text = "abcdefghij"
    api.engine.plan = lambda prompt, params: slow(text)
    body = {"model": "fake", "input": "x", "stream": True, "store": store}
    seen = ""
    with api.client.stream("POST", URL, json=body) as response:
        for piece in response.iter_text():
            seen += piece
            if '"text":"d"' in seen and seen.endswith("\n\n"):
                break
    before = [json.loads(b.split("data: ")[1]) for b in seen.split("\n\n")[:-1]]
    id, token = before[0]["interaction"]["id"], before[-1]["continuation_token"]
    more = {**body, "continuation_token": token}
    if store:
        more = {**more, "previous_interaction_id": id}
        more.pop("input")
    after = events(api.client.post(URL, json=more).text)
    assert deltas(before) + deltas(after) == text and after[-1]["interaction"]["id"] == id
    assert len(api.engine.submitted) == 1
    for bad in ("x", "YTox", "%%%"):
        refused = api.client.post(URL, json={**more, "continuation_token": bad})
        assert refused.status_code in (400, 404), refused.text


def test_a_failing_answer(api):
    api.engine.plan = lambda prompt, params: [Emission("a", (97,)), Emission("", finish_reason="error", error="secret")]
    assert ask(api).status_code == 500 and ask(api).json()["error"]["code"] == "internal"
    seen = stream(api)
    assert seen[-1]["event_type"] == "error" and seen[-1]["error"]["code"] == "internal"
    assert "secret" not in json.dumps(seen) and deltas(seen) == "a"
    stored = get(api, seen[0]["interaction"]["id"]).json()
    assert stored["status"] == "failed" and stored["errors"][0]["code"] == "internal"


BAD = [
    ({"input": None}, 400, "invalid_request"),
    ({"input": []}, 400, "invalid_request"),
    ({"input": [3]}, 400, "invalid_request"),
    ({"input": [{"type": "wizard"}]}, 400, "invalid_request"),
    ({"input": [{"type": "image", "data": "x", "mime_type": "y"}]}, 400, "invalid_request"),
    ({"input": [{"type": "user_input", "content": []}]}, 400, "invalid_request"),
    ({"input": [{"type": "function_result", "call_id": "1", "result": {}}]}, 400, "invalid_request"),
    ({"model": None}, 400, "invalid_request"),
    ({"model": "no-such"}, 404, "model_not_found"),
    ({"agent": "x"}, 400, "invalid_request"),
    ({"frobnicate": 1}, 400, "parameter_unknown"),
    ({"generation_config": {"topp": 1}}, 400, "parameter_unknown"),
    ({"generation_config": {"temperature": 9}}, 400, "invalid_request"),
    ({"generation_config": {"tool_choice": "always"}}, 400, "invalid_request"),
    ({"generation_config": {"thinking_summaries": "x"}}, 400, "invalid_request"),
    ({"background": True, "store": False}, 400, "invalid_request"),
    ({"previous_interaction_id": "v1_none"}, 404, "not_found"),
    ({"response_modalities": ["AUDIO"]}, 400, "invalid_request"),
    ({"tools": [{"type": "google_search"}]}, 400, "invalid_request"),
    ({"webhook_config": {}}, 400, "invalid_request"),
    ({"continuation_token": "nonsense"}, 400, "invalid_request"),
]


@pytest.mark.parametrize(("option", "status", "code"), BAD)
def test_bad_requests(api, option, status, code):
    for streamed in ({}, {"stream": True}):
        response = api.client.post(URL, json={"model": "fake", "input": "Hi", **streamed, **option})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"code", "message"} and error["code"] == code
        assert "generationConfig" not in error["message"]
    assert not api.engine.submitted


def test_errors_of_its_paths_have_its_shape(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("a", "b")))
    assert api.client.post(URL, json={}).json()["error"]["code"] == "authentication"
    mine, other = ({"x-goog-api-key": key} for key in "ab")
    body = api.client.post(URL, json={"model": "fake", "input": "Hi"}, headers=mine).json()
    url = f"{URL}/{body['id']}"
    for method, path in (("GET", url), ("DELETE", url), ("POST", f"{url}/cancel"), ("GET", f"{url}?stream=true")):
        assert api.client.request(method, path, headers=other).status_code == 404
    more = {"model": "fake", "input": "Hi", "previous_interaction_id": body["id"]}
    assert api.client.post(URL, json=more, headers=other).status_code == 404
    assert api.client.post(URL, json=more, headers=mine).status_code == 200
    assert api.client.get(url, headers=mine).json() == body


def test_long_logs_are_merged(api, monkeypatch):
    monkeypatch.setattr("umbra.serving.api.run.REPLAY_BYTES", 3000)
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    api.engine.plan = lambda prompt, params: (
        Emission(c, (ord(c),), finish_reason=None if i < len(text) - 1 else "stop_token") for i, c in enumerate(text)
    )
    seen = content(stream(api))
    id = seen[0]["interaction"]["id"]
    assert deltas(seen) == text
    again = events(get(api, id, stream="true").text)
    assert len(again) <= len(seen) and len(again) < len(text) and deltas(again) == text and again[-1] == seen[-1]
    kept = {one["event_id"] for one in again}
    for i, one in enumerate(seen):
        response = get(api, id, stream="true", last_event_id=one["event_id"])
        if one["event_id"] in kept:
            assert deltas(seen[: i + 1]) + deltas(events(response.text)) == text
        else:
            assert response.status_code == 400


TOOLS = [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}]


def test_a_round_of_calls(api, make_answer):
    api.engine.plan = lambda prompt, params: make_answer(
        'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    )
    for body in (ask(api, tools=TOOLS).json(), None):
        if body is None:
            seen = content(stream(api, tools=TOOLS))
            pieces = [e["delta"]["arguments"] for e in seen if e.get("delta", {}).get("type") == "arguments_delta"]
            start = next(e["step"] for e in seen if e.get("step", {}).get("type") == "function_call")
            assert json.loads("".join(pieces)) == {"a": 1} and start["arguments"] == {}
            body = get(api, seen[0]["interaction"]["id"]).json()
        text, call = body["steps"]
        assert body["status"] == "requires_action" and text["content"][0]["text"] == "Well."
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", {"a": 1})
        api.engine.plan, before = lambda prompt, params: make_answer("21 degrees"), api.engine.plan
        result = {"type": "function_result", "call_id": call["id"], "result": {"t": 21}}
        again = ask(api, [result], previous_interaction_id=body["id"], tools=TOOLS).json()
        assert again["steps"][0]["content"][0]["text"] == "21 degrees" and '{"t":21}' in prompt_of(api)
        assert ask(api, [result], tools=TOOLS).status_code == 400, "nobody knows the call"
        whole = [{"type": "user_input", "content": [{"type": "text", "text": "Hi"}]}, *body["steps"], result]
        assert ask(api, whole, tools=TOOLS).status_code == 200, "unless it is told"
        api.engine.plan = before


WORDS = ["a", "ö", "🎉", " ", "\n", "<tool_call>", "</tool_call>", '{"name": "f"}', '{"name": "g"}', "<tool"]
PIECES = st.lists(st.sampled_from(WORDS), max_size=12)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(thought=PIECES, answer=PIECES, finish=st.sampled_from(["stop_token", "max_tokens"]), tools=st.booleans(),
       think=st.booleans())  # fmt: skip
def test_grouping_changes_nothing(api, spoken, thought, answer, finish, tools, think):
    """However many tokens come at once, the steps and the usage are the same; events add up to the steps."""
    body = {"tools": TOOLS} if tools else {}
    if think:
        body["generation_config"] = {"thinking_level": "low", "thinking_summaries": "auto"}
    seen = []
    for sizes in ([1], [2], [1, 3, 2, 8], [10_000]):
        cycle = itertools.cycle(sizes)
        api.engine.plan = lambda prompt, params, c=cycle: spoken("".join(thought), "".join(answer), params, c, finish)
        told = content(stream(api, **body))
        one = get(api, told[0]["interaction"]["id"]).json()
        texts = [part["text"] for step in one["steps"] if step["type"] == "model_output" for part in step["content"]]
        assert deltas(told) == "".join(texts) and told[-1]["interaction"]["status"] == one["status"]
        steps = [{key: value for key, value in step.items() if key != "id"} for step in one["steps"]]
        used = one["usage"]
        assert used["total_tokens"] == sum(
            used[f"total_{kind}_tokens"] for kind in ("input", "output", "thought", "tool_use")
        )
        seen.append((steps, used, one["status"]))
        api.engine.plan = lambda prompt, params, c=cycle: spoken("".join(thought), "".join(answer), params, c, finish)
        again = ask(api, **body).json()
        assert [{k: v for k, v in step.items() if k != "id"} for step in again["steps"]] == steps
    assert all(one == seen[0] for one in seen)


def test_an_answer_in_time_or_none(api, start_api):
    api.engine.plan = lambda prompt, params: slow("a" * 1000)
    late = api.client.post(URL, json={"model": "fake", "input": "x"}, headers={"x-server-timeout": "0.2"})
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    api.engine.plan = lambda prompt, params: [
        *[None] * 250,
        Emission("ok", (97,)),
        Emission("", finish_reason="stop_token"),
    ]
    assert ": keep-alive" in ask(api, stream=True).text, "a stream with nothing to say shows life"


def test_resource_times_are_rfc3339(api):
    body = ask(api).json()
    assert time.strptime(body["created"], "%Y-%m-%dT%H:%M:%SZ") and body["updated"] >= body["created"]


def test_memory_is_bounded(start_api):
    """Without a state folder the oldest go."""
    api = start_api(ServerConfig(max_stored=80_000))
    ids = [ask(api, "x" * 500).json()["id"] for _ in range(40)]
    known = [get(api, id).status_code == 200 for id in ids]
    assert known[-1] and not known[0] and known == sorted(known) and 5 < sum(known) < 40


def test_what_is_not_stored_lingers_within_bounds(api, monkeypatch):
    monkeypatch.setattr("umbra.serving.api.runs.LINGER_BYTES", 10_000)
    before = set(api.service.runs._lingering)
    for _ in range(12):
        stream(api, store=False)
    kept = set(api.service.runs._lingering) - before
    assert 1 <= len(kept) < 12 and kept <= set(api.service.runs._running)
