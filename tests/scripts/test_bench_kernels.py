"""The benchmarks of operations, passes and quality, the judgement of a run, and busy neighbours."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from umbra.configs.prompt_sets import DEFAULT, Prompt
from umbra.scripts.bench import cli, exact, expected, harness, kernels, kv, passes, peaks, quality, systems
from umbra.scripts.bench.busy import busy
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.processes import BenchError
from umbra.scripts.bench.systems.base import Scores

PEAKS = peaks.Peaks(read_bytes_s=20e9, int8_ops_s=400e9, float32_ops_s=200e9, how="made up")


def plan(bench: str, **changes: Any) -> Plan:
    values: dict[str, Any] = dict(
        bench=bench, model="smollm2", quant="auto", threads=2, mesh=None, draft="off", against=(), prompts=DEFAULT,
        limit=3, rounds=2,
    )  # fmt: skip
    return Plan(**{**values, **changes})


# ---- the judgement of a run

HERE = {"cpu": "AMD EPYC 7543", "instructions": "avx2", "cores": 2}


def test_a_run_with_a_slow_peer_is_void_and_says_why() -> None:
    summary = {"umbra": {"tok_s": 1.0}, "llama.cpp": {"tok_s": 91.0}, "transformers-bfloat16": {"tok_s": 23.0}}
    judged = expected.judge(plan("decode"), HERE, summary)
    assert judged["void"] == "llama.cpp made 91 tokens/s and is known to make 115 (0.79 of it)"
    assert judged["expected"]["machine"].startswith("2 cores of an AMD EPYC (Zen 3)")
    summary["llama.cpp"]["tok_s"] = 92.0
    assert expected.judge(plan("decode"), HERE, summary)["void"] is None


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({"model": "gemma3-270m"}, {}),
        ({"threads": 1}, {}),
        ({"bench": "prefill", "prompt_tokens": 512}, {}),
        ({}, {"cpu": "Intel(R) Xeon(R)"}),
        ({}, {"instructions": "avx512f"}),
        ({}, {"cores": 4}),
    ],
)
def test_a_run_that_no_figures_are_known_for_is_not_judged(changes: Any, machine: Any) -> None:
    judged = expected.judge(plan(**{"bench": "decode", **changes}), {**HERE, **machine}, {"llama.cpp": {"tok_s": 1.0}})
    assert judged["void"] is None and "not judged" in judged["expected"]


def test_figures_hold_for_one_kind_of_machine() -> None:
    slow = {"transformers-bfloat16": {"tok_s": 500.0, "decode_tok_s": 139.0}}
    zen4 = {**HERE, "instructions": "avx512_vnni"}
    assert expected.judge(plan("prefill", prompt_tokens=1024), HERE, slow)["void"] is None
    assert "known to make 890" in expected.judge(plan("prefill", prompt_tokens=1024), zen4, slow)["void"]
    assert "known to make 175" in expected.judge(plan("batch", sequences=16), zen4, slow)["void"]


# ---- busy neighbours


def test_busy_neighbours_run_beside_and_end() -> None:
    def children() -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.append(int(stat.parent.name))
        return found

    before = set(children())
    with busy(2):
        began = set(children()) - before
        assert len(began) == 2
        deadline = time.monotonic() + 5
        while any(b"while True" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in began):
            assert time.monotonic() < deadline
    assert not set(children()) & began


FAKES = """
from umbra.scripts.bench.systems.base import Run, Scores, Stream, System

