"""Offline generation: the run over many prompts, the output file, and the script with the tiny model."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from umbra.configs.prompt_sets import DEFAULT, Prompt, load_prompts
from umbra.scripts import generate
from umbra.scripts.resumable import ResumableRows
from umbra.serving.effort import Prepared
from umbra.serving.engine.request import Emission, PromptTooLong, SamplingParams, Timings, Usage
from umbra.serving.offline import OfflineRun, answer_row

KEYS = ["id", "category", "text", "token_ids", "finish_reason", "usage"]
KEYS += ["tokens_per_pass", "shadow_share", "ttft_ms", "tok_s"]


class FakeEngine:
    """Answers with the prompt's length, in two emissions, the newest request first when `slots` are taken."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running: list[tuple[str, list[int], object]] = []
        self.most = 0
        self.cancelled: list[str] = []
        self.seen: list[list[int]] = []

    def submit(self, prompt_ids, params, *, sink):
        if len(prompt_ids) > 50:
            raise PromptTooLong(len(prompt_ids), 51)
        name = f"r{len(self.seen)}"
        self.seen.append(list(prompt_ids))
        self.running.append((name, list(prompt_ids), sink))
        self.most = max(self.most, len(self.running))
        threading.Timer(0.005 if len(self.running) >= self.slots else 0.05, self.finish).start()
        return name

    def finish(self):
        if not self.running:
            return
        name, ids, sink = self.running.pop()
        n = len(ids)
        sink([(name, Emission(text=f"<{n}", token_ids=(n,), digests=(1,)))])
        usage, timings = Usage(n, 3, cached_tokens=1), Timings(0.0, 0.25, 1.25, 1.0, passes=2)
        sink([(name, Emission(">", (n + 1, n + 2), (), (2, 3), "max_tokens", usage, timings))])

    def cancel(self, request_id):
        self.cancelled.append(request_id)


def prepare(messages):
    return Prepared([len(message["content"]) for message in messages], SamplingParams())


def prompts(*turns: tuple[str, ...]) -> list[Prompt]:
    return [Prompt(f"p{i}", "c", each) for i, each in enumerate(turns)]


