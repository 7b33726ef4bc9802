"""Drafting in the benchmarks: repetition, windows of a stream, categories, ratios and fixed lengths."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from rich.console import Console

from umbra.configs.prompt_sets import DEFAULT, Prompt
from umbra.scripts.bench import drafts, flat, harness, readme, systems
from umbra.scripts.bench.measures import Decode, Flat, repeats, windows
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.systems.base import Run, Stream


def plan(bench: str = "decode", **changes) -> Plan:
    values = dict(
        bench=bench, model="tiny", quant="auto", threads=1, mesh=None, draft="auto", against=(), prompts=DEFAULT,
        limit=4, rounds=1, max_tokens=64,
    )  # fmt: skip
    return Plan(**{**values, **changes})


def stream(emitted: list[int], *, gap: float = 0.01, answer: int | None = None, passes: int | None = None) -> Stream:
    """A stream whose emissions of the given sizes come at equal times."""
    tokens = sum(emitted)
    return Stream(
        prompt_tokens=10, token_ids=list(range(tokens)), ttft=0.1, first_tokens=emitted[0],
        last=0.1 + gap * (len(emitted) - 1), passes=passes or len(emitted), gaps=[gap] * (len(emitted) - 1),
        emitted=emitted, answer=tokens if answer is None else answer,
    )  # fmt: skip


# ---- one stream


def test_repetition_is_eight_tokens_three_times():
    once = list(range(30))
    assert not repeats(once) and not repeats([]) and not repeats([1] * 9)
    assert repeats([1] * 10), "overlapping ones count"
    eight = list(range(8))
    assert not repeats([*eight, 90, *eight, 91, *once[10:]])
    assert repeats([*eight, 90, *eight, 91, *eight])
    seven = list(range(7))
    assert not repeats([*seven, 90, *seven, 91, *seven])


def test_a_decode_row_counts_passes_up_to_the_end_of_the_answer():
    bench = Decode(plan(), [Prompt("p", "chat", ("x",))], [[1, 2]])
    job = bench.jobs(0)[0]
    row = bench.row(job, Run([stream([1, 3, 2, 4], answer=5)], 1.0))
    assert (row["tokens"], row["passes"], row["tokens_per_pass"]) == (10, 4, 2.5)
    assert (row["answer_tokens"], row["answer_passes"]) == (5, 3)
    assert row["answer_tokens_per_pass"] == pytest.approx(5 / 3)
    assert row["repeats"] is False and row["decode_s"] == pytest.approx(0.03)
    assert row["answer_tok_s"] == pytest.approx(5 / 0.02), "up to the emission with the answer's end: 1 + 3 + 2 tokens"
    short = bench.row(job, Run([stream([5, 3], answer=5)], 1.0))
    assert short["answer_tok_s"] is None


def test_passes_of_an_answer_are_not_known_where_emissions_are_bursts():
    bench = Decode(plan(), [Prompt("p", "chat", ("x",))], [[1, 2]])
    row = bench.row(bench.jobs(0)[0], Run([stream([8, 8], answer=5, passes=9)], 1.0))
    assert "answer_tokens" not in row


def test_windows_run_from_emission_to_emission():
    made = windows(stream([1, 2] * 200), skipped=200, window=100)
    assert len(made) == 4
    assert all(window["tok_s"] == pytest.approx(150.0, rel=0.02) for window in made)
    ats = [window["at"] for window in made]
    assert ats == sorted(ats) and ats[0] == pytest.approx(10 + 250, abs=2)
    assert windows(stream([1] * 150), skipped=200, window=100) == []


def test_a_rate_that_falls_as_reading_grows_is_even():
    """Each pass takes as long as reading its bytes: 1,000 of weights and 2 a position."""
    emitted = [1] * 701
    gaps = [(1000 + 2 * (10 + i)) * 1e-6 for i in range(1, 701)]
    one = Stream(10, list(range(701)), 0.1, 1, 0.1 + sum(gaps), 701, 0, gaps, emitted, 701)
    bench = Flat(plan("flat", max_tokens=701), [Prompt("p", "chat", ("x",))], [[1]])
    rows = [bench.row(bench.jobs(0)[0], Run([one], 1.0))] * 3
    spread = flat.spread(rows, 1000, 2)
    assert len(spread["windows"]) == 5
    assert spread["flat_percent"] < 0.1 < 5 < spread["raw_percent"]
    assert flat.spread([], 1000, 2) == {}


# ---- systems that draft differently


@pytest.mark.parametrize(
    ("system", "draft", "expected"),
    [
        ("umbra", "auto", ("auto", None)),
        ("umbra-off", "auto", ("off", None)),
        ("umbra-lookup", "auto", ("lookup", None)),
        ("umbra-fixed-4", "auto", ("auto", 4)),
        ("umbra-fixed-15", "shadow", ("shadow", 15)),
        ("umbra-fixed-2", "off", ("auto", 2)),
        ("umbra-xla", "lookup", ("lookup", None)),
        ("umbra-int8", "off", ("off", None)),
    ],
)
def test_names_say_how_a_system_drafts(system, draft, expected):
    assert systems.drafting(system, draft) == expected
    setup = harness.our_setup(plan(draft=draft, sequences=3), system=system)
    assert (setup.draft, setup.draft_length, setup.sequences) == (*expected, 3)


def test_a_length_on_the_command_line_is_of_all_but_fixed_ones():
    asked = plan(draft="auto", draft_length=7, against=("off", "fixed-3", "llama.cpp"))
    assert asked.systems == ["umbra", "umbra-off", "umbra-fixed-3", "llama.cpp"]
    assert asked.drafting == ["umbra", "umbra-off", "umbra-fixed-3"]
    lengths = [harness.our_setup(asked, system=system).draft_length for system in asked.drafting]
    assert lengths == [7, 7, 3]


def test_prompts_of_each_category(tmp_path):
    path = tmp_path / "prompts.jsonl"
    kinds = ["a", "a", "a", "b", "c", "c"]
    rows = [{"question_id": i, "category": kind, "turns": [f"x{i}"]} for i, kind in enumerate(kinds)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.id for prompt in harness._prompts(plan(prompts=path, each=2))] == ["0", "1", "3", "4", "5"]
    assert [prompt.id for prompt in harness._prompts(plan(prompts=path))] == ["0", "1", "2", "3"]


# ---- many rows


def rows() -> list[dict]:
    """Four prompts of two categories, one of which repeats itself, on three systems."""
    made = []
    speeds = {"umbra": (400.0, 2.0), "umbra-off": (200.0, 1.0), "umbra-fixed-4": (320.0, 1.8)}
    for (system, (tok_s, per_pass)), i in itertools.product(speeds.items(), range(4)):
        category = "maths" if i < 2 else "chat"
        per_pass = per_pass + (2.0 if i == 3 and system != "umbra-off" else 0.0)
        made.append(
            {
                "system": system, "round": 1, "id": f"p{i}", "category": category, "tokens": 128,
                "passes": 128 / per_pass, "decode_s": 128 / tok_s, "tok_s": tok_s * (1 + i), "repeats": i == 3,
                "answer_tokens": 64, "answer_passes": 64 / per_pass, "tokens_per_pass": per_pass,
            }
        )  # fmt: skip
    return made


def test_categories_ratios_and_the_best_fixed_length():
    content = drafts.compare(plan(against=("off", "fixed-4")), rows())
    ours = content["systems"]["umbra"]
    assert list(ours["categories"]) == ["maths", "chat"]
    assert ours["categories"]["maths"]["tokens_per_pass"] == pytest.approx(2.0)
    assert ours["categories"]["chat"]["tokens_per_pass"] == pytest.approx(256 / (64 + 32))
    assert ours["categories"]["chat"]["not_repeating_tokens_per_pass"] == pytest.approx(2.0)
    assert (ours["all"]["rows"], ours["all"]["not_repeating_rows"]) == (4, 3)
    assert ours["mean_of_categories"] == pytest.approx((2 + 256 / 96) / 2)
    assert content["ratio"]["umbra-off"]["all"] == pytest.approx(2.0)
    assert content["ratio"]["umbra-off"]["categories"] == {"maths": pytest.approx(2.0), "chat": pytest.approx(2.0)}
    assert content["best_fixed"] == "umbra-fixed-4"
    assert content["gate_over_best_fixed"] == pytest.approx(400 / 320)


def test_rows_beside_busy_processes_do_not_count():
    some = rows() + [{**row, "busy": 1, "tok_s": 1.0} for row in rows()]
    content = drafts.compare(plan(against=("off", "fixed-4")), some)
    assert content["systems"]["umbra"]["all"]["rows"] == 4


def test_tables():
    content = drafts.compare(plan(against=("off", "fixed-4")), rows())
    out = io.StringIO()
    drafts.show(content, Console(file=out, width=120))
    assert "mean of categories" in out.getvalue() and "[2.00]" in out.getvalue()
    assert "the gate over the best fixed length (umbra-fixed-4): 1.250" in out.getvalue()
    text = drafts.markdown(content)
    assert "| maths | 2.00 | 2.00 | 2.00 (2 of 2) | 600 | 2.00x |" in text
    assert "| **all** |" in text and "the gate is 1.25x the best fixed length (4)" in text
    assert "off: 1.00 tokens per pass" in text


def test_one_category_has_no_table():
    out = io.StringIO()
    drafts.show(drafts.compare(plan(), [row for row in rows() if row["category"] == "maths"]), Console(file=out))
    assert out.getvalue() == ""


def test_marks_of_other_prompt_files():
    content = drafts.compare(plan(against=("off", "fixed-4")), rows())
    report = {
        "bench": "decode",
        "summary": {"umbra": {"tok_s": 400.0}, "umbra-off": {"tok_s": 200.0}},
        "ratio": {"umbra-off": 2.0},
        "machine": {"cpu": "A CPU", "cores": 2, "flags": [], "memory_gib": 8.0},
        "versions": {"jax": "0.10.2"},
        "settings": {"rounds": 1, "prompts": "/data/spec_bench_dev.jsonl", "limit": 240, "max_tokens": 128},
        "drafting": content,
    }
    made = readme.figures([report])
    assert made.keys() == {"decode:spec_bench_dev", "drafts:spec_bench_dev", "machine"}
    assert "Prompts: `spec_bench_dev.jsonl`, the first 240; 128 tokens each." in made["drafts:spec_bench_dev"]
    report["settings"]["prompts"] = str(DEFAULT)
    assert readme.figures([report]).keys() == {"decode", "drafts", "machine"}
