"""The whole command on a random trunk: its files, resuming after being killed, several devices, wrong usage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from umbra.configs.models import NAMED
from umbra.configs.shadow import TrainingConfig
from umbra.model.shadow import load_shadow
from umbra.scripts import train_shadow

SMALL = [
    "--model", "tiny", "--kernels", "xla", "--prompts", "40", "--tokens", "1200", "--max-tokens", "24", "--unroll", "2",
    "--batch", "32", "--epochs", "4", "--vocab", "96", "--rank", "16", "--mlp", "16", "--streams", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [
        {"question_id": i, "category": "ours", "turns": [f"question number {i} about thing {i * i}"]} for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, questions) -> Path:
    """A run that nothing interrupted. In a process of its own: this one is split into several devices."""
    out = tmp_path_factory.mktemp("run")
    running = command(out, "--test", str(questions))
    told, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    assert "shadow.safetensors: 6,067 parameters" in told and "tokens per pass on held-out prompts: shadow" in told
    assert re.search("answers: 0 of 1,200", errors) and re.search("training, in steps: .* loss", errors)
    return out


def command(out: Path, *more: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "umbra.scripts.train_shadow", *SMALL, "--out", str(out), *more]
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_leaves_a_shadow_and_a_report(finished):
    names = {path.name for path in finished.iterdir()}
    plots = {"loss.png", "acceptance.png", "reliability.png", "tokens_per_pass.png"}
    assert names >= {"shadow.safetensors", "report.md", "report.json", *plots}
    for plot in plots:
        assert (finished / plot).read_bytes().startswith(b"\x89PNG")
    report = json.loads((finished / "report.json").read_text())
    assert report["trunk"] == "tiny" and report["tokens"]["training"] > 600
    assert set(report["held_out"]["per_length"]) == {"shadow", "lookup", "both"}
    assert report["outside"]["answers"] == {"all": 6, "ours": 6}
    shadow = load_shadow(finished / "shadow.safetensors", trunk=NAMED["tiny"], weights_id=report["weights_id"])
    assert (shadow.config.rank, shadow.config.mlp, shadow.config.vocab) == (16, 16, 96)
    assert shadow.config.temperatures == (0.0, *TrainingConfig.temperatures)
    text = (finished / "report.md").read_text()
    assert re.search(r"of the trunk's 143,808 \(more than 0.3%\)", text)
    assert "--model tiny" in text and "questions.jsonl" in text and str(finished) not in text


def test_a_run_goes_on_only_when_asked_to(finished, questions, capsys):
    options = [*SMALL, "--out", str(finished), "--test", str(questions)]
    with pytest.raises(SystemExit) as ended:
        train_shadow.main(options)
    assert ended.value.code == 2
    assert re.search("is not empty; add --resume to go on", capsys.readouterr().err)


def test_a_killed_run_gives_the_same_file(tmp_path, finished, questions):
    """Killed while it answers and while it trains."""
    out = tmp_path / "out"
    more = ["--test", str(questions)]
    for sign in ("answers/settings.json", "checkpoints/loss.jsonl"):
        running = command(out, *more)
        wait_for(out / sign, running)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        assert not (out / "shadow.safetensors").exists()
        more = [*more[:2], "--resume"]
    last = command(out, *more)
    _, errors = last.communicate(timeout=600)
    assert last.returncode == 0, errors
    assert (out / "shadow.safetensors").read_bytes() == (finished / "shadow.safetensors").read_bytes()


def wait_for(path: Path, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (path.exists() and path.stat().st_size):
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_eight_devices_give_the_same_within_rounding(tmp_path, finished, questions):
    """The answers are those of one device; training is spread over eight."""
    for name in ("material", "answers", "tests", "index.json", "trunk.npz"):
        (tmp_path / name).symlink_to(finished / name)
    index = json.loads((finished / "index.json").read_text())
    mesh = ["--mesh", "data=8", "--test", str(questions)]
    args = train_shadow.parser().parse_args([*SMALL, "--out", str(tmp_path), *mesh])
    config = TrainingConfig(**{name: getattr(args, name) for name in train_shadow.OF_TRAINING})
    prompts = {name: train_shadow._load(getattr(args, name)) for name in ("data", "test")}
    index["about"]["asked"] = train_shadow._fingerprint(args, config, prompts, [])
    (tmp_path / "index.json").unlink()
    (tmp_path / "index.json").write_text(json.dumps(index))
    running = command(tmp_path, *mesh, "--resume")
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    one, many = (safetensors.numpy.load_file(folder / "shadow.safetensors") for folder in (finished, tmp_path))
    for name in one:
        if name not in ("conf", "conf_bias", "gate", "lookup"):
            np.testing.assert_allclose(many[name], one[name], atol=4e-3, err_msg=name)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "/nowhere.jsonl"], "cannot read the prompt file /nowhere.jsonl"),
        (["--test", "{bad}"], "bad.jsonl, line 2: turns must be a list"),
        (["--out", "{bad}"], "bad.jsonl is a file; give a folder"),
        (["--epochs", "0"], "epochs must be above 0"),
        (["--unroll", "9"], "unroll must be between 1 and 8"),
        (["--batch", "x"], "whole number of at least 1, got 'x'"),
        (["--level", "high"], "unrecognized arguments: --level"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path, capsys, argv, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 2, "turns": []}\n')
    with pytest.raises(SystemExit) as ended:
        train_shadow.main([*SMALL, "--out", str(tmp_path / "o"), *(a.format(bad=bad) for a in argv)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error), error
    assert not (tmp_path / "o").exists()


def test_failures_are_one_line_and_status_1(tmp_path, capsys, monkeypatch):
    assert train_shadow.main([*SMALL, "--model", "smollm9", "--out", str(tmp_path / "o")]) == 1
    assert "no model is called 'smollm9'" in capsys.readouterr().err.splitlines()[-1]

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_shadow, "run", interrupted)
    assert train_shadow.main([*SMALL, "--out", str(tmp_path / "p")]) == 1
    assert "run it again with --resume" in capsys.readouterr().err


def test_after_native_kernels_the_process_starts_again_for_training(monkeypatch, tmp_path):
    """XLA's threads are fixed once it has started: with one of them, a new process trains."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    args = train_shadow.parser().parse_args(["--out", str(tmp_path), "--threads", "2"])
    monkeypatch.setenv("NPROC", "2")
    train_shadow.restart_for_training(args, ["--out", "x"])
    assert not started
    monkeypatch.setenv("NPROC", "1")
    train_shadow.restart_for_training(args, ["--out", "x"])
    ((_, argv, environment),) = started
    assert argv[-3:] == ["--out", "x", "--resume"] and "NPROC" not in environment
