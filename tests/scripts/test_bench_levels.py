"""`bench.py levels`, `skips` and `relax`: tasks, what is measured, tables and files."""

from __future__ import annotations

import json

import pytest

from umbra.configs.levels import LEVELS, relaxation
from umbra.configs.prompt_sets import DEFAULT
from umbra.model.calibration import fixed_sequence
from umbra.scripts.bench import levels, lossy, readme, systems
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.tasks import CHECKS, COUNT, KINDS, tasks


def plan(bench: str, **changes) -> Plan:
    values = dict(
        bench=bench, model="tiny", quant="auto", threads=1, mesh=None, draft="auto", against=(), prompts=DEFAULT,
        limit=3, rounds=1, max_tokens=16, tasks=10, thoughts=64,
    )  # fmt: skip
    return Plan(**{**values, **changes})


# ---- tasks


def test_tasks_are_the_same_for_the_same_seed_and_of_all_kinds():
    made = tasks()
    assert made == tasks() != tasks(seed=1)
    assert len(made) == len({task.question for task in made}) == len({task.id for task in made}) == COUNT
    assert [task.kind for task in made[: len(KINDS)]] == list(KINDS)
    assert all(task.score(task.answer) for task in made)
    assert not any(task.score("") or task.score("I do not know.") for task in made)


@pytest.mark.parametrize(
    ("check", "answer", "right", "wrong"),
    [
        ("number", "42", ["42", "17 + 25 = 42.", "The answer is 42"], ["4.2 apples", "42 or 43", "-42"]),
        ("text", "RIVER", ["RIVER", ' "RIVER".\n', "RIVER."], ["river", "RIVER is it", "The word is RIVER"]),
        ("json", '{"a": 1}', ['{ "a" : 1 }', '```json\n{"a": 1}\n```'], ['{"a": "1"}', 'Here: {"a": 1}', "{"]),
    ],
)
def test_checks(check, answer, right, wrong):
    assert all(CHECKS[check](text, answer) for text in right)
    assert not any(CHECKS[check](text, answer) for text in wrong)


# ---- levels

LOSSY = {
    "relaxed": {"margin": 0.3, "bound": 0.048, "confidence": 0.95, "prompts": 300},
    "subsets": [
        {"layers": [0, 1, 2, 4, 5], "agreement": 0.97, "perplexity_change": 0.02, "loss": 0.03, "bound": 0.045,
         "passed": True, "speed_bound": 1.1},
        {"layers": [0, 1, 4, 5], "agreement": 0.8, "perplexity_change": 0.4, "loss": 0.2, "bound": 0.25,
         "passed": False, "speed_bound": 1.3},
    ],
    "allowed": 5,
    "n_layers": 6,
}  # fmt: skip
NOTHING = {"relaxed": {"margin": 0.0}, "subsets": [], "allowed": 6, "n_layers": 6}


def test_every_level_is_measured_with_and_without_thoughts():
    ways, subsets = levels.ways(plan("levels"), LOSSY, thinks=True)
    names = [way.name for way in ways]
    assert names[:5] == ["umbra-minimal", "umbra-low", "umbra", "umbra-high", "umbra-off"]
    assert {way.level for way in ways} == set(LEVELS)
    budgets = {way.level: way.budget for way in ways if way.name.endswith("-thinking")}
    assert budgets == {"low": 8, "medium": 29, "high": 64}
    lossy_ways = {way.name: way for way in ways if way.name.endswith("-lossy")}
    assert lossy_ways["umbra-minimal-lossy"].layers == (0, 1, 2, 4, 5)
    assert lossy_ways["umbra-minimal-lossy"].relax == lossy_ways["umbra-low-lossy"].relax == 0.3
    assert [way.layers for way in subsets] == [(0, 1, 2, 4, 5), (0, 1, 4, 5)]


def test_nothing_lossy_is_measured_where_nothing_was_calibrated():
    ways, subsets = levels.ways(plan("levels", thoughts=0), NOTHING, thinks=True)
    assert [way.name for way in ways] == ["umbra-minimal", "umbra-low", "umbra", "umbra-high", "umbra-off"]
    assert subsets == []
    assert len(levels.ways(plan("levels"), NOTHING, thinks=False)[0]) == 5


