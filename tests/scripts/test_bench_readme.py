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
}


def test_fills_marks_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, report = tmp_path / "README.md", tmp_path / "decode.json"
    page.write_text("a <!-- measured: decode --><!-- end --> b\n<!-- measured: machine -->old<!-- end -->\n")
    report.write_text(json.dumps(DECODE))
    monkeypatch.setattr(readme, "README", page)
    for _ in range(2):
        assert readme.main([str(report)]) == 0
        assert page.read_text() == (
            "a <!-- measured: decode -->**13.7 tokens/s**; llama.cpp 115 (ours is 0.12x)<!-- end --> b\n"
            "<!-- measured: machine -->A CPU, 2 cores, avx2, 24 GiB; jax 0.10.2. Medians, systems taking turns."
            "<!-- end -->\n"
        )


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
