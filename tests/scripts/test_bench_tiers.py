"""The benchmarks of the context cache on the tiny trunk, and the parts that need no engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from umbra.cache.simulator import TierProfile, fitted
from umbra.configs.prompt_sets import DEFAULT
from umbra.scripts.bench import capacity, cli, context, kernels, resume, simulate, soak, tiers
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.processes import BenchError
from umbra.scripts.bench.systems.timed import cases


def plan(bench: str, folder: Path, **changes) -> Plan:
    values = dict(
        bench=bench, model="tiny", quant="auto", threads=1, mesh=None, draft="off", against=(), prompts=DEFAULT,
        limit=12, rounds=1, sequences=4, max_tokens=40, folder=folder,
    )  # fmt: skip
    return Plan(**{**values, **changes})


def test_a_soak_finds_nothing(tmp_path: Path) -> None:
    content = soak.run(plan("soak", tmp_path), lambda text: None)
    summary = content["summary"]["umbra"]
    assert summary["requests"] == 12 and summary["differing"] == summary["leases_left"] == summary["blocks_lost"] == 0
    assert content["differences"] is None and summary["disk_written_bytes"] > 0
    assert not list(tmp_path.iterdir()), "temporary folders are gone"
    json.dumps(content)


def test_a_soak_tells_of_other_ids() -> None:
    stats = {"engine": {"preemptions": 0}, "tiers": {"disk": {"hit_tokens": 5}}}
    alone = {"answers": [[1] * soak.ANSWER, [2] * soak.ANSWER]}
    ours = {"answers": [[1] * 3, [2] * 3], "stats": stats}
    row = soak._row(0, [[1], [2, 3]], alone, ours, [0.1, 0.0])
    assert row["differing"] == 1 and row["cancelled"] == 1 and row["prompt_tokens"] == 3
    with pytest.raises(BenchError, match="without tiers"):
        soak._row(0, [[1]], {"answers": [[1]]}, ours, [0.0])


def test_prompts_of_a_soak_share_beginnings() -> None:
    texts = soak._Texts(random.Random(0), 500)
    prompts = []
    for _ in range(60):
        prompts.append(texts.prompt())
        texts.answered(prompts[-1], [7] * 16)
    assert all(len(prompt) <= soak.CONTEXT - soak.ANSWER for prompt in prompts)
    assert len({tuple(prompt[:50]) for prompt in prompts}) <= 40
    assert any(prompt[: len(other) + 16] == [*other, *[7] * 16] for other in prompts for prompt in prompts)


def test_a_resumed_conversation_on_every_way(tmp_path: Path) -> None:
    content = resume.run(plan("resume", tmp_path, prompt_tokens=300, new_tokens=8), lambda text: None)
    rows = {row["system"]: row for row in content["rows"]}
    assert list(rows) == list(resume.WAYS) and content["differences"] is None
    assert rows["recompute"]["cached_tokens"] == 0
    assert rows["memory"]["cached_by_tier"] == {"memory": 300}
    for way in ("disk, in the page cache", "disk", "disk, after kill -9"):
        assert rows[way]["cached_by_tier"] == {"disk": 300}, way
    assert all(row["same_ids"] and row["ttft_ms"] > 0 for row in content["rows"])
    assert content["summary"]["disk"]["faster_than_recompute"] > 0


def test_a_conversation_beyond_memory_comes_back(tmp_path: Path) -> None:
    content = capacity.run(plan("capacity", tmp_path, prompt_tokens=3000), lambda text: None)
    made = content["summary"]["umbra"]
    assert content["differences"] is None and made["recall_tokens"] == 2944 and made["recall_blocks"] == 23
    assert made["store_disk_bytes"] > 0 and not list(tmp_path.iterdir())


def test_too_long_a_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="more than the context of tiny, 2048"):
        resume.run(plan("resume", tmp_path, prompt_tokens=4000, new_tokens=8), lambda text: None)


def test_summary_of_reads_and_writes() -> None:
    rows = [
        {"system": "umbra", "id": "page cache", "category": "read", "p50_ms": 1.0, "p95_ms": 2.0},
        {"system": "pread", "id": "page cache", "category": "read", "p50_ms": 0.5, "p95_ms": 0.6},
        *(
            {
                "system": "umbra",
                "id": name,
                "category": "write",
                "streams": 1,
                "tiers": name,
                "tok_s": rate,
                "upkeep_ms": 0.01,
            }
            for name, rate in (("off", 100.0), ("on", 98.0), ("on", 99.0), ("off", 100.0))
        ),
    ]
    stats = {
        "tiers": {"disk": {"written_bytes": 10}}, "write_amplification": 1.0, "seal_lag_p95": 0.1, "writes": {},
    }  # fmt: skip
    reads, writes = tiers._read_summary(rows), tiers._write_summary(rows, stats)
    assert reads["read_page_cache_p95_ms"] == 2.0 and reads["plain_read_page_cache_p50_ms"] == 0.5
    assert writes["write_cost_of_1"] == pytest.approx(0.015) and writes["upkeep_of_1_ms"] == 0.01


def test_the_simulator_is_judged_by_what_it_was_not_fitted_to(tmp_path: Path) -> None:
    device = TierProfile("device", 1e9, 0.0, 20e9)
    below = (TierProfile("memory", 1e9, 0.001, 1e9), TierProfile("disk", 1e9, 0.002, 5e8))
    prefills = [(0, 128, 0.128), (0, 512, 0.512), (512, 512, 0.512)]
    profile = fitted("here", prefills, step=0.01, kv_bytes=1000.0, tiers=(device, *below), slots=2)
    made = plan("simulate", Path(), histories=(256, 512, 1024))
    told = {("disk", n): simulate.resume_seconds(profile, n, simulate.NEW, 2) for n in made.histories}
    measured = {"resumed": told | {("disk", 512): 2 * told["disk", 512]}, "prefills": {(0, 128): 0.128}}
    rows = simulate._checked(made, measured, profile)
    assert [row["category"] for row in rows] == ["fit", "check", "fit", "fit"]
    assert max(row["error"] for row in rows if not row["fitted"]) == pytest.approx(0.5)
    times = simulate._resume_times(profile, made.histories)
    assert times["disk_1024_ms"] < times["recompute_1024_ms"]
    simulate._draw_resumed(tmp_path, made.histories, profile)
    simulate._draw(tmp_path, {"lru": [0.1] * len(simulate.CAPACITIES)}, 0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"hits.png", "resume.png"}


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["resume", "--history", "500", "--rounds", "2"], {"prompt_tokens": 500, "new_tokens": 32, "rounds": 2}),
        (["capacity", "--history", "900"], {"prompt_tokens": 900, "rounds": 1}),
        (["soak", "--limit", "9", "--seed", "4"], {"limit": 9, "sequences": 16, "seed": 4, "rounds": 1}),
        (["cache", "--blocks", "7"], {"limit": 7, "sequences": 8}),
        (["simulate", "--histories", "256,512"], {"histories": (256, 512), "against": ()}),
        (["context", "--contexts", "64"], {"contexts": (64,), "against": ("xla",)}),
    ],
)
def test_options(argv: list[str], values: dict[str, object]) -> None:
    made = cli.plan_of(cli.parser().parse_args(argv))
    assert {name: getattr(made, name) for name in values} == values
    assert set(made.settings()) >= set(values) - {"rounds", "against"}


def test_context_attends_through_a_table_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = cases(("walk",), (1,), (128, 256))
    assert [(case["context"], case["layout"]) for case in made] == [
        (128, "pool"), (128, "contiguous"), (256, "pool"), (256, "contiguous"),
    ]  # fmt: skip
    facts = {"share": 0.5, "system": "umbra"}
    times = (3.0, 2.0, 5.0, 4.0)
    rows = [{**case, **facts, "category": "attention", "us": us} for case, us in zip(made, times, strict=True)]
    content = {"rows": rows, "summary": {"umbra": kernels._summary(rows)}}
    monkeypatch.setattr(kernels, "run", lambda plan, say: content)
    summary = context.run(plan("context", tmp_path), lambda text: None)["summary"]["umbra"]
    assert summary["table_walk_over_contiguous_at_256"] == 1.25 and summary["us_at_128"] == 3.0
    assert summary["time_growth_over_length_growth"] == pytest.approx(5 / 6)
