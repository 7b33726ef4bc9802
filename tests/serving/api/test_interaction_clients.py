"""Interactions and stored responses with the unmodified Python clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import warnings

import openai
import pytest
from google import genai
from google.genai import _interactions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.serving.api import run
from umbra.serving.engine import Emission

TEXT = "Hello, wörld 🎉"


@pytest.fixture(params=[None, "v1beta"])
def client(api, request):
    options = {"base_url": api.url} | ({"api_version": request.param} if request.param else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield genai.Client(api_key="any", http_options=options)


def prompt_of(api, i=-1):
    return bytes(api.engine.submitted[i].prompt).decode()


def slow(text, step=3):
    for character in text:
        yield Emission(character, tuple(character.encode()))
        yield from [None] * step
    yield Emission("", finish_reason="stop_token")


def deltas(events):
    return "".join(e.delta.text for e in events if e.event_type == "step.delta" and e.delta.type == "text")


def test_whole_streamed_and_stored(client, api):
    one = client.interactions.create(model="fake", input="Hi")
    assert one.output_text == TEXT and one.status == "completed"
    assert one.usage.total_tokens == one.usage.total_input_tokens + one.usage.total_output_tokens
    events = list(client.interactions.create(model="fake", input="Hi", stream=True))
    assert deltas(events) == TEXT
    assert events[0].event_type == "interaction.created" and events[-1].event_type == "interaction.completed"
    id = events[-1].interaction.id
    assert client.interactions.get(id).output_text == TEXT
    replayed = list(client.interactions.get(id, stream=True))
    assert deltas(replayed) == TEXT and replayed[-1].interaction.usage == events[-1].interaction.usage
    at = next(i for i, e in enumerate(replayed) if e.event_type == "step.delta")
    rest = list(client.interactions.get(id, stream=True, last_event_id=replayed[at].event_id))
    assert [e.event_id for e in rest] == [e.event_id for e in replayed[at + 1 :]]
    two = client.interactions.create(model="fake", input="more", previous_interaction_id=id)
    assert prompt_of(api) == f"user: Hi\n{TEXT}\nuser: more\n" and two.previous_interaction_id == id
    assert client.interactions.get(two.id, include_input=True).input
    client.interactions.delete(two.id)
    with pytest.raises(_interactions.NotFoundError) as missing:
        client.interactions.get(two.id)
    assert missing.value.status_code == 404
    gone = client.interactions.create(model="fake", input="Hi", store=False)
    with pytest.raises(_interactions.NotFoundError):
        client.interactions.get(gone.id)


def test_background_and_cancel(client, api, wait):
    api.engine.plan = lambda prompt, params: slow("abc")
    begun = client.interactions.create(model="fake", input="Hi", background=True)
    assert begun.status == "in_progress"
    wait(lambda: client.interactions.get(begun.id).status == "completed")
    assert client.interactions.get(begun.id).output_text == "abc"
    api.engine.plan = lambda prompt, params: slow("a" * 1000)
    stream = client.interactions.create(model="fake", input="Hi", background=True, stream=True)
    seen = [next(stream) for _ in range(5)]
    stream.close()
    id = seen[0].interaction.id
    assert client.interactions.get(id).status == "in_progress"
    assert client.interactions.cancel(id).status == "cancelled"
    rest = list(client.interactions.get(id, stream=True, last_event_id=seen[-1].event_id))
    assert rest[-1].interaction.status == "cancelled"
    assert deltas(seen) + deltas(rest) == client.interactions.get(id).output_text


def test_errors(client):
    with pytest.raises(_interactions.BadRequestError) as bad:
        client.interactions.create(model="fake", input="Hi", generation_config={"temperature": 9})
    assert "generation_config.temperature" in str(bad.value)
    with pytest.raises(_interactions.NotFoundError):
        client.interactions.create(model="no-such", input="Hi")
    with pytest.raises(_interactions.BadRequestError):
        client.interactions.create(model="fake")


def test_async(api):
    async def main():
        client = genai.Client(api_key="any", http_options={"base_url": api.url}).aio
        one = await client.interactions.create(model="fake", input="Hi")
        stream = await client.interactions.create(
            model="fake", input="more", previous_interaction_id=one.id, stream=True
        )
        events = [event async for event in stream]
        again = await client.interactions.get(events[-1].interaction.id)
        await client.aclose()
        return one.output_text, deltas(events), again.output_text

    assert asyncio.run(main()) == (TEXT, TEXT, TEXT)


class Cutting:
    """A proxy that ends each connection for a streamed answer after some bytes of it, in the middle of anything."""

    def __init__(self, port):
        self.port, self.cuts = port, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        left = self.cuts.pop(0) if self.cuts else None
        with client, socket.create_connection(("127.0.0.1", self.port)) as server:
            forth = threading.Thread(target=self._copy, args=(client, server), daemon=True)
            forth.start()
            self._copy(server, client, left)
            for one in (client, server):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            forth.join(5)

    @staticmethod
    def _copy(source, target, left=None):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data[:left])
                if left is not None and (left := left - len(data)) <= 0:
                    return

    def close(self):
        self._listener.close()


@pytest.fixture
def proxy(api):
    one = Cutting(api.port)
    yield one
    one.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(900, 6000), min_size=1, max_size=3), store=st.booleans(), size=st.integers(1, 5))
def test_streams_heal_or_can_be_read_on(api, proxy, monkeypatch, cuts, store, size):
    """Wherever the connection breaks: the text is the same, nothing comes twice and nothing is lost. The client goes on
    by itself if the break came after a checkpoint, else its caller does."""
    monkeypatch.setattr(run, "CHECKPOINT_EVERY", 0.0)
    text = "".join(chr(0x61 + i % 26) for i in range(30)) + "é🎉"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    api.engine.plan = lambda prompt, params: [
        *(Emission(piece, tuple(piece.encode())) for piece in pieces), Emission("", finish_reason="stop_token")
    ]  # fmt: skip
    proxy.cuts = list(cuts)
    options = {"base_url": proxy.address, "headers": {"connection": "close"}, "timeout": 10_000}
    client = genai.Client(api_key="any", http_options=options)
    seen = []
    try:
        for event in client.interactions.create(model="fake", input="Hi", stream=True, store=store):
            seen.append(event)
    except Exception:
        proxy.cuts = []
        if not seen or not store:
            return  # the first events were lost, or nothing is kept
        known = next(e for e in seen if e.event_type == "interaction.created").interaction.id
        seen += client.interactions.get(known, stream=True, last_event_id=seen[-1].event_id)
    finally:
        proxy.cuts = []
    assert deltas(seen) == text and seen[-1].event_type == "interaction.completed"
    kept = [e.event_id for e in seen if not e.event_id.endswith("c")]
    assert len(set(kept)) == len(kept)


def test_openai_background(api, wait):
    with openai.OpenAI(base_url=api.url + "/v1", api_key="any", max_retries=0) as client:
        api.engine.plan = lambda prompt, params: slow("abcdef")
        begun = client.responses.create(model="fake", input="Hi", background=True)
        assert begun.status == "in_progress" and begun.background
        wait(lambda: client.responses.retrieve(begun.id).status == "completed")
        assert client.responses.retrieve(begun.id).output_text == "abcdef"

        with client.responses.create(model="fake", input="Hi", background=True, stream=True) as stream:
            seen = [next(stream) for _ in range(6)]
        id = seen[0].response.id
        rest = list(client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number))
        everything = seen + rest
        assert [e.sequence_number for e in everything] == list(range(len(everything)))
        assert "".join(e.delta for e in everything if e.type == "response.output_text.delta") == "abcdef"
        assert rest[-1].type == "response.completed"

        api.engine.plan = lambda prompt, params: slow("a" * 1000)
        begun = client.responses.create(model="fake", input="Hi", background=True)
        with pytest.raises(openai.BadRequestError) as busy:
            client.responses.create(model="fake", input="x", previous_response_id=begun.id)
        assert busy.value.param == "previous_response_id"
        assert client.responses.cancel(begun.id).status == "cancelled"
        assert client.responses.retrieve(begun.id).status == "cancelled"
        assert client.responses.cancel(begun.id).status == "cancelled"
        api.engine.plan = lambda prompt, params: slow("a")
        foreground = client.responses.create(model="fake", input="Hi")
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(foreground.id)
