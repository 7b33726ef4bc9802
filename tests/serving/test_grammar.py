"""Answers that follow a grammar: always valid, the same whatever is drafted, and nobody else notices."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from umbra.configs.engine import EngineConfig
from umbra.model.load import Model
from umbra.serving.engine import Engine, Grammar, SamplingParams
from umbra.serving.engine.blocking import Completion
from umbra.serving.engine.grammar import MAX_GRAMMAR, BadGrammar
from umbra.serving.engine.grammars import Chain, Grammars, Guide
from umbra.serving.engine.thoughts import Thinking

SCHEMAS = int(os.environ.get("UMBRA_SCHEMAS", "12"))
CONFIG = EngineConfig(slots=4, context_length=512, blocks=40, prefill_chunk=48, draft_rows=24)
EOS_IDS = (0, 257)
PROMPT = [ord(c) for c in "Tell me: "]


@pytest.fixture(scope="module")
def model(random_model: Callable, random_shadow: Callable) -> Model:
    loaded = random_model("tiny", eos_ids=EOS_IDS)
    base = type(loaded.tokenizer)

    class WithEnds(base):
        """Tokens that end an answer have no text."""

        def token_bytes(self, token: int) -> bytes:
            return b"" if token in EOS_IDS else base.token_bytes(self, token)

    shadow = random_shadow(512, loaded.config.d_model)
    return dataclasses.replace(loaded, shadow=shadow, tokenizer=WithEnds())


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, CONFIG) as engine:
        engine.start()
        yield engine
        engine.check()
        assert engine.stats().used_blocks == 0


def work(schemas: list[dict[str, Any]], **how: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of every kind, one for each schema."""
    rng = random.Random(5)
    prompts = [[rng.randrange(1, 257) for _ in range(rng.choice([3, 20, 60]))] for _ in schemas]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.5]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 40]),
            repetition_penalty=rng.choice([1.0, 1.1]), seed=i, max_tokens=400, grammar=Grammar.json_schema(schema),
            logprobs=rng.choice([None, 1]), **how,
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    return prompts, params


def ids(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def test_random_schemas(engine: Engine, random_schemas: Callable) -> None:
    schemas = random_schemas(SCHEMAS, 1)
    prompts, params = work(schemas)
    mates = [SamplingParams(temperature=0.5 * i, seed=i, max_tokens=40) for i in range(3)]
    alone = [engine.generate([PROMPT], one)[0] for one in mates]

    answers = engine.generate([*prompts, PROMPT, PROMPT, PROMPT], [*params, *mates])
    for schema, answer in zip(schemas, answers, strict=False):
        assert answer.finish_reason == "stop_token", answer.text
        jsonschema.validate(json.loads(answer.text), schema)
    assert sum(dict(answer.timings.accepted).get("forced", 0) for answer in answers) > 5 * SCHEMAS
    assert ids(answers[len(schemas) :]) == ids(alone), "a batch mate noticed"

    assert engine.stats().compilations_after_ready == 0
    off = engine.generate(prompts, [dataclasses.replace(one, draft="off") for one in params])
    assert ids(off) == ids(answers[: len(schemas)])
    assert all(answer.timings.drafted == 0 for answer in off)
    assert [a.logprobs for a in off] == [a.logprobs for a in answers[: len(schemas)]]


@pytest.mark.parametrize("draft", ["auto", "off"])
def test_what_has_no_end_is_ended_in_time(engine: Engine, draft: str) -> None:
    """Strings, lists and objects that a random trunk would hardly end."""
    inner = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "number"}}, "required": ["s", "n"]}
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "list": {"type": "array", "items": inner},
            "more": {"type": "object"},
        },
        "required": ["text", "list", "more"],
    }
    params = [
        SamplingParams(temperature=0.3 * i, seed=i, max_tokens=100 + 9 * i, draft=draft, grammar=Grammar.json_schema(s))
        for i, s in enumerate([schema, {"type": "array", "items": schema}, {"type": "object"}, {"type": "string"}] * 2)
    ]
    answers = engine.generate([PROMPT] * len(params), params)
    for one, answer in zip(params, answers, strict=True):
        assert answer.finish_reason == "stop_token", answer.text
        jsonschema.validate(json.loads(answer.text), json.loads(one.grammar.text))
    off = engine.generate([PROMPT] * len(params), [dataclasses.replace(one, draft="off") for one in params])
    assert ids(off) == ids(answers)