class Fake(System):
    calls = 0
    def load(self, setup):
        self.setup = setup
        self.right = setup.quant == "none" or setup.quant == "auto"
        settings = {"context": 4096, "weights": setup.quant, "weight_bytes": 4e6, "embedding_bytes": 1e6,
                    "kv": setup.kv, "embedding": setup.embedding, "slots": setup.sequences}
        return {"versions": {"fake": "1"}, "settings": settings}
    def encode(self, texts):
        return [list(text.encode()) for text in texts]
    def gguf_file(self):
        return "/models/fake.gguf"
    def generate(self, prompts, max_tokens):
        # The warm-up, three prompts, and the same again beside a neighbour, at half the speed.
        gap = 0.001 if self.calls % 8 < 4 else 0.002
        self.calls += 1
        times = [0.1 + gap * i for i in range(max_tokens)]
        streams = [Stream(len(p), [sum(p) % 97 + i for i in range(max_tokens)], 0.1, 1, times[-1],
                          gaps=[gap] * (max_tokens - 1)) for p in prompts]
        return Run(streams, times[-1])
    def answers(self, prompts, max_tokens):
        return [[7] * max_tokens if len(p) > 40 else [] for p in prompts]
    def score(self, sequences, begins):
        return [self.one(len(ids) - begin) for ids, begin in zip(sequences, begins, strict=True)]
    def one(self, n):
        return Scores([7] * n, [-0.5] * n) if self.right else Scores([7] * (n - 1) + [8], [-0.6] * n)

    def fill(self, ids):
        self.filled = len(ids)
        return 200_000 * len(ids)
    def passes(self, ids, widths, repeats):
        return {"decode": [0.01] * repeats, **{str(w): [0.01 + 0.001 * (w - 1)] * repeats for w in widths}}
    def draft_seconds(self, ids, repeats):
        return [0.0004] * repeats
    def decode_at(self, ids, positions, repeats):
        assert positions[1] == self.filled == len(ids) - 1
        return [[0.01 + 1e-6 * position] * repeats for position in positions]

class Ops:
    factor = 1
    def load(self, setup):
        return {"versions": {"fake": "1"}, "settings": {"kernels": "fake"}}
    def cases(self, ops, rows, contexts):
        made = [{"op": op, "name": "x", "rows": r} for op in ops if op != "table" for r in rows]
        walk = {"op": "attention", "name": "table walk", "rows": 1, "context": 32767, "sequences": 1}
        walks = [{**walk, "layout": layout} for layout in ("pool", "contiguous")]
        return made + walks
    def begin(self, case):
        self.time = 1e-4 * case["rows"] * self.factor * (1.1 if case.get("layout") == "pool" else 1)
        return {"bytes": 1e6, "ops": 1e7 * case["rows"], "arithmetic": "int8"}
    def seconds(self):
        return self.time

class SlowOps(Ops):
    factor = 4

