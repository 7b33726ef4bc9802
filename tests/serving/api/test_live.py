"""Live sessions and the Interactions socket, with the clients and on the wire."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import subprocess
import threading
import warnings

import pytest
from google import genai
from google.genai import errors, types
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_sync

from umbra.configs.keys import plain_keys
from umbra.configs.server import ServerConfig
from umbra.model.chat_template import ChatTemplateError
from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"
LIVE = "/ws/google.ai.generativelanguage.{}.GenerativeService.BidiGenerateContent"


def slow(text, step=3):
    for character in text:
        yield Emission(character, tuple(character.encode()))
        yield from [None] * step
    yield Emission("", finish_reason="stop_token")


def forever(prompt, params):
    return (Emission("word ", (97,)) for _ in itertools.count())


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


class Wire:
    """A session as frames."""

    def __init__(self, api, path=None, **options):
        address = api.url.replace("http", "ws") + (path or LIVE.format("v1beta"))
        self._connection = connect_sync(address, **options)
        self.socket = self._connection.__enter__()

    def send(self, **frame):
        self.socket.send(json.dumps(frame))

    def next(self):
        return json.loads(self.socket.recv(timeout=10))

    def setup(self, **setup):
        self.send(setup={"model": "models/fake", **setup})
        first = self.next()
        assert list(first) == ["setupComplete"], first
        return self

    def say(self, text, **more):
        turns = [{"role": "user", "parts": [{"text": text}]}]
        self.send(clientContent={"turns": turns, "turnComplete": True, **more})

    def turn(self):
        """The frames until the turn is complete."""
        seen = [self.next()]
        while not seen[-1].get("serverContent", {}).get("turnComplete"):
            seen.append(self.next())
        return seen

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.__exit__(None, None, None)


def text_of(frames):
    turns = [one["serverContent"]["modelTurn"] for one in frames if "modelTurn" in one.get("serverContent", {})]
    return "".join(part["text"] for turn in turns for part in turn["parts"] if not part.get("thought"))


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_turns(api, version):
    with Wire(api, "/" + LIVE.format(version)) as wire:
        wire.setup(systemInstruction={"parts": [{"text": "be nice"}]})
        wire.say("one")
        seen = wire.turn()
        assert text_of(seen) == TEXT and seen[-2] == {"serverContent": {"generationComplete": True}}
        used = seen[-1]["usageMetadata"]
        assert used["promptTokenCount"] == len("system: be nice\nuser: one\n")
        assert used["responseTokenCount"] == len(TEXT.encode())
        assert used["totalTokenCount"] == used["promptTokenCount"] + used["responseTokenCount"]
        wire.send(client_content={"turns": [{"parts": [{"text": "tw"}]}], "turn_complete": False})
        wire.send(client_content={"turns": [{"parts": [{"text": "o"}]}], "turn_complete": True})
        assert text_of(wire.turn()) == TEXT
        assert prompt_of(api) == f"system: be nice\nuser: one\n{TEXT}\nuser: two\n"
        wire.send(realtimeInput={"text": "three"})
        wire.turn()
        wire.send(realtimeInput={"activityStart": {}})
        wire.send(realtimeInput={"text": "fo"})
        wire.send(realtimeInput={"text": "ur"})
        wire.send(realtimeInput={"activityEnd": {}})
        wire.turn()
        assert prompt_of(api).endswith(f"user: two\n{TEXT}\nuser: three\n{TEXT}\nuser: four\n")


def test_interruption(api, wait):
    with Wire(api).setup() as wire:
        for say in (wire.say, lambda text: wire.send(realtimeInput={"text": text})):
            api.engine.plan = forever
            wire.say("talk")
            assert text_of([wire.next()]).startswith("word ")
            api.engine.plan = lambda prompt, params: slow("ok")
            say("stop")
            seen = wire.turn()
            assert {"serverContent": {"interrupted": True}} in seen and "usageMetadata" in seen[-1]
            assert text_of(wire.turn()) == "ok"
            assert prompt_of(api).endswith("a\nuser: stop\n")
    with Wire(api).setup(realtimeInputConfig={"activityHandling": "NO_INTERRUPTION"}) as wire:
        api.engine.plan = lambda prompt, params: slow("slowly")
        wire.say("talk")
        wire.send(realtimeInput={"text": "stop"})
        assert text_of(wire.turn()) == text_of(wire.turn()) == "slowly"


def test_a_history_is_not_answered(api):
    with Wire(api).setup(historyConfig={"initialHistoryInClientContent": True}) as wire:
        wire.send(clientContent={"turns": [{"role": "user", "parts": [{"text": "one"}]}]})
        wire.send(clientContent={"turns": [{"role": "model", "parts": [{"text": "two"}]}], "turnComplete": True})
        wire.send(realtimeInput={"text": "three"})
        assert text_of(wire.turn()) == TEXT and len(api.engine.submitted) == 1
        assert prompt_of(api) == "user: one\nassistant: two\nuser: three\n"
        wire.say("four")
        assert text_of(wire.turn()) == TEXT and len(api.engine.submitted) == 2
    with Wire(api).setup(historyConfig={"initialHistoryInClientContent": True}) as wire:
        wire.send(realtimeInput={"text": "three"})
        with pytest.raises(ConnectionClosed) as closed:
            wire.next()
        assert closed.value.rcvd.code == 1007 and "initial history" in closed.value.rcvd.reason


@pytest.mark.parametrize("coverage", ["TURN_INCLUDES_ONLY_ACTIVITY", "TURN_INCLUDES_ALL_INPUT"])
def test_all_text_is_covered_by_its_turn(api, coverage):
    with Wire(api).setup(realtimeInputConfig={"turnCoverage": coverage}) as wire:
        wire.send(realtimeInput={"text": "one"})
        assert text_of(wire.turn()) == TEXT and prompt_of(api) == "user: one\n"


def test_leaving_ends_the_turn(api, wait):
    api.engine.plan = forever
    with Wire(api).setup() as wire:
        wire.say("talk")
        wire.next()
    wait(lambda: len(api.engine.cancelled) == 1)


def test_resumption(api):
    with Wire(api).setup(sessionResumption={}) as wire:
        wire.say("one")
        seen = wire.turn()
        update = next(one["sessionResumptionUpdate"] for one in seen if "sessionResumptionUpdate" in one)
        assert update["resumable"] and "serverContent" in seen[-1]
    with Wire(api).setup(sessionResumption={"handle": update["newHandle"]}) as wire:
        wire.say("two")
        assert text_of(wire.turn()) == TEXT and prompt_of(api) == f"user: one\n{TEXT}\nuser: two\n"
    for handle in ("x", "bGl2ZV94"):
        with Wire(api) as wire:
            wire.send(setup={"model": "models/fake", "sessionResumption": {"handle": handle}})
            with pytest.raises(ConnectionClosed) as closed:
                wire.next()
            assert closed.value.rcvd.code in (1007, 1008)


BAD = [
    ({"setup": {}}, 1007),
    ({"setup": {"model": "models/none"}}, 1008),
    ({"setup": {"model": "models/fake", "frob": 1}}, 1007),
    ({"setup": {"model": "models/fake", "realtimeInputConfig": {"activityHandling": "X"}}}, 1007),
    ({"setup": {"model": "models/fake", "realtimeInputConfig": {"turnCoverage": "X"}}}, 1007),
    (
        {
            "setup": {
                "model": "models/fake",
                "realtimeInputConfig": {"turnCoverage": "TURN_INCLUDES_AUDIO_ACTIVITY_AND_ALL_VIDEO"},
            }
        },
        1007,
    ),
    ({"setup": {"model": "models/fake", "generationConfig": {"responseModalities": ["AUDIO"]}}}, 1007),
    ({"setup": {"model": "models/fake", "contextWindowCompression": {"slidingWindow": {}}}}, 1007),
    ({"setup": {"model": "models/fake", "generationConfig": {"temperature": 9}}}, 1007),
    ({"clientContent": {}}, 1007),
    ([], 1007),
]


@pytest.mark.parametrize(("given", "code"), BAD)
def test_bad_setups(api, given, code):
    with Wire(api) as wire:
        wire.socket.send(json.dumps(given))
        with pytest.raises(ConnectionClosed) as closed:
            wire.next()
    assert closed.value.rcvd.code == code and closed.value.rcvd.reason


def test_bad_frames(api):
    for given in ({"realtimeInput": {"audio": {"data": "", "mimeType": "audio/pcm"}}}, {"setup": {}}, {"x": 1}, {},
                  {"toolResponse": {"functionResponses": [{"id": "x", "response": {}}]}}):  # fmt: skip
        with Wire(api).setup() as wire:
            wire.socket.send(json.dumps(given))
            with pytest.raises(ConnectionClosed) as closed:
                wire.next()
            assert closed.value.rcvd.code == 1007
    with Wire(api).setup() as wire:
        wire.socket.send("{")
        with pytest.raises(ConnectionClosed):
            wire.next()
    with Wire(api).setup() as wire:
        api.engine.plan = lambda prompt, params: [Emission("", finish_reason="error", error="secret")]
        wire.say("fail")
        with pytest.raises(ConnectionClosed) as closed:
            wire.turn()
        assert closed.value.rcvd.code == 1011 and "secret" not in closed.value.rcvd.reason


class CallingTemplate:
    source = "{% for tool in tools %}{% endfor %}<tool_call>{'arguments': 1}</tool_call>"
    variables = frozenset({"tools", "messages"})

    def render(self, messages, **_):
        return ""

    def encode(self, tokenizer, messages, *, tools=None, known=None, **_):
        if known is not None:
            raise ChatTemplateError("no text as it is")
        return list(json.dumps([tools, messages]).encode())


@pytest.fixture
def with_tools(api):
    template, api.model.chat_template = api.model.chat_template, CallingTemplate()
    api.attach()
    yield
    api.model.chat_template = template


TOOLS = [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": {"type": "OBJECT"}}]}]


def test_calls(api, with_tools, make_answer):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    api.engine.plan = lambda prompt, params: make_answer(call)
    with Wire(api).setup(tools=TOOLS) as wire:
        wire.say("weather")
        asked = wire.next()["toolCall"]["functionCalls"][0]
        assert (asked["name"], asked["args"]) == ("f", {"a": 1}) and asked["id"]
        api.engine.plan = lambda prompt, params: make_answer("21 degrees")
        wire.send(toolResponse={"functionResponses": [{"id": asked["id"], "name": "f", "response": {"t": 21}}]})
        assert text_of(wire.turn()) == "21 degrees"
        messages = json.loads(prompt_of(api))[1]
        assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
        assert messages[2]["content"] == '{"t":21}' and messages[1]["tool_calls"][0]["id"] == asked["id"]
        api.engine.plan = lambda prompt, params: make_answer(call)
        wire.say("again")
        asked = wire.next()["toolCall"]["functionCalls"][0]
        api.engine.plan = lambda prompt, params: make_answer("fine")
        wire.say("never mind")
        assert wire.next() == {"toolCallCancellation": {"ids": [asked["id"]]}}
        assert text_of(wire.turn()) == "fine"


def test_a_session_that_waits_for_results_is_resumed(api, with_tools, make_answer):
    api.engine.plan = lambda prompt, params: make_answer('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    with Wire(api).setup(tools=TOOLS, sessionResumption={}) as wire:
        wire.say("weather")
        handle = wire.next()["sessionResumptionUpdate"]["newHandle"]
        asked = wire.next()["toolCall"]["functionCalls"][0]
    api.engine.plan = lambda prompt, params: make_answer("21 degrees")
    with Wire(api).setup(tools=TOOLS, sessionResumption={"handle": handle}) as wire:
        wire.send(toolResponse={"functionResponses": [{"id": asked["id"], "name": "f", "response": {"t": 21}}]})
        assert text_of(wire.turn()) == "21 degrees"
        assert [one["role"] for one in json.loads(prompt_of(api))[1]] == ["user", "assistant", "tool"]


def test_keys(start_api):
    api = start_api(ServerConfig(api_keys=plain_keys("secret")))
    for path in (LIVE.format("v1beta"), "/v1beta/interactions/live"):
        with pytest.raises(InvalidStatus) as refused:
            Wire(api, path)
        assert refused.value.response.status_code == 401
    with Wire(api, LIVE.format("v1beta") + "?key=secret").setup() as wire:
        wire.say("Hi")
        assert text_of(wire.turn()) == TEXT
    with Wire(api, additional_headers={"x-goog-api-key": "secret"}) as wire:
        wire.setup()


def test_sessions_are_told_of_the_end(start_api):
    api = start_api(ServerConfig(shutdown_grace=1.0))
    with Wire(api).setup() as wire:
        api.engine.plan = lambda prompt, params: slow("slowly")
        wire.say("Hi")
        (hook,) = api.service.on_stop
        stopping = threading.Thread(target=lambda: asyncio.run_coroutine_threadsafe(hook(), api.loop).result(5))
        stopping.start()
        seen = wire.turn()
        assert {"goAway": {"timeLeft": "0.5s"}} in seen and text_of(seen) == "slowly"
        with pytest.raises(ConnectionClosed) as closed:
            wire.next()
        assert closed.value.rcvd.code == 1001
        stopping.join(5)


# ---- with Google's client, which speaks TLS only


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs openssl")
    return cert, key


def test_live_client(start_api, tls):
    api = start_api(tls=tls)
    context = ssl.create_default_context(cafile=tls[0])

    async def main():
        options = {"base_url": api.url, "async_client_args": {"ssl": context}}
        client = genai.Client(api_key="any", http_options=options)
        texts, handle = [], None
        config = {"response_modalities": ["TEXT"], "session_resumption": {}, "system_instruction": "be nice"}
        async with client.aio.live.connect(model="fake", config=config) as session:
            for word in ("one", "two"):
                content = types.Content(role="user", parts=[types.Part(text=word)])
                await session.send_client_content(turns=content)
                text = ""
                async for message in session.receive():
                    text += message.text or ""
                    if message.session_resumption_update:
                        handle = message.session_resumption_update.new_handle
                    if message.usage_metadata:
                        assert message.usage_metadata.response_token_count == len(TEXT.encode())
                texts.append(text)
        resumed = {**config, "session_resumption": types.SessionResumptionConfig(handle=handle)}
        async with client.aio.live.connect(model="fake", config=resumed) as session:
            await session.send_realtime_input(text="three")
            texts.append("".join([message.text or "" async for message in session.receive()]))
        with pytest.raises(errors.APIError) as refused:
            async with client.aio.live.connect(model="none", config=config) as session:
                await session.send_realtime_input(text="x")
                [message async for message in session.receive()]
        assert refused.value.code == 1008
        return texts

    assert asyncio.run(main()) == [TEXT] * 3
    expected = f"system: be nice\nuser: one\n{TEXT}\nuser: two\n{TEXT}\nuser: three\n"
    assert prompt_of(api) == expected


def test_interaction_socket_client(api):
    async def main():
        client = genai.Client(api_key="any", http_options={"base_url": api.url})
        begun = await client.aio.interactions.create(model="fake", input="one", system_instruction="be nice")
        events = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            async with client.aio.interactions.connect(begun.id) as connection:
                for word in ("two", "three"):
                    await connection.send(word)
                    async for event in connection.receive():
                        events.append(event)
                        if event.event_type == "step.stop":
                            break
                await connection.complete()
                events += [event async for event in connection.receive()]
        await client.aio.aclose()
        return events

    events = asyncio.run(main())
    assert events[0].event_type == "interaction.connected" and events[-1].event_type == "interaction.completed"
    said = [event.delta.text for event in events if event.event_type == "step.delta"]
    assert "".join(said) == TEXT * 2
    assert [event.index for event in events if event.event_type == "step.start"] == [0, 1]
    assert prompt_of(api) == f"system: be nice\nuser: one\n{TEXT}\nuser: two\n{TEXT}\nuser: three\n"


def test_interaction_socket(api):
    path = "/v1/interactions/live"
    with Wire(api, path) as wire:
        wire.send(event_type="interaction.create", model="fake", system_instruction="be nice")
        assert wire.next()["event_type"] == "interaction.created"
        wire.send(events=[{"event_type": "input", "content": [{"type": "text", "text": "Hi"}]}])
        seen = [wire.next()]
        while seen[-1]["event_type"] != "step.stop":
            seen.append(wire.next())
        assert "".join(one["delta"]["text"] for one in seen[1:-1]) == TEXT
        id = seen[0]["interaction_id"]
    assert api.client.get(f"/v1/interactions/{id}").json()["status"] == "completed"
    api.engine.plan = forever
    body = {"model": "fake", "input": "x", "background": True}
    id = api.client.post("/v1/interactions", json=body).json()["id"]
    with Wire(api, path) as wire:
        wire.send(event_type="interaction.connect", id=id)
        assert [wire.next()["event_type"] for _ in range(3)] == ["interaction.connected", "step.start", "step.delta"]
        wire.send(event_type="interaction.cancel")
        kinds = []
        while not kinds or kinds[-1] != "interaction.cancelled":
            kinds.append(wire.next()["event_type"])
    assert api.client.get(f"/v1/interactions/{id}").json()["status"] == "cancelled"
    for given, code in (({"event_type": "interaction.connect", "id": "none"}, 1008), ({"event_type": "x"}, 1007),
                        ({"event_type": "input", "content": []}, 1007),
                        ({"event_type": "interaction.create", "model": 5}, 1007),
                        ({"event_type": "interaction.create", "model": "fake", "previous_interaction_id": []}, 1007),
                        ({"event_type": "interaction.create", "model": "fake", "tools": 5}, 1007)):  # fmt: skip
        with Wire(api, path) as wire:
            wire.send(**given)
            assert wire.next()["event_type"] == "error"
            with pytest.raises(ConnectionClosed) as closed:
                wire.next()
            assert closed.value.rcvd.code == code


def test_a_turn_of_the_wrong_type_is_refused(api):
    with Wire(api, "/v1/interactions/live") as wire:
        wire.send(event_type="interaction.create", model="fake")
        wire.next()
        wire.send(event_type="input", content=5)
        assert wire.next()["error"]["code"] == "invalid_request"


def test_many_frames_at_once_from_a_slow_reader(api):
    """A session whose client reads nothing for a while gets all of the text in the end."""

    async def main():
        api.engine.plan = lambda prompt, params: (
            Emission(chr(97 + i % 26), (97 + i % 26,), finish_reason=None if i < 399 else "stop_token")
            for i in range(400)
        )
        async with connect(api.url.replace("http", "ws") + LIVE.format("v1beta")) as socket:
            await socket.send(json.dumps({"setup": {"model": "fake"}}))
            await socket.recv()
            await socket.send(json.dumps({"realtimeInput": {"text": "x"}}))
            await asyncio.sleep(1.2)
            seen = []
            while not seen or not seen[-1].get("serverContent", {}).get("turnComplete"):
                seen.append(json.loads(await socket.recv()))
            return seen

    assert text_of(asyncio.run(main())) == "".join(chr(97 + i % 26) for i in range(400))
