"""Bodies of any shape are understood or refused: nothing else comes out of the protocols' own code."""

from __future__ import annotations

import typing

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.serving.api import (
    cached_contents,
    gemini,
    gemini_schemas,
    interactions,
    live,
    openai_responses,
    responses_body,
)
from umbra.serving.api.errors import ApiError
from umbra.serving.api.gemini_schemas import CachedBody, CountBody, GenerateBody, Message
from umbra.serving.api.interaction_schemas import InteractionBody, InteractionConfig

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(allow_nan=False), st.text(max_size=3), st.just(2**70),
    st.sampled_from(["user", "model", "text", "OBJECT", "AUTO", "HIGH", "f", "cachedContents/x", "text/plain"]),
)  # fmt: skip


def fields(*schemas):
    return sorted({name for schema in schemas for name in schema})


GEMINI = fields(
    *(one.spellings for one in vars(gemini_schemas).values() if isinstance(one, type) and issubclass(one, Message))
)
RESPONSES = fields(responses_body.ResponsesBody.model_fields, ("role", "content", "type", "text", "call_id", "name",
                   "arguments", "output", "effort", "summary", "format", "function"))  # fmt: skip


def json_of(names):
    """JSON that often uses the protocol's names."""
    keys = st.one_of(st.sampled_from(names), st.text(max_size=2))
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
    )


def like(schema, names, depth=0):
    """Bodies whose fields mostly have the right type."""
    if depth > 4:
        return json_of(names)
    made = {}
    for name, field in schema.model_fields.items():
        inner = next((one for one in messages_in(field.annotation)), None)
        if inner is None:
            made[name] = json_of(names)
        else:
            one = st.deferred(lambda inner=inner: like(inner, names, depth + 1))
            made[name] = st.one_of(one, st.lists(one, max_size=2))
    return st.sets(st.sampled_from(sorted(made)), max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: made[name] for name in sorted(chosen)})
    )


def messages_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Message):
        yield annotation
    for part in typing.get_args(annotation):
        yield from messages_in(part)


NAMED = st.dictionaries(st.sampled_from(RESPONSES), json_of(RESPONSES), max_size=4)
HI = {"contents": [{"parts": [{"text": "Hi"}]}]}


def understood(call):
    """The prepared prompt, or None for a refusal of the kind that blames the client."""
    try:
        return call().prepare()
    except ApiError as error:
        assert 400 <= error.status < 500 and error.message
        return None


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.one_of(like(GenerateBody, GEMINI), st.dictionaries(st.sampled_from(GEMINI), json_of(GEMINI), max_size=4)),
    st.booleans(),
)
def test_gemini(api, body, complete):
    data = {**body, **HI} if complete else body
    service, loaded = api.service, api.service.loaded
    understood(lambda: gemini._call(gemini_schemas.parse(GenerateBody, data), service, loaded, "fake", ""))
    understood(lambda: gemini._counted(gemini_schemas.parse(CountBody, data), service, loaded, "fake", ""))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(NAMED, st.one_of(json_of(RESPONSES), st.lists(NAMED, max_size=3)))
def test_responses(api, body, items):
    service, loaded = api.service, api.service.loaded
    data = {**body, "model": "fake", "input": items}
    understood(lambda: openai_responses._call(openai_responses._parse(data, loaded), service, loaded, None))


INTERACTIONS = fields(InteractionBody.spellings, InteractionConfig.spellings, ("type", "text", "content", "call_id",
                      "name", "arguments", "result", "mime_type", "schema", "allowed_tools", "mode"))  # fmt: skip
STEP_TYPES = st.sampled_from(["text", "user_input", "model_output", "function_call", "function_result", "thought"])
STEP = st.fixed_dictionaries({"type": STEP_TYPES}, optional={n: json_of(INTERACTIONS) for n in INTERACTIONS[:40]})


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(like(InteractionBody, INTERACTIONS), st.one_of(st.text(max_size=3), st.lists(STEP, max_size=3)))
def test_interactions(api, body, steps):
    service, loaded = api.service, api.service.loaded
    data = {**body, "model": "fake", "input": steps}

    def plan():
        parsed = interactions._parse(data, loaded)
        interactions._check_body(parsed, loaded)
        return interactions._call(service, loaded, parsed, None).plan()

    understood(plan)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(like(CachedBody, GEMINI), like(live.Setup, GEMINI))
def test_contents_and_sessions(api, body, setup):
    service, loaded = api.service, api.service.loaded
    for call in (
        lambda: cached_contents._conversation(gemini_schemas.parse(CachedBody, {**body, "model": "fake"}), loaded),
        lambda: live.LiveSession(None, service, gemini_schemas.parse(live.Setup, {**setup, "model": "fake"})),
    ):
        try:
            call()
        except ApiError as error:
            assert 400 <= error.status < 500 and error.message