FAKES = """
from umbra.scripts.bench.systems.base import System

LOSSY = %r

class Fake(System):
    def load(self, setup):
        settings = {"context": 4096, "thinks": "generic", "weights_id": "w", "shadow_id": "s"}
        return {"versions": {"fake": "1"}, "settings": settings}
    def trunk_name(self):
        return "fake"
    def encode(self, texts):
        return [list(text.encode()) for text in texts]
    def generate(self, prompts, max_tokens):
        raise NotImplementedError
    def lossy(self):
        return LOSSY
    def weight_bytes(self, n):
        return 1000000 * n
    def answer(self, way, text, max_tokens, ignore_eos):
        n = max_tokens + way["budget"]
        speed = 100.0 * (1 if way["draft"] == "off" else 2) * 6 / len(way["layers"] or range(6))
        ids = list(range(n))
        if way["relax"] or way["layers"]:
            ids[-1] = 999
        stream = dict(prompt_tokens=4, token_ids=ids, ttft=0.01, first_tokens=1, last=0.01 + (n - 1) / speed,
                      passes=n // 2, gaps=[], emitted=[], answer=n)
        right = "4" if way["level"] == "high" else "5"
        return {"text": right, "prompt": [1, 2, 3, 4], "stream": stream, "thought_tokens": way["budget"]}
    def answers_of(self, way, prompts, max_tokens):
        wrong = int(10 * way["relax"])
        return [[999] * wrong + list(range(wrong, 100)) for _ in prompts]
    def choices(self, texts):
        return [list(range(len(ids) - begin)) for ids, begin in texts]
    def measure_skips(self, texts, save):
        return {"contributions": [0] * 6, "subsets": LOSSY["subsets"], "prompts": 2, "tokens": 9, "target": 0.05,
                "confidence": 0.95}
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    (tmp_path / "umbra_bench_levels.py").write_text(FAKES % LOSSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(systems.ADAPTERS, "levels/umbra", "umbra_bench_levels:Fake")


def test_a_report_compares_levels(fakes, tmp_path):
    content = levels.run(plan("levels", plots=tmp_path / "plots"), lambda text: None)
    summary = content["summary"]
    assert list(summary)[:3] == ["umbra-minimal", "umbra-low", "umbra"]
    assert summary["umbra"]["agreement"] == 100.0
    assert summary["umbra"]["tok_s"] == pytest.approx(200)
    assert content["ratio"]["umbra-off"] == pytest.approx(2.0)
    assert summary["umbra-low-lossy"]["agreement"] == pytest.approx(100 * 15 / 16, rel=1e-4)
    assert summary["umbra-high-thinking"]["thought_tokens"] == 64
    assert [trade["layers"] for trade in content["layers"]] == [6, 5, 4]
    assert content["layers"][1]["tok_s"] == pytest.approx(240)
    assert content["layers"][2]["weight_mb"] == 4.0
    json.dumps(content, allow_nan=False)
    text = readme.level_table(content)
    assert "| medium (default) | 10 ms | 200 | 2.00 | 2.00 | 100.0 % |" in text
    assert "margin of 0.3 nats, at most 4.8 % other tokens with 95 % confidence (300 prompts)" in text
    assert "mechanism only" in text
    table = levels.layers_markdown(content)
    assert "| 5 | 97.0 % | +2.0 % | 4.5 % |" in table and "5 of 6 layers are allowed" in table
    assert readme.figures([content]).keys() == {"levels", "layers", "machine"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"levels.png", "layers.png"}


# ---- what may be lost


def test_relaxed_acceptance_is_calibrated_and_read_back(fakes, tmp_path, monkeypatch):
    monkeypatch.setattr(lossy, "RELAXED", tmp_path)
    content = lossy.relax(plan("relax", limit=100, save=True), lambda text: None)
    rows = {row["margin"]: row for row in content["rows"]}
    assert rows[0.0]["loss"] == 0.0 and rows[0.0]["passed"]
    *passed, failed = sorted(rows)
    assert all(rows[margin]["passed"] for margin in passed) and not rows[failed]["passed"]
    assert passed == list(lossy.MARGINS[: len(passed)]) and rows[failed]["loss"] > 0
    margin = content["summary"]["umbra"]["margin"]
    assert margin == passed[-1] > 0
    read = relaxation("fake", "w", "s", tmp_path)
    assert (read.margin, read.prompts, read.confidence) == (margin, 100, 0.95)
    assert read.bound <= 0.05
    assert "other tokens by margin in nats: 0: 0.0 %" in readme.relaxing(content)


def test_a_margin_of_zero_is_written_when_nothing_passed():
    made = lossy.relaxed({"weights_id": "w", "shadow_id": "s"}, 3, fixed_sequence([[0.5] * 3] * len(lossy.MARGINS)))
    assert (made["margin"], made["bound"]) == (0.0, 0.0)


def test_subsets_are_reported(fakes):
    content = lossy.skips(plan("skips", sequences=2), lambda text: None)
    assert content["summary"]["umbra"]["allowed_layers"] == 5
    assert [row["category"] for row in content["rows"]] == ["5 layers", "4 layers"]
    text = readme.skipping(content)
    assert "5 layers 3.0 % (at most 4.5 %)" in text and "within 5 %: 5 layers" in text
