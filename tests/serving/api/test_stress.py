"""Clients that mean no good, in small numbers (`python -m umbra.scripts.bench.stress` has more of them): they are
refused as their protocol has it, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

from umbra.configs.server import ServerConfig
from umbra.scripts.bench import stress
from umbra.scripts.bench.bad_requests import Bad, bad_requests

BAD = bad_requests("fake")


def during(api, trouble):
    """What the trouble gives; somebody else's requests are all answered."""
    usual = stress.Usual(api.url, "fake")
    result = asyncio.run(usual.during(trouble))
    assert set(usual.answers) == {"200"}
    return result


def test_bad_requests_are_refused_in_the_protocol_s_shape(api):
    assert len(BAD) >= 100 and len({one.name for one in BAD}) == len(BAD)
    answers, wrong = during(api, stress.send_bad(api.url, BAD))
    assert not wrong and sum(answers.values()) == len(BAD)
    assert {one.params.max_tokens for one in api.engine.submitted} == {4}, "only the usual requests have run"


def test_heads_that_never_end(start_api):
    api = start_api(ServerConfig(header_timeout=0.3))
    assert during(api, stress.slowloris(api.url, 20, 5.0)) == {"408": 20}


def test_idle_connections(api):
    assert during(api, stress.idle(api.url, 100, 0.3)) == {"open": 100}


def test_large_bodies(api):
    assert during(api, stress.large(api.url, 4, 500_000)) == {"413": 4}


def test_slow_readers(api):
    assert during(api, stress.slow_readers(api.url, 40, 0.5, "fake")) == {"open": 40}


class Response:
    def __init__(self, status, text="", error=None):
        self.status_code, self.text, self._error = status, text, error

    def json(self):
        if self._error is None:
            raise ValueError("no JSON")
        return {"error": self._error}


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (Response(500, "boom"), "status 500"),
        (Response(200, "fine"), "status 200"),
        (Response(400, "<html>"), "no error object"),
        (Response(400, "", {"message": "x"}), "not in the protocol's shape"),
        (Response(400, "", {"message": "<a object at 0x7f>", "type": "t", "param": None, "code": None}), "the inside"),
    ],
)
def test_what_is_found_wrong(response, said):
    assert said in stress._fault(Bad("x", "GET", "/"), response)