def test_as_many_requests_are_in_flight_as_asked_for_and_each_prompt_is_answered_once():
    engine = FakeEngine(3)
    found = dict(OfflineRun(engine, prepare, prompts(*[("x",)] * 10), in_flight=3))
    assert sorted(found) == list(range(10))
    assert engine.most == 3
    row = answer_row(prompts(("x",))[0], found[0], all_turns=False, digest=True)
    assert list(row) == [*KEYS, "digest"]
    assert (row["text"], row["token_ids"], row["digest"]) == ("<1>", [1, 2, 3], [1, 2, 3])
    assert row["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "thought_tokens": 0, "cached_tokens": 1}
    assert (row["tokens_per_pass"], row["shadow_share"]) == (1.5, pytest.approx(1 / 3, abs=1e-4))
    assert (row["ttft_ms"], row["tok_s"]) == (250.0, 2.0)


def test_all_turns_carry_the_answers_on():
    engine = FakeEngine(1)
    set_ = prompts(("one", "three"), ("four",))
    found = dict(OfflineRun(engine, prepare, set_, in_flight=1, all_turns=True))
    assert engine.seen == [[3], [3, 3, 5], [4]], "user, answer <1>, user"
    row = answer_row(set_[0], found[0], all_turns=True, digest=False)
    assert [turn["text"] for turn in row["turns"]] == ["<1>", "<3>"]
    assert row["text"] == "<1>\n\n<3>"
    assert row["usage"]["completion_tokens"] == 6
    assert row["token_ids"] == [1, 2, 3, 3, 4, 5]
    assert (row["tokens_per_pass"], row["tok_s"]) == (1.5, 2.0)


def test_a_refused_prompt_is_a_row_with_an_error_and_does_not_stop_the_others():
    engine = FakeEngine(1)
    run = OfflineRun(
        engine,
        lambda messages: Prepared([0] * len(messages[0]["content"]), SamplingParams()),
        prompts(("x" * 99,), ("y",)),
    )
    found = dict(run)
    row = answer_row(prompts(("x",))[0], found[0], all_turns=False, digest=False)
    assert row["finish_reason"] == "error" and "99 tokens" in row["error"]
    assert row["usage"]["prompt_tokens"] == 99 and row["ttft_ms"] is None and row["tok_s"] is None
    assert found[1][0].error is None
    assert run.tokens == 3


def test_leaving_early_cancels_what_is_running():
    engine = FakeEngine(4)
    for _ in OfflineRun(engine, prepare, prompts(*[("x",)] * 8), in_flight=4):
        break
    assert engine.cancelled


# ---- the output file


def test_rows_are_written_in_order_and_the_partial_file_goes(tmp_path):
    out = tmp_path / "o.jsonl"
    with ResumableRows(out, {"a": 1}) as rows:
        rows.add(1, {"id": "b"})
        rows.add(0, {"id": "ä"})
        assert not out.exists()
        rows.finish()
    assert out.read_text(encoding="utf-8") == '{"id": "ä"}\n{"id": "b"}\n'
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_file_is_taken_up_even_when_its_last_line_is_cut(tmp_path):
    out = tmp_path / "o.jsonl"
    with ResumableRows(out, {"a": 1}) as rows:
        rows.add(0, {"id": "x"})
        rows.add(1, {"id": "y"})
    rows.partial.write_text(rows.partial.read_text()[:-4])
    with ResumableRows(out, {"a": 1}) as rows:
        assert rows.done == {0: {"id": "x"}}
        rows.add(1, {"id": "z"})
        rows.finish()
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["x", "z"]


def test_other_settings_start_over(tmp_path):
    with ResumableRows(tmp_path / "o.jsonl", {"a": 1}) as rows:
        rows.add(0, {"id": "x"})
    with ResumableRows(tmp_path / "o.jsonl", {"a": 2}) as rows:
        assert rows.done == {}


# ---- the script


def run_script(out: Path, *more: str) -> int:
    return generate.main(["--prompts", str(DEFAULT), "--out", str(out), "--model", "tiny", "--threads", "1", *more])


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_do_not_depend_on_the_batch(tmp_path, capsys):
    options = ("--limit", "6", "--max-tokens", "9", "--digest")
    assert run_script(tmp_path / "one.jsonl", *options, "--batch", "1") == 0
    assert run_script(tmp_path / "many.jsonl", *options, "--batch", "4") == 0
    one, many = rows_of(tmp_path / "one.jsonl"), rows_of(tmp_path / "many.jsonl")
    assert [row["id"] for row in one] == [prompt.id for prompt in load_prompts(DEFAULT, limit=6)]
    for a, b in zip(one, many, strict=True):
        assert list(a) == [*KEYS, "digest"]
        assert (a["id"], a["token_ids"], a["digest"]) == (b["id"], b["token_ids"], b["digest"])
        assert len(a["token_ids"]) == len(a["digest"]) == 9
        assert a["finish_reason"] == "max_tokens"
        assert a["tokens_per_pass"] >= 1 and a["shadow_share"] == pytest.approx(1 - 1 / a["tokens_per_pass"], abs=1e-3)
    assert "6 prompts (6 max_tokens)" in capsys.readouterr().out


def test_seeds_and_turns(tmp_path, monkeypatch):
    model, engine = generate.open_engine("tiny", "auto", None, slots=4, max_queue=4)
    monkeypatch.setattr(generate, "open_engine", lambda *args, **sizes: (model, engine))
    close = engine.close
    monkeypatch.setattr(engine, "close", lambda: None)
    options = ("--limit", "2", "--max-tokens", "6", "--temperature", "1.5", "--all-turns")
    files = {name: tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run_script(files[name], *options, "--seed", seed, "--batch", "2" if name == "a" else "1") == 0
    close()
    a, b, c = ([row["token_ids"] for row in rows_of(path)] for path in files.values())
    assert a == b != c
    turns = [len(prompt.turns) for prompt in load_prompts(DEFAULT, limit=2)]
    assert [len(row["turns"]) for row in rows_of(files["a"])] == turns


def test_levels_give_the_same_tokens_and_what_the_model_lacks_is_said(tmp_path, monkeypatch, capsys):
    model, engine = generate.open_engine("tiny", "auto", None, slots=1)
    monkeypatch.setattr(generate, "open_engine", lambda *args, **sizes: (model, engine))
    close = engine.close
    monkeypatch.setattr(engine, "close", lambda: None)
    ids, common = [], ("--limit", "2", "--max-tokens", "5", "--think", "off")
    for level in ("minimal", "low", "medium", "high"):
        assert run_script(tmp_path / level, *common, "--level", level) == 0
        ids.append([row["token_ids"] for row in rows_of(tmp_path / level)])
    assert ids[0] == ids[1] == ids[2] == ids[3]
    capsys.readouterr()
    assert run_script(tmp_path / "thoughts", "--think", "low") == 1
    assert capsys.readouterr().err.endswith("generate.py: the model tiny has no chat template, so it cannot think\n")
    assert run_script(tmp_path / "lossy", "--lossy") == 1
    assert "not calibrated for tiny; supported: exact levels" in capsys.readouterr().err
    close()


def test_the_output_is_neither_a_folder_nor_the_prompt_file(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('\ufeff{"question_id": 1, "category": "a", "turns": ["hello"]}\n', encoding="utf-8")
    for out, message in ((tmp_path, "is a folder"), (prompts, "is the prompt file itself")):
        with pytest.raises(SystemExit) as ended:
            run_script(out, "--prompts", str(prompts))
        assert ended.value.code == 2 and message in capsys.readouterr().err
    assert "hello" in prompts.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft", "magic"], "--draft: 'magic' is not supported; supported: auto, off, lookup, shadow"),
        (["--quant", "int3"], "--quant: 'int3' is not supported; supported: auto, none, int8, int4"),
        (["--kv", "int4"], "--kv: 'int4' is not supported; supported: auto, float32, bfloat16, int8"),
        (["--kernels", "cuda"], "--kernels: 'cuda' is not supported; supported: auto, xla, cpu, tpu"),
        (["--embedding", "9:int8"], "embedding '9:int8' is not supported"),
        (["--level", "xhigh"], "--level: level 'xhigh' is not supported; supported: minimal, low, medium, high"),
        (["--think", "hard"], "--think: 'hard' is not supported; supported: off, adaptive, none, minimal, low, medium"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "nan"], "top_p must be above 0"),
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--batch", "0"], "whole number of at least 1, got '0'"),
        (["--mesh", "model=0"], "mesh 'model=0' is not understood"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path, capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        run_script(tmp_path / "o.jsonl", *argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error), error


def test_an_unknown_model_is_one_line_and_status_1(tmp_path, capsys):
    assert run_script(tmp_path / "o.jsonl", "--model", "smollm9") == 1
    assert "no model is called 'smollm9'" in capsys.readouterr().err.splitlines()[-1]