class Exact(Fake):
    def complete(self, sizes, prompts, max_tokens):
        ids = [[sum(p) % 97 + i for i in range(max_tokens)] for p in prompts]
        digests = [[token * 3 for token in made] for made in ids]
        if sizes["threads"] == 4:
            digests[1][-1] += 1
        if sizes["draft"] == "shadow":
            ids[0][-1] += 1
        passes = len(prompts) * max_tokens // (1 if sizes["draft"] == "off" else 2)
        return {"ids": ids, "digests": digests, "numerics": "made up", "passes": passes}
    def sources(self):
        return ["lookup", "shadow"]
    def read(self, widths, texts, begins):
        right = [[token * 3 for token in ids[begin:]] for ids, begin in zip(texts, begins, strict=True)]
        return {str(width): right if width != 17 else [[0, *made[1:]] for made in right] for width in widths}
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that need no model."""
    (tmp_path / "umbra_kernel_fakes.py").write_text(textwrap.dedent(FAKES))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for system in ("umbra", "umbra-xla", "llama.cpp"):
        monkeypatch.setitem(systems.ADAPTERS, system, "umbra_kernel_fakes:Fake")
    monkeypatch.setitem(systems.ADAPTERS, "kernels/umbra", "umbra_kernel_fakes:Ops")
    monkeypatch.setitem(systems.ADAPTERS, "kernels/umbra-xla", "umbra_kernel_fakes:SlowOps")
    monkeypatch.setitem(systems.ADAPTERS, "exact/umbra", "umbra_kernel_fakes:Exact")
    monkeypatch.setattr(passes, "measure_peaks", lambda threads: PEAKS)
    monkeypatch.setattr(kernels, "measure_peaks", lambda threads: PEAKS)


def test_decoding_beside_a_busy_process_is_told_apart(fakes: None) -> None:
    report = harness.run(plan("decode", busy=1, max_tokens=65, rounds=1), lambda text: None)
    ours = report["summary"]["umbra"]
    assert [row["busy"] for row in report["rows"]] == [0, 0, 0, 1, 1, 1]
    assert ours["tok_s"] == pytest.approx(1000), "disturbed rows do not count"
    assert ours["counted"] == 3
    assert (ours["between_p50_ms"], ours["busy_between_p99_ms"]) == (pytest.approx(1), pytest.approx(2))
    assert (ours["busy_p50_ratio"], ours["busy_p99_ratio"]) == (pytest.approx(2), pytest.approx(2))
    assert report["settings"]["busy"] == 1


def test_our_engine_without_kernels_is_a_peer_of_any_model(fakes: None) -> None:
    report = harness.run(plan("decode", model="tiny", against=("xla",), max_tokens=65), lambda text: None)
    assert set(report["summary"]) == {"umbra", "umbra-xla"}
    assert report["summary"]["umbra-xla"]["same_tokens"] == 65


# ---- passes


def test_passes_are_compared_with_plain_decoding_and_with_reading_kv(fakes: None) -> None:
    report = passes.run(plan("passes", widths=(1, 5, 32), prompt_tokens=2000, against=("xla",)), lambda text: None)
    ours = report["summary"]["umbra"]
    assert ours["tok_s"] == pytest.approx(100)
    assert ours["pass_5_over_1"] == pytest.approx(1.4) and ours["pass_32_over_1"] == pytest.approx(4.1)
    assert ours["context_added_ms"] == pytest.approx(1.872), "128 tokens are the short context"
    assert ours["context_read_ms"] == pytest.approx(20), "400 MB at 20 GB/s"
    assert ours["context_over_read"] == pytest.approx(0.0936)
    assert report["settings"]["systems"]["umbra"]["slots"] == 32
    assert len(report["rows"]) == 2 * 2 * 6
    assert ours["draft_4_ms"] == pytest.approx(0.4) and ours["draft_4_over_1"] == pytest.approx(0.04)
    json.dumps(report, allow_nan=False)


def test_a_context_that_does_not_fit_is_refused(fakes: None) -> None:
    with pytest.raises(BenchError, match="needs a context of 4097; that of smollm2 is 4096; use a smaller --context"):
        passes.run(plan("passes", widths=(1,), prompt_tokens=4096), lambda text: None)


# ---- quality


def test_quality_counts_agreement_and_perplexity_over_all_tokens() -> None:
    texts = ([Prompt("a", "chat", ("x",)), Prompt("b", "code", ("y",))], [[1, 2, 3, 4], [5, 6]], [2, 1])
    scores = [Scores([3, 9], [-0.25, -0.75]), Scores([6], [-2.0])]
    rows = quality._rows("umbra", texts, scores)
    assert [(row["tokens"], row["same_tokens"], row["nats"]) for row in rows] == [(2, 1, 1.0), (1, 1, 2.0)]
    summary = quality._summary(rows)
    assert summary["agreement"] == pytest.approx(200 / 3)
    assert summary["perplexity"] == pytest.approx(2.718281828)


def test_scores_are_of_logits_and_what_follows() -> None:
    import numpy as np

    scores = Scores()
    scores.add(np.log(np.array([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]], np.float32)) + 5, [2, 0])
    assert scores.top == [1, 0]
    assert scores.logprobs == pytest.approx([-1.2039728, -0.3566749])


def test_quality_of_every_form_and_peer_on_the_same_text(fakes: None) -> None:
    wanted = plan(
        "quality", limit=20, sequences=4, max_tokens=10, variants=("int8+kv=float32",), against=("llama.cpp",)
    )
    report = quality.run(wanted, lambda text: None)
    summary = report["summary"]
    assert list(summary) == ["umbra-float32", "umbra", "umbra-int8+kv=float32", "llama.cpp"]
    assert summary["umbra"]["agreement"] == 100 and summary["umbra"]["perplexity_change"] == 0
    int8 = summary["umbra-int8+kv=float32"]
    assert int8["agreement"] == pytest.approx(90) and int8["perplexity_change"] == pytest.approx(10.517, rel=1e-3)
    assert report["settings"]["systems"]["umbra-int8+kv=float32"]["kv"] == "float32"
    assert summary["umbra"]["weight_mb"] == 4
    assert report["ratio"]["umbra-int8+kv=float32"] == pytest.approx(1 / 0.9, rel=1e-5)
    assert all(row["tokens"] == 10 for row in report["rows"]), "prompts without an answer are left out"


def test_forms_are_read_from_text() -> None:
    assert quality.form("none") == ("none", "auto", "file")
    assert quality.form("auto+kv=int8+embedding=4096:int8,int4") == ("auto", "int8", "4096:int8,int4")
    with pytest.raises(ValueError, match="'int8:kv' is not understood|'int8\\+kv' is not understood"):
        quality.form("int8+kv")


# ---- exactness


def test_every_setting_that_changes_a_row_of_logits_is_named(fakes: None) -> None:
    report = exact.run(plan("exact", limit=3, max_tokens=4), lambda text: None)
    expected = "16 at once, chunks of 300, 4 threads; alone, drafting by shadow; passes of 17"
    assert report["differences"] == expected
    summary = report["summary"]["umbra"]
    assert (summary["requests"], summary["rows_of_logits"]) == (6, 24), "every prompt, greedy and seeded"
    assert summary["settings"] - summary["identical"] == 3
    per_pass = {row["category"]: row["tokens_per_pass"] for row in report["rows"]}
    assert per_pass["alone, again"] == 1.0 and per_pass["16 at once, drafting"] == 2.0
    row = next(row for row in report["rows"] if "4 threads" in row["category"])
    assert (row["same_ids"], row["answers"], row["same_logits"], row["logits"]) == (6, 6, 23, 24)
    assert report["settings"]["systems"]["umbra"]["numerics"] == "made up"


def test_drafting_alone_can_be_compared(fakes: None) -> None:
    report = exact.run(plan("exact", limit=3, max_tokens=4, drafting_only=True), lambda text: None)
    assert report["differences"] == "alone, drafting by shadow"
    assert all("drafting" in row["category"] for row in report["rows"]) and len(report["rows"]) == 5
    assert len(exact.drafting(["lookup"])) == 3, "a single source is all of them"


def test_an_answer_that_leaves_no_room_for_prompts_is_refused(fakes: None) -> None:
    with pytest.raises(BenchError, match="answers of 2048 tokens do not fit a context of 2048"):
        exact.run(plan("exact", max_tokens=2048), lambda text: None)


# ---- operations


def test_shares_are_of_the_larger_bound() -> None:
    row = {"us": 100.0, "bytes": 1e6, "ops": 1e7, "arithmetic": "int8"}
    assert kernels.shares(row, PEAKS) == {
        "bandwidth_share": 0.5, "arithmetic_share": 0.25, "bound": "memory", "share": 0.5
    }  # fmt: skip
    assert kernels.shares({**row, "arithmetic": "float32", "ops": 1.5e7}, PEAKS)["bound"] == "arithmetic"
    unknown = kernels.shares(row, dataclasses.replace(PEAKS, int8_ops_s=None))
    assert unknown["arithmetic_share"] is None and unknown["share"] == 0.5


def test_operations_are_compared_with_the_peaks_and_with_plain_jax(fakes: None, capsys: Any) -> None:
    wanted = plan("kernels", ops=("linear", "table"), widths=(1, 4), contexts=(128,), against=("xla",))
    report = kernels.run(wanted, lambda text: None)
    assert report["ratio"] == {"umbra-xla": pytest.approx(4)}
    assert report["summary"]["umbra"]["table_walk_over_contiguous"] == pytest.approx(1.1)
    assert report["summary"]["umbra"]["linear_share"] == pytest.approx((0.5 + 0.25) / 2)
    assert report["settings"]["systems"]["peaks"]["int8_ops_s"] == 400e9
    assert {row["id"] for row in report["rows"]} >= {"linear x, 1 row", "linear x, 4 rows"}
    kernels.show(report, cli.Console(width=200))
    shown = capsys.readouterr().out
    assert "4.00x" in shown and "50 %" in shown and "table walk over contiguous KV 1.10x" in shown
    json.dumps(report, allow_nan=False)


def test_the_probe_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "BYTES", 16 << 20)
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        measured = peaks.measure_peaks(2)
        assert measured.how.startswith("native probe") and measured.read_bytes_s > 1e8
    monkeypatch.setattr(peaks, "_build", lambda: None)
    plain = peaks.measure_peaks(1)
    assert plain.how.startswith("numpy") and plain.read_bytes_s > 1e8 and plain.int8_ops_s is None
    best = peaks.best([plain, dataclasses.replace(plain, read_bytes_s=1e15)])
    assert best.read_bytes_s == 1e15 and best.int8_ops_s is None


# ---- KV


def test_needles_are_lines_of_long_lists() -> None:
    made = kv.needles(5, 700)
    assert made == kv.needles(5, 700) and len({text for text, _, _ in made}) == 5
    for text, opening, value in made:
        assert text.count("The code of") == 50 and text.count(f"{opening}{value}.") == 1
        assert text.endswith(f"What is the code of the {opening.removeprefix('The code of the ').removesuffix(' is')}?")


def test_kv_is_compared_token_by_token() -> None:
    scores = {"float32": [Scores([1, 2, 3]), Scores([7, 8])], "umbra": [Scores([1, 5, 3]), Scores([7, 9])]}
    texts = [[1, 2, 4], [7, 8]]
    rows = [kv._row("umbra", i, 1, texts[i], scores) for i in range(2)]
    assert kv._summary(rows) == {"tokens": 3, "agreement": pytest.approx(200 / 3), "needles": 1, "found_percent": 0}
    rows = [kv._row("float32", i, 1, texts[i], scores) for i in range(2)]
    assert kv._summary(rows) == {"tokens": 3, "agreement": 100, "needles": 1, "found_percent": 100}


@pytest.mark.real
def test_kv_of_the_default_model(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    argv = ["kv", "--limit", "1", "--max-tokens", "8", "--needles", "2", "--list-tokens", "120", "--json", str(out)]
    assert cli.main(argv) == 0
    report = json.loads(out.read_text())
    assert report["summary"]["float32"]["agreement"] == 100 and len(report["rows"]) == 6


# ---- the command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["kernels", "--ops", "linear,convolution"], "no operation 'convolution'; supported: linear, embed"),
        (["kernels", "--against", "llama.cpp"], "kernels cannot compare with 'llama.cpp'; supported: xla"),
        (["kernels", "--mesh", "data=2"], "--mesh is not supported"),
        (["passes", "--widths", "1,x"], "whole number of at least 1, got 'x'"),
        (["quality", "--against", "transformers"], "supported: llama.cpp, llama.cpp-q4_0"),
        (["quality", "--variants", "int8+weights=3"], "'int8+weights=3' is not understood"),
        (["kv", "--kv", "int8"], "kv compares float32 with int8: --kv is not supported"),
        (["decode", "--busy", "-1"], "whole number of at least 1"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys: Any, argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error, error


def test_a_void_run_is_written_said_and_fails(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(expected, "judge", lambda *_: {"expected": {}, "void": "a peer was slow"})
    monkeypatch.setattr("umbra.scripts.bench.report.judge", expected.judge)
    out = tmp_path / "report.json"
    assert cli.main(["decode", "--limit", "1", "--max-tokens", "65", "--rounds", "1", "--json", str(out)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "bench.py: this run is void: a peer was slow"
    assert json.loads(out.read_text())["void"] == "a peer was slow"


# ---- with the real engine


@pytest.mark.parametrize(
    "argv",
    [
        ["passes", "--context", "300", "--widths", "1,5", "--rounds", "1"],
        ["quality", "--limit", "2", "--max-tokens", "40"],
        ["exact", "--limit", "2", "--max-tokens", "6"],
        ["kernels", "--ops", "head,sample", "--row-counts", "5", "--rounds", "1"],
    ],
    ids=lambda argv: argv[0],
)
def test_benchmarks_of_the_tiny_model(tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "BYTES", 8 << 20)
    out = tmp_path / "report.json"
    assert cli.main([*argv, "--model", "tiny", "--threads", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rows"] and report["machine"]["instructions"]
    if argv[0] == "quality":
        assert report["summary"]["umbra-float32"]["agreement"] == 100, "passes of 32 tokens give what decoding gave"
    elif argv[0] == "passes":
        assert report["summary"]["umbra"]["pass_5_over_1"] > 0
    elif argv[0] == "exact":
        assert report["differences"] is None and report["summary"]["umbra"]["settings"] >= 17
    else:
        assert all(row["us"] > 0 and row["share"] > 0 for row in report["rows"])
        assert {row["system"] for row in report["rows"]} == {"umbra", "umbra-xla"}