@pytest.mark.parametrize("draft", ["auto", "off"])
def test_a_number_without_end_is_ended_in_time(engine: Engine, draft: str) -> None:
    """In front of something that must still come."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "day": {"type": "string", "format": "date"}},
        "required": ["n", "day"],
    }
    digits = tuple((ord(c), 100.0) for c in "123456789")
    params = SamplingParams(max_tokens=120, draft=draft, logit_bias=digits, grammar=Grammar.json_schema(schema))
    (answer,) = engine.generate([PROMPT], params)
    assert answer.finish_reason == "stop_token", answer.text
    jsonschema.validate(json.loads(answer.text), schema)
    assert len(answer.token_ids) > 40, "it was ended sooner than it had to be"


def test_a_way_to_the_end_is_gone_on_with(model: Model) -> None:
    """What was known some tokens before saves masks, and leads to an end from wherever the answer is."""
    grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
    inner = {"type": "object", "properties": {"k": {"enum": ["a"]}}, "required": ["k"]}
    compiled = grammars.compile(Grammar.json_schema({"type": "array", "items": inner}))
    matcher, masks = compiled.matcher.deep_copy(), {"new": 0, "known": 0}

    def way(kind: str, known: tuple[int, ...] | None = None) -> tuple[int, ...]:
        def fill(matcher: Any, mask: np.ndarray) -> None:
            masks[kind] += 1
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

        found = compiled.ends.way(matcher, grammars.words, fill, known)
        assert found is not None
        return found

    known = None
    for token in b'[{"k": "a"}, {"k": "a"}, {"k':
        known = way("known", known)
        assert len(known) <= len(way("new")) + 1
        assert matcher.validate_tokens(list(known)) == len(known)
        assert matcher.consume_token(token)
    assert masks["known"] * 2 < masks["new"]


def text_of(engine: Engine, grammar: Grammar, **how: Any) -> str:
    (answer,) = engine.generate([PROMPT], SamplingParams(grammar=grammar, max_tokens=100, **how))
    assert answer.finish_reason == "stop_token"
    return answer.text


@pytest.mark.parametrize("how", [{}, {"temperature": 1.2, "seed": 4}, {"temperature": 0.9, "min_p": 0.1, "seed": 1}])
def test_kinds(engine: Engine, how: dict[str, Any]) -> None:
    assert re.fullmatch(r"[0-9]{4}-[a-f]{2,3}", text_of(engine, Grammar.regex(r"[0-9]{4}-[a-f]{2,3}"), **how))
    assert text_of(engine, Grammar.choice(["red", "green", 'a "b"\n']), **how) in ("red", "green", 'a "b"\n')
    lark = 'start: "(" inner ")"\ninner: /[xyz]{3}/ | "w300"'
    assert re.fullmatch(r"\(([xyz]{3}|w300)\)", text_of(engine, Grammar.grammar(lark), **how))
    gbnf = 'root ::= "[" item ("," item){1,3} "]"\nitem ::= [a-d] [0-9]'
    assert re.fullmatch(r"\[[a-d][0-9](,[a-d][0-9]){1,3}\]", text_of(engine, Grammar.grammar(gbnf), **how))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 2}),
        Grammar.json_schema({"type": "object", "required": ["a"], "properties": {"a": False}}),
        Grammar.json_schema({"enum": []}),
        Grammar.json_schema({"type": "foo"}),
        Grammar.json_schema({"$ref": "#/nowhere"}),
        Grammar.json_schema({"type": "string", "pattern": "a(?=b)"}),
        Grammar.json_schema(False),
        Grammar.regex("(ab"),
        Grammar.grammar("start: other"),
        Grammar.grammar("root ::= ("),
        Grammar.grammar(""),
    ],
    ids=lambda grammar: grammar.text[:30],
)
def test_what_cannot_be_followed_is_refused(engine: Engine, grammar: Grammar) -> None:
    with pytest.raises(BadGrammar, match="cannot be followed|nothing matches") as error:
        engine.submit(PROMPT, SamplingParams(grammar=grammar.named("response_format")), sink=lambda pairs: None)
    assert "\n" not in str(error.value) and error.value.field == "response_format"


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar.regex("(ab"), "the regular expression cannot be followed: unclosed group, at character 1"),
        (Grammar.regex("/[ab"), "the regular expression cannot be followed: unclosed character class"),
        (
            Grammar.regex(r"a\b."),
            r"the regular expression cannot be followed: look-around, such as \b, is not supported",
        ),
        (
            Grammar.regex("(" * 300 + ")" * 300),
            "the regular expression cannot be followed: exceed the maximum number of nested",
        ),
        (Grammar.regex(r"[^\s\S]"), "nothing matches the regular expression"),
        (
            Grammar.json_schema({"type": "string", "pattern": "a("}),
            "the JSON schema cannot be followed: unclosed group, at character 2 of the pattern 'a('",
        ),
        (
            Grammar.grammar("start: other"),
            'the grammar cannot be followed: unknown name: "other", in line 1 at character 8',
        ),
        (Grammar.grammar("root ::= ("), "the grammar cannot be followed: Expected ')' at line 1"),
    ],
    ids=lambda one: one.text[:20] if isinstance(one, Grammar) else "",
)
def test_what_is_wrong_is_told_without_the_parsers_own_sources(engine: Engine, grammar: Grammar, told: str) -> None:
    with pytest.raises(BadGrammar) as error:
        engine.submit(PROMPT, SamplingParams(grammar=grammar), sink=lambda pairs: None)
    said = str(error.value)
    assert said.startswith(told) if grammar.text.startswith("((") else said == told
    assert not any(word in said for word in ("\n", "start: /", " | ", "parse error", "verbose"))


def test_limits_and_combinations(model: Model) -> None:
    with pytest.raises(ValueError, match="at most"):
        Grammar.regex("a" * (MAX_GRAMMAR + 1))
    with pytest.raises(ValueError, match="at least one text"):
        Grammar.choice([])
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    endless = Engine(dataclasses.replace(model, eos_ids=()), CONFIG)
    with pytest.raises(BadGrammar, match="no token that ends"):
        endless.submit(PROMPT, SamplingParams(grammar=Grammar.json_object()), sink=lambda pairs: None)


def test_the_limit_and_stop_strings_cut(engine: Engine) -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["abc"]}, "minItems": 40, "maxItems": 50})
    (whole, cut, stopped) = engine.generate(
        [PROMPT] * 3,
        [
            SamplingParams(grammar=grammar, max_tokens=400),
            SamplingParams(grammar=grammar, max_tokens=20),
            SamplingParams(grammar=grammar, max_tokens=400, stop=("bc",)),
        ],
    )
    assert 40 <= len(json.loads(whole.text)) <= 50
    assert cut.finish_reason == "max_tokens" and cut.token_ids == whole.token_ids[:20]
    assert stopped.finish_reason == "stop_string" and stopped.text == '["a'
    assert len(whole.token_ids) / whole.timings.passes > 3, "what is forced comes several at a time"


def test_thoughts_are_free(engine: Engine) -> None:
    thinking = Thinking(10, ((400, 401),), (410, 411, 412, 400, 401))
    properties = {"a": {"type": "boolean"}}
    grammar = Grammar.json_schema(
        {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    )
    for draft in ("auto", "off"):
        params = SamplingParams(max_tokens=80, thinking=thinking, grammar=grammar, draft=draft)  # type: ignore[arg-type]
        (answer,) = engine.generate([PROMPT], params)
        assert answer.usage.thought_tokens == 15
        assert set(json.loads(answer.text)) >= {"a"}


def test_when_sequences_are_paused(model: Model, engine: Engine, random_schemas: Callable) -> None:
    """Few blocks, and several passes in one device loop for those that are free."""
    schemas = random_schemas(4, 3)
    prompts, params = work(schemas)
    expected = ids(engine.generate(prompts, params))
    config = dataclasses.replace(CONFIG, slots=3, blocks=6, decode_steps=3)
    with Engine(model, config) as small:
        small.start(warm=False)
        free = SamplingParams(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
        got = small.generate([*prompts, *[PROMPT] * 4], [*params, *[free] * 4])  # so that two of them meet
        assert ids(got[:4]) == expected
        assert small.stats().preemptions > 0
        small.check()


def test_a_tokenizer_that_puts_a_space_in_front(model: Model) -> None:
    """Followed by hand, with any allowed token."""
    base = type(model.tokenizer)

    class Spaced(base):  # type: ignore[misc,valid-type]
        def encode(self, text: str, **how: Any) -> list[int]:
            return [32, *base.encode(self, text, **how)]

    grammars = Grammars(Spaced(), 512, EOS_IDS)
    schema = {"type": "object", "properties": {"größe": {"enum": ["a", "bc"]}}, "required": ["größe"]}
    for seed in range(3):
        rng, guide, text = random.Random(seed), Guide(grammars.compile(Grammar.json_schema(schema)), 500), b""
        for room in range(500, 0, -1):
            assert guide.steering is not None and guide.error is None
            bits = np.unpackbits(guide.steering.masks[0].view(np.uint8), bitorder="little")
            token = rng.choice(np.flatnonzero(bits).tolist())
            if token in EOS_IDS:
                break
            text += Spaced().token_bytes(token)
            guide.advance((token,), Chain(), 0, room - 1)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.real
def test_the_default_model() -> None:
    """As many random schemas and questions as `UMBRA_SCHEMAS` says, several at once, with drafting on."""
    from umbra.kernels.backend import choose
    from umbra.model.load import load_model
    from umbra.scripts.bench.schemas import schemas
    from umbra.serving.api.json_schema import schema_grammar

    model = load_model("smollm2", kernels=choose("cpu").kernels)
    made = schemas(SCHEMAS, 11)
    prompts = [
        model.chat_template.encode(model.tokenizer, [{"role": "user", "content": question}]) for _, question in made
    ]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2), top_p=0.95, seed=i, max_tokens=320, grammar=schema_grammar(schema, "schema")
        )
        for i, (schema, _) in enumerate(made)
    ]
    with Engine(model, EngineConfig(slots=8, context_length=1024, kv_memory=0.5)) as engine:
        engine.start()
        answers = engine.generate(prompts, params)
        for (schema, _), answer in zip(made, answers, strict=True):
            assert answer.finish_reason == "stop_token", answer.text
            jsonschema.validate(json.loads(answer.text), schema)
        few = slice(0, 6)
        off = engine.generate(prompts[few], [dataclasses.replace(one, draft="off") for one in params[few]])
        assert ids(off) == ids(answers[few])
