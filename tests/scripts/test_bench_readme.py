"""README's figures come from reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from umbra.scripts.bench import readme

DECODE = {
    "bench": "decode",
    "summary": {"umbra": {"tok_s": 13.69}, "llama.cpp": {"tok_s": 114.6}},
    "ratio": {"llama.cpp": 0.1195},
    "machine": {"cpu": "A CPU", "cores": 2, "flags": ["avx2"], "memory_gib": 23.5},
    "versions": {"jax": "0.10.2"},
    "settings": {"rounds": 3},
}
SERVE = {
    **DECODE,
    "bench": "serve",
    "versions": {"jax": "0.10.2", "llama-cpp-python": "0.3.36"},
    "settings": {"rounds": 1},
    "summary": {
        "umbra": {
            **{f"ttft{p}_ms": 1234.5 for p in ("", "_p90", "_p99")},
            **{f"between{p}_ms": None for p in ("", "_p90", "_p99")},
            "requests_s": 0.5,
            "errors": 2,
            "first_start_s": 9.0,
            "second_start_s": 4.0,
        }
    },
}


def test_fills_marks_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, report = tmp_path / "README.md", tmp_path / "decode.json"
    page.write_text("a <!-- measured: decode --><!-- end --> b\n<!-- measured: machine -->old<!-- end -->\n")
    report.write_text(json.dumps(DECODE))
    monkeypatch.setattr(readme, "README", page)
    for _ in range(2):
        assert readme.main([str(report)]) == 0
        assert page.read_text() == (
            "a <!-- measured: decode -->**13.7 tokens/s**; llama.cpp 115 (ours is 0.12x); "
            "medians of 3 rounds, systems taking turns<!-- end --> b\n"
            "<!-- measured: machine -->A CPU, 2 cores, avx2, 24 GiB; jax 0.10.2.<!-- end -->\n"
        )


def test_several_reports() -> None:
    made = readme.figures([DECODE, SERVE])
    assert made["machine"] == "A CPU, 2 cores, avx2, 24 GiB; jax 0.10.2, llama-cpp-python 0.3.36."
    assert made["start"] == "**4.0 s** (the first, with nothing compiled: 9.0 s)"
    assert made["serve"] == (
        "umbra: first token 1,234 / 1,234 / 1,234 ms (p50 / p90 / p99), between tokens - / - / - ms, "
        "0.50 requests/s, 2 errors; one round"
    )


def test_one_start() -> None:
    assert readme.start({"summary": {"umbra": {"start_s": 5.25}}}).startswith("**5.2 s** (one start")


def test_tpu_programs_by_the_number_of_sequences() -> None:
    def row(kind: str, sequences: int, **more: object) -> dict[str, object]:
        figures = {"bytes_ratio": 1.04, "bound_s": 0.008, "predicted_tok_s_chip": 1000.0}
        return {"kind": kind, "sequences": sequences, **figures, **more}

    accepted = [{"tokens_per_pass": 1.0, "tok_s_chip": 900.0}, {"tokens_per_pass": 5.0, "tok_s_chip": 4500.0}]
    report = {
        "model": "llama-3.1-8b", "topology": "v5e:2x2", "mesh": {"data": 1, "model": 4},
        "settings": {"quant": "int8", "decode_steps": 8},
        "programs": [
            row("prefill", 8), row("decode", 8), row("verify", 8, accepted=accepted), row("draft", 8),
            row("decode_n", 8, bytes_ratio=0.98), row("decode", 1),
        ],
    }  # fmt: skip
    assert readme.figures([report])["tpu"].splitlines()[3:] == [
        "| llama-3.1-8b int8, v5e:2x2, data 1, model 4 | 1 | 1.04x, 8.00 ms | - | - | 1,000 / - |",
        "| llama-3.1-8b int8, v5e:2x2, data 1, model 4 | 8 | 1.04x, 8.00 ms | 0.98x, 1.00 ms | 1.04x, 8.00 ms "
        "| 1,000 / 4,500 |",
    ]
    report["settings"] = {"quant": "none", "decode_steps": 8, "context": 44000}
    line = readme.figures([report])["tpu"].splitlines()[3]
    assert line.startswith("| llama-3.1-8b, 44,000 tokens of context, v5e:2x2, data 1, model 4 | 1 |")


def test_a_missing_mark_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    page, report = tmp_path / "README.md", tmp_path / "decode.json"
    page.write_text("nothing here\n")
    report.write_text(json.dumps(DECODE))
    monkeypatch.setattr(readme, "README", page)
    assert readme.main([str(report)]) == 1
    assert "no place marked 'decode'" in capsys.readouterr().err
    assert readme.main([]) == 2


def test_every_mark_of_the_readme_can_be_filled() -> None:
    marks = set(re.findall(r"<!-- measured: (\S+) -->", readme.README.read_text()))
    more = {mark for marks_of_bench in readme.ALSO.values() for mark in marks_of_bench}
    assert marks >= {"machine", "start", "decode", "prefill", "batch", "serve", "tpu"}
    kinds = {mark.partition(":")[0] for mark in marks if not mark.startswith("batch")}
    assert kinds <= {"machine", "tpu", *readme.RENDER, *more}


def test_a_void_report_is_refused(tmp_path: Path, capsys) -> None:
    report = tmp_path / "decode.json"
    report.write_text(json.dumps({**DECODE, "void": "llama.cpp was slow"}))
    assert readme.main([str(report)]) == 1
    assert "is of a run that is not as it should be: llama.cpp was slow" in capsys.readouterr().err


def test_busy_neighbours_have_a_mark_of_their_own() -> None:
    quiet_and_busy = {
        "between_p50_ms": 4.0, "between_p99_ms": 5.0, "busy_between_p50_ms": 6.0, "busy_between_p99_ms": 20.0,
        "busy_p50_ratio": 1.5, "busy_p99_ratio": 4.0,
    }  # fmt: skip
    report = {**DECODE, "summary": {"umbra": {"tok_s": 250.0, **quiet_and_busy}}, "ratio": {}}
    made = readme.figures([report])
    assert made["busy"] == "umbra: p50 4.0 to 6.0 ms (1.50x), p99 5.0 to 20.0 ms (4.00x); medians of 3 rounds"
    assert "busy" not in readme.figures([DECODE])


def test_streams_tell_decoding_apart_and_are_marked_by_their_number() -> None:
    report = {
        **DECODE,
        "bench": "batch",
        "settings": {"rounds": 1, "sequences": 16},
        "summary": {"umbra": {"tok_s": 600.0, "decode_tok_s": 800.0}, "llama.cpp": {"tok_s": 60, "decode_tok_s": 80.0}},
        "ratio": {"llama.cpp": 10.0},
        "ratios": {"decode_tok_s": {"llama.cpp": 10.0}},
    }
    assert readme.figures([report])["batch16"] == (
        "prompts included: **600.0 tokens/s**; llama.cpp 60 (ours is 10.00x); one round. "
        "While all decode: **800 tokens/s**; llama.cpp 80 (ours is 10.00x)"
    )


def test_decode_shows_the_rate_up_to_the_answers_ends_where_it_differs() -> None:
    report = {
        **DECODE,
        "summary": {"umbra": {"tok_s": 400.0, "answer_tok_s": 900.0}, "llama.cpp": {"tok_s": 80, "answer_tok_s": 90.0}},
        "ratio": {"llama.cpp": 5.0},
        "ratios": {"answer_tok_s": {"llama.cpp": 10.0}},
    }
    alone = "**400.0 tokens/s**; llama.cpp 80 (ours is 5.00x); medians of 3 rounds, systems taking turns"
    both = f"{alone}. Up to the answers' ends: **900 tokens/s**; llama.cpp 90 (ours is 10.00x)"
    assert readme.figures([report])["decode"] == both
    report["summary"]["umbra"]["answer_tok_s"] = 420.0
    assert readme.figures([report])["decode"] == alone


PEAKS = {"read_bytes_s": 25e9, "int8_ops_s": 370e9, "float32_ops_s": None, "how": "by a probe"}


def test_passes_and_context() -> None:
    ours = {
        "plain_ms": 4.0, "pass_1_over_1": 1.0, "pass_5_over_1": 1.4, "context_added_ms": 4.2, "context_read_ms": 3.5,
        "context_over_read": 1.2,
    }  # fmt: skip
    report = {
        **DECODE,
        "bench": "passes",
        "settings": {"rounds": 3, "widths": [1, 5], "prompt_tokens": 8000, "systems": {"peaks": PEAKS}},
        "summary": {"umbra": ours},
    }
    made = readme.figures([report])
    assert made["passes"] == "4.00 ms for one token; of 1: 1.00x, 5: 1.40x; medians of 3 rounds"
    assert made["context"].startswith(
        "4.20 ms for 8,000 tokens, 1.20x the 3.50 ms that reading their KV takes at the 25"
    )


def test_operations_are_a_table() -> None:
    row = {"id": "linear o, 1 row", "us": 20.0, "bytes_s": 10e9, "ops_s": 30e9, "share": 0.4, "bound": "memory"}
    report = {
        **DECODE,
        "bench": "kernels",
        "settings": {"rounds": 3, "systems": {"peaks": PEAKS}},
        "summary": {"umbra": {"table_walk_over_contiguous": 1.1}, "umbra-xla": {}},
        "rows": [{"system": "umbra", **row}, {"system": "umbra-xla", **row, "us": 80.0}],
    }
    made = readme.figures([report])
    assert made["kernels"].startswith("\nPeaks: 25 GB/s, 370 Gop/s int8 (by a probe).\n\n| operation | time |")
    assert "| linear o, 1 row | 20.0 us | 10.0 | 30.0 | 40 % (memory) | 80 us, 4.0x |" in made["kernels"]
    assert made["walk"] == "1.10x"


def test_quality_and_embeddings_are_tables() -> None:
    def entry(agreement: float, change: float, megabytes: float) -> dict:
        return {
            "agreement": agreement, "perplexity": 1.7, "perplexity_change": change, "tokens": 3000,
            "weight_mb": 96.0, "embedding_mb": megabytes,
        }  # fmt: skip

    split = "umbra-auto+embedding=4096:int8,int4"
    names = {"umbra-float32": entry(100, 0, 113), "umbra": entry(98.1, 0.3, 30), split: entry(97.9, 0.5, 19)}
    report = {
        **DECODE,
        "bench": "quality",
        "settings": {"systems": {name: {"weights": "w"} for name in names}},
        "summary": names,
    }
    made = readme.figures([report])
    assert "| umbra | 98.1 % | 1.7000 (+0.30 %) | w, 96 MB |" in made["quality"]
    assert "4096" not in made["quality"] and "3,000 tokens" in made["quality"]
    assert "| 4096:int8,int4 | 97.9 % | 1.7000 (+0.50 %) | 19.0 | 11.0 |" in made["embedding"]


def served(bench: str, summary: dict, **more: object) -> dict:
    return {**DECODE, "bench": bench, "model": "smollm2", "ratio": {}, "summary": summary, **more}


def test_scenarios_of_the_server() -> None:
    def at(clients: int) -> dict[str, float]:
        first = {f"ttft{p}_ms@{clients}": 10.0 * clients for p in ("", "_p90", "_p95", "_p99")}
        between = {f"between{p}_ms@{clients}": 7.0 for p in ("", "_p90", "_p99")}
        return {**first, **between, f"requests_s@{clients}": 1.5, f"tok_s@{clients}": 321.4}

    ours = {**at(1), **at(100), "errors": 0.0, "tok_s": 321.4}
    settings = {"rounds": 1, "scenario": "concurrent", "clients": [1, 100]}
    made = readme.figures([served("serve", {"umbra": ours}, settings=settings)])
    assert made["serve:concurrent"].splitlines()[-1] == (
        "| 100 | umbra | 1,000 / 1,000 / 1,000 / 1,000 ms | 7 / 7 / 7 ms | 1.50 | 321 | 0 |"
    )
    assert "start" not in made
    summary = {"umbra": {"ttft_ms@5": 20.0, "ttft_ms@20": 22.5, "flat": 1.125}, "llama.cpp": {"ttft_ms@5": 40.0,
               "ttft_ms@20": 41.0}}  # fmt: skip
    made = readme.figures([served("serve", summary, settings={"rounds": 1, "scenario": "questions"})])
    assert made["serve:questions"] == (
        "umbra: 20.0 / 22.5 ms; llama.cpp: 40.0 / 41.0 ms for 5 / 20 words; of umbra the slowest length is 1.12x the "
        "fastest"
    )
    summary = {"umbra": {"tok_s@1": 97.0, "tok_s@32": 460.0, "ttft_more_ms": 2.25}, "engine": {"tok_s@1": 100.0,
               "tok_s@32": 500.0}}  # fmt: skip
    settings = {"rounds": 1, "scenario": "overhead", "clients": [1, 32]}
    made = readme.figures([served("serve", summary, settings=settings)])
    assert made["serve:overhead"] == "tokens/s with 1 streams 0.97x, 32 streams 0.92x; first token +2.2 ms"
    settings = {"rounds": 1, "scenario": "events", "rate": 4000}
    made = readme.figures([served("serve", {"umbra": {"tok_s": 3900.0}}, settings=settings)])
    assert made["serve:events"] == "**3,900 tokens/s** to one client of a source of 4,000"


def test_kv_in_int8() -> None:
    small, whole = {"tokens": 3000, "agreement": 99.123, "needles": 100, "found_percent": 61.0}, {"found_percent": 62.0}
    settings = {"rounds": 1, "prompt_tokens": 2000}
    made = readme.figures([served("kv", {"float32": whole, "umbra": small}, settings=settings)])
    assert made["kv"] == (
        "**99.12 %** of 3,000 tokens are those chosen with float32; of 100 lines in lists of 2,000 tokens 61.0 % "
        "are found, 62.0 % with float32"
    )
    few = {**small, "needles": 1}
    made = readme.figures([served("kv", {"float32": whole, "umbra": few}, settings={**settings, "quant": "none"})])
    assert made["kv:none"] == "**99.12 %** of 3,000 tokens are those chosen with float32"


def test_the_cache_and_forms() -> None:
    summary = {"umbra": {}, "disk": {"ttft_ms": 250.4, "over_uncached_ms": 120.0, "faster_than_recompute": 44.44}}
    made = readme.figures([served("resume", summary, settings={"rounds": 3, "prompt_tokens": 8000})])
    assert made["resume"].splitlines()[1:] == [
        "| 8,000 tokens from | first token | over the uncached part alone | faster than recomputing |",
        "|---|---|---|---|",
        "| disk | 250 ms | +120 ms | 44.4x |",
    ]
    long = {
        "tokens": 1_000_000, "store_disk_bytes": 11.9e9, "store_seconds": 32.4, "ready_s": 2.57, "recall_list_ms": 13.6,
        "recall_match_ms": 70.2, "recall_seconds": 14.2, "store_peak_bytes": 33e6, "recall_peak_bytes": 213e6,
        "allowed_bytes": 403e6,
    }  # fmt: skip
    assert readme.figures([served("capacity", {"umbra": long})])["capacity"] == (
        "1,000,000 tokens, 11.9 GB: stored in 32 s; after kill -9 the engine starts in 2.6 s, lists it in 14 ms, finds "
        "it in 70 ms and has it read back in **14.2 s**; memory grew by 33 and 213 MB (allowed: 403)"
    )
    summary = {"umbra": {"requests": 1000, "cancelled": 210, "differing": 0}}
    assert readme.figures([served("soak", summary)])["soak"].startswith("1,000 requests, 210 of them cancelled: 0 ")
    assert "soak:tiny" in readme.figures([{**served("soak", summary), "model": "tiny"}])
    summary = {"umbra": {"worst_error": 0.2}, "hits lru2": {"at_5000": 0.164}, "hits s3fifo": {"at_20000": 0.298}}
    assert readme.figures([served("simulate", summary)])["simulate"] == (
        "off by at most 20 % on this machine; hit ratio on the trace: device tier 0.164 at 5,000 blocks, memory tier "
        "0.298 at 20,000 blocks"
    )
    summary = {"umbra": {"valid": 1.0, "rows": 300, "tok_s": 200.0}}
    made = readme.figures([{**served("schema", summary), "ratio": {"umbra-free": 0.85}}])
    assert made["schema"] == "100 % of 300 valid; 200 tokens/s, 0.85x free text"
