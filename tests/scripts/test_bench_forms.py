"""`bench.py schema`: the schemas, the report, and that an adapter says what it measured."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from umbra.configs.prompt_sets import DEFAULT
from umbra.scripts.bench import cli, forms
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.processes import BenchError
from umbra.scripts.bench.schemas import schemas
from umbra.scripts.bench.systems.forms import is_valid

PLAN = Plan(
    bench="schema", model="tiny", quant="auto", threads=1, mesh=None, draft="auto", against=(), prompts=DEFAULT,
    limit=5, rounds=2, sequences=2, max_tokens=64,
)  # fmt: skip


def test_schemas_are_schemas_and_the_same_for_the_same_seed():
    made = schemas(40, 1)
    assert made == schemas(40, 1) != schemas(40, 2)
    for schema, question in made:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "JSON" in question


def test_validity():
    schema = {"type": "object", "required": ["a"]}
    assert is_valid('{"a": 1}', schema)
    assert not is_valid("{}", schema) and not is_valid('{"a": 1', schema)


class FakeWorkers(contextlib.AbstractContextManager):
    """One worker: answers of a form are half as fast, and every other one is valid."""

    def __init__(self, systems: list[str]) -> None:
        self.calls: list[Any] = []
        self.worker = SimpleNamespace(
            system=systems[0], settings={"context": 100}, versions={}, load=lambda setup: None, call=self.call
        )

    def call(self, name: str, questions: list[str], given: list[Any], max_tokens: int) -> list[dict[str, Any]]:
        assert name == "in_form" and max_tokens == 64 and len(questions) <= 2
        self.calls.append(given)
        free = given[0] is None
        text = "hello" if free else '{"a"'
        figures = {"tokens": 30, "passes": 10, "tok_s": 100.0 if free else 50.0, "ttft_ms": 5.0, "forced": 6}
        return [{"text": text, "finish": "stop_token", **figures} for _ in questions]

    def __getitem__(self, system: str) -> Any:
        self.worker.turn = lambda: contextlib.nullcontext(self.worker)
        return self.worker

    def __iter__(self) -> Any:
        return iter([self.worker])

    def __exit__(self, *_: object) -> None:
        pass


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "Workers", FakeWorkers)
    monkeypatch.setattr(forms, "is_valid", lambda text, schema: len(schema["properties"]) > 2)
    content = forms.run(PLAN, lambda text: None)
    ours, free = content["summary"]["umbra"], content["summary"]["free text"]
    assert (ours["tok_s"], free["tok_s"], content["ratio"]) == (50, 100, {"free text": 0.5})
    assert ours["rows"] == free["rows"] == 10 and ours["tokens_per_pass"] == 3
    assert ours["forced_share"] == 0.2 and 0 < ours["valid"] < 1 and "valid" not in free
    assert {row["category"] for row in content["rows"]} == {"schema", "free"}
    too_long = Plan(**{**vars(PLAN), "max_tokens": 100})
    with pytest.raises(BenchError, match="do not fit"):
        forms.run(too_long, lambda text: None)


def test_command_line() -> None:
    plan = cli.plan_of(cli.parser().parse_args(["schema", "--limit", "3", "--sequences", "4", "--seed", "7"]))
    assert (plan.bench, plan.limit, plan.sequences, plan.seed, plan.max_tokens) == ("schema", 3, 4, 7, 256)
    assert plan.settings()["seed"] == 7
