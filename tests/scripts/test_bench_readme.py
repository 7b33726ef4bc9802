"""README's figures come from reports."""

from __future__ import annotations

import json
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


def test_a_missing_mark_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    page, report = tmp_path / "README.md", tmp_path / "decode.json"
    page.write_text("nothing here\n")
    report.write_text(json.dumps(DECODE))
    monkeypatch.setattr(readme, "README", page)
    assert readme.main([str(report)]) == 1
    assert "no place marked 'decode'" in capsys.readouterr().err
    assert readme.main([]) == 2


def test_every_mark_of_the_readme_can_be_filled() -> None:
    text = readme.README.read_text()
    marks = {"machine", "start", "decode", "prefill", "batch", "serve", "tpu"}
    assert all(readme.replace(text, name, "x")[1] for name in marks)
