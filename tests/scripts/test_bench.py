"""The benchmark harness: measurements, reports, worker processes, arrivals, the HTTP client and the command line."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.configs.prompt_sets import DEFAULT, Prompt, load_prompts
from umbra.scripts.bench import cli, scenarios, systems
from umbra.scripts.bench.arrivals import Arrival, poisson, trace
from umbra.scripts.bench.client import Target, replay
from umbra.scripts.bench.harness import run
from umbra.scripts.bench.measures import Batch, Decode, Prefill
from umbra.scripts.bench.plan import Plan
from umbra.scripts.bench.processes import BenchError, Workers
from umbra.scripts.bench.report import _cell, ratios, summarize, with_peers
from umbra.scripts.bench.serve import percentile
from umbra.scripts.bench.systems.base import Run, Setup, Stream

KEYS = {"bench", "model", "machine", "versions", "settings", "rows", "summary", "ratio"}
ROW_KEYS = {"system", "category", "tok_s", "ttft_ms", "tokens_per_pass"}


def plan(bench: str, **changes) -> Plan:
    values = dict(
        bench=bench, model="tiny", quant="auto", threads=1, mesh=None, draft="off", against=(), prompts=DEFAULT,
        limit=3, rounds=2, max_tokens=64,
    )  # fmt: skip
    return Plan(**{**values, **changes})


def stream(tokens: int = 65, ttft: float = 0.5, last: float = 2.5, **more) -> Stream:
    return Stream(prompt_tokens=100, token_ids=list(range(tokens)), ttft=ttft, first_tokens=1, last=last, **more)


def measure(kind, bench: str, **changes):
    prompts = [Prompt(f"p{i}", "chat", ("x",)) for i in range(4)]
    return kind(plan(bench, **changes), prompts, [[i] * (5 + i) for i in range(4)])


# ---- figures


def test_decode_counts_the_tokens_after_the_first_emission():
    bench = measure(Decode, "decode")
    row = bench.row(bench.jobs(0)[0], Run([stream(65, ttft=0.5, last=2.5, passes=32)], 2.5))
    assert row["tok_s"] == pytest.approx(64 / 2.0)
    assert row["ttft_ms"] == 500
    assert row["tokens_per_pass"] == pytest.approx(65 / 32)
    assert "short" not in row


def test_short_rows_are_listed_but_not_counted():
    bench = measure(Decode, "decode")
    job = bench.jobs(0)[0]
    rows = [{"category": "chat", **bench.row(job, Run([stream(n, 0.0, last)], last))} for n, last in ((65, 1), (9, 9))]
    assert rows[1]["short"]
    summary = summarize(rows)
    assert (summary["rows"], summary["counted"]) == (2, 1)
    assert summary["tok_s"] == 64


def test_prefill_counts_prompt_tokens_that_were_not_cached():
    bench = measure(Prefill, "prefill", prompt_tokens=100, max_tokens=1)
    row = bench.row(bench.jobs(0)[0], Run([stream(1, 0.5, 0.5, cached_tokens=50)], 0.5))
    assert row["tok_s"] == pytest.approx(100)
    assert "ttft_ms" not in summarize([{"category": "prefill", **row}])


def test_prefill_prompts_have_the_length_asked_for_and_never_begin_alike():
    prompts = load_prompts(DEFAULT, limit=20)
    bench = Prefill(plan("prefill", prompt_tokens=700, limit=4), prompts, [list(p.turns[0].encode()) for p in prompts])
    windows = [ids for number in (-1, 0, 1, 2) for job in bench.jobs(number) for ids in job.prompts]
    assert {len(ids) for ids in windows} == {700}
    assert len({tuple(ids[:128]) for ids in windows}) == len(windows) == 13
    assert bench.context() == 701


def test_batch_counts_all_tokens_over_wall_time():
    bench = measure(Batch, "batch", sequences=2, limit=2)
    assert [job.prompts for number in (0, 1) for job in bench.jobs(number)] == [[[0] * 5, [1] * 6], [[2] * 7, [3] * 8]]
    early = stream(65, 0.5, 4.5, gaps=[1 / 16] * 64)
    late = stream(65, 2.5, 4.75, gaps=[2.25 / 32] * 32, emitted=[1, *[2] * 32])
    row = bench.row(bench.jobs(0)[0], Run([early, late], 5.0))
    assert row["tok_s"] == pytest.approx(130 / 5)
    assert row["decode_tok_s"] == pytest.approx((32 + 2 * 28) / 2)  # from 2.5 s on, until the first has ended
    assert row["ttft_ms"] == 1500
    assert bench.row(bench.jobs(0)[0], Run([stream(65, 0.5, 2.0), late], 5.0))["decode_tok_s"] is None


def test_ratios_are_ours_over_the_peers_best_variant():
    summary = {
        "umbra": {"tok_s": 60.0},
        "transformers-float32": {"tok_s": 15.0},
        "transformers-bfloat16": {"tok_s": 20.0},
    }
    whole = with_peers(summary, ("transformers",))
    assert whole["transformers"] == {"tok_s": 20.0, "variant": "transformers-bfloat16"}
    assert ratios(whole, "tok_s") == {"transformers-float32": 4.0, "transformers-bfloat16": 3.0, "transformers": 3.0}


def test_percentiles_interpolate():
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(list(map(float, range(101))), 90) == 90.0


# ---- worker processes

FAKES = """
import os, time
from umbra.scripts.bench.systems.base import Run, Stream, System

class Fake(System):
    speed = 1000.0
    def load(self, setup):
        print("noise on stdout")
        os.system("echo noise of a child")
        self.setup = setup
        return {"versions": {"fake": "1"}, "settings": {"context": 4096, "threads": setup.threads}}
    def encode(self, texts):
        return [list(text.encode()) for text in texts]
    def gguf_file(self):
        return "/models/fake.gguf"
    def pid(self):
        return os.getpid()
    def generate(self, prompts, max_tokens):
        streams = [Stream(len(p), [sum(p) % 97 + i for i in range(max_tokens)], 0.1, 1,
                          0.1 + (max_tokens - 1) / self.speed) for p in prompts]
        return Run(streams, 0.1 + max_tokens / self.speed)

class Slow(Fake):
    speed = 250.0
    def generate(self, prompts, max_tokens):
        run = super().generate(prompts, max_tokens)
        run.streams[0].token_ids[10:] = [0] * (max_tokens - 10)
        return run

class Broken(Fake):
    def generate(self, prompts, max_tokens):
        if max_tokens == 3:
            print("about to give up")
            os._exit(7)
        raise RuntimeError("no such\\nluck")
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Adapters that need no model."""
    (tmp_path / "umbra_bench_fakes.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = {"umbra": "Fake", "llama.cpp": "Slow", "broken": "Broken"}
    for system, name in names.items():
        monkeypatch.setitem(systems.ADAPTERS, system, f"umbra_bench_fakes:{name}")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def setup() -> Setup:
    return Setup("fake", "auto", 1, None, 1, 100)


def test_a_worker_answers_and_is_stopped_between_turns(fakes):
    with Workers(["umbra"]) as workers:
        worker = workers["umbra"]
        with worker.turn():
            worker.load(setup())
            pid = worker.call("pid")
            assert worker.generate([[1, 2]], 3).streams[0].token_ids == [3, 4, 5]
        assert until(lambda: state(pid) == "T")
        with worker.turn():
            assert worker.call("pid") == pid
    assert not Path(f"/proc/{pid}").exists()


def test_errors_of_a_system_are_one_sentence_with_its_name(fakes):
    with Workers(["broken"]) as workers, workers["broken"].turn() as worker:
        worker.load(setup())
        with pytest.raises(BenchError, match="^broken: RuntimeError: no such luck$"):
            worker.generate([[1]], 2)
        with pytest.raises(BenchError, match="^broken: its process ended with status 7: about to give up$"):
            worker.generate([[1]], 3)
    with Workers(["umbra"]) as workers, workers["umbra"].turn() as worker:
        worker.load(setup())
        os.kill(worker.call("pid"), signal.SIGSEGV)
        with pytest.raises(BenchError, match="^umbra: its process was killed by SIGSEGV"):
            worker.generate([[1]], 2)


def test_workers_die_with_their_parent(fakes, tmp_path):
    script = """
        import os
        from umbra.scripts.bench import systems
        from umbra.scripts.bench.processes import Workers
        systems.ADAPTERS["umbra"] = "umbra_bench_fakes:Fake"
        workers = Workers(["umbra"])
        with workers["umbra"].turn() as worker:
            print(worker.call("pid"), flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    pid = int(done.stdout)
    assert until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z")


# ---- a whole benchmark


def test_a_report_has_rows_medians_ratios_and_where_they_come_from(fakes):
    report = run(plan("decode", against=("llama.cpp",)), lambda text: None)
    assert report.keys() >= KEYS
    assert len(report["rows"]) == 2 * 2 * 3
    assert all(row.keys() >= ROW_KEYS for row in report["rows"])
    assert report["summary"]["umbra"]["tok_s"] == pytest.approx(1000)
    assert report["ratio"] == {"llama.cpp": pytest.approx(4)}
    assert report["summary"]["llama.cpp"]["same_tokens"] == 10
    assert report["versions"].keys() >= {"python", "fake"}
    assert report["machine"].keys() >= {"cpu", "cores", "flags", "memory_gib"}
    assert report["settings"]["rounds"] == 2
    first = [row["system"] for row in report["rows"] if row["id"] == "chat-01"]
    assert first == ["umbra", "llama.cpp", "llama.cpp", "umbra"], "who begins changes from round to round"
    json.dumps(report, allow_nan=False)


def test_a_sequence_that_does_not_fit_is_refused(fakes):
    with pytest.raises(BenchError, match="needs 5001 tokens and the context of tiny is 4096"):
        run(plan("prefill", prompt_tokens=5000, max_tokens=1), lambda text: None)


# ---- arrivals


def test_poisson_arrivals_have_the_rate_asked_for_and_are_the_same_for_the_same_seed():
    prompts = load_prompts(DEFAULT)
    arrivals = poisson(prompts, 2000, 4.0, 16, 3, 0)
    assert arrivals == poisson(prompts, 2000, 4.0, 16, 3, 0)
    assert arrivals != poisson(prompts, 2000, 4.0, 16, 4, 0)
    gaps = [b.at - a.at for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert len({arrival.id for arrival in arrivals}) == 2000


def test_rounds_ask_at_the_same_times_for_other_prompts():
    rounds = [poisson(load_prompts(DEFAULT), 30, 1.0, 16, 0, number) for number in range(3)]
    assert len({tuple(arrival.at for arrival in one) for one in rounds}) == 1
    assert len({arrival.text for one in rounds for arrival in one}) == 90


def test_a_trace_gives_times_lengths_and_common_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 1000, "input_length": 1000, "output_length": 50, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 4000, "turns": ["Hello there"], "max_tokens": 9},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    prompts = load_prompts(DEFAULT)
    first, second, third = trace(path, prompts, 10, 0, time_scale=0.5, length_scale=0.26)
    assert (first.at, second.at, third.at) == (0.0, 1.0, 1.5)
    assert (first.max_tokens, second.max_tokens, third.max_tokens) == (13, 1, 9)
    assert third.text == "Hello there"
    a, b = first.text.split(), second.text.split()
    assert (len(a), len(b)) == (200, 120), "1.3 tokens a word"
    assert a[:102] == b[:102]
    assert a[102:110] != b[102:110]
    again = trace(path, prompts, 1, 1, time_scale=0.5, length_scale=0.26)[0]
    assert again.text.split()[:102] != a[:102], "another round, other text"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot read the trace"), ('{"timestamp": 0}', "line 1"), ("", "no request")]
)
def test_bad_traces_are_refused(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        trace(path, load_prompts(DEFAULT), 10, 0, time_scale=1.0, length_scale=1.0)


# ---- the HTTP client


class Handler(BaseHTTPRequestHandler):
    """Streams three pieces, 20 ms apart; text `fail` is refused, text `break` ends too early."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.bodies.append(body)
        text = body["messages"][0]["content"] if "messages" in body else "ids"
        if text == "fail":
            return self.answer(429, b'{"error": {"message": "full"}}')
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(3):
            time.sleep(0.02)
            self.event({"choices": [{"delta": {"content": f"w{i}"}, "finish_reason": None}]})
        if text != "break":
            self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
            self.event({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 2}})
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def http_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_measures_pieces_and_reports_failures(http_server):
    arrivals = [Arrival(text, "chat", 0.01 * i, text, 5) for i, text in enumerate(("good", "fail", "break"))]
    outcomes, _ = asyncio.run(replay(Target(http_server, "m", [2]), arrivals, 3))
    good, fail, broken = outcomes
    assert (good.error, good.tokens, good.prompt_tokens, len(good.pieces)) == (None, 5, 2, 3)
    assert good.pieces[0] >= 0.02 and all(gap >= 0.015 for gap in good.gaps)
    assert good.tok_s == pytest.approx(4 / (good.pieces[-1] - good.pieces[0]))
    assert fail.error is not None and fail.error.startswith("status 429") and "full" in fail.error
    assert broken.error == "the stream ended without a finish reason"
    assert Handler.bodies[0]["logit_bias"] == {"2": -100}
    assert Handler.bodies[0]["max_tokens"] == 5


def test_waiting_for_a_place_counts_as_time_to_first_token(http_server):
    arrivals = [Arrival(str(i), "chat", 0.0, "good", 5) for i in range(3)]
    outcomes, seconds = asyncio.run(replay(Target(http_server, "m", []), arrivals, 1))
    first = sorted(outcome.pieces[0] for outcome in outcomes)
    assert first[2] >= first[0] + 0.1
    assert seconds >= 0.18


def test_a_server_that_is_not_there_is_an_error_of_every_request():
    outcomes, _ = asyncio.run(replay(Target("http://127.0.0.1:9", "m", []), [Arrival("a", "c", 0, "t", 5)], 1))
    assert outcomes[0].error is not None and outcomes[0].error.startswith("ConnectError")


# ---- the command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required"),
        (["level"], "'level'.*decode.*prefill.*batch.*serve"),
        (
            ["decode", "--against", "vllm"],
            "cannot compare with 'vllm'; supported: llama.cpp, .*transformers, xla",
        ),
        (["serve", "--against", "transformers"], "serve cannot compare with 'transformers'; supported: llama.cpp"),
        (["decode", "--max-tokens", "10"], "at least 64, got 10"),
        (["decode", "--draft", "both"], "--draft: 'both' is not supported; supported: auto, off, lookup, shadow"),
        (["exact", "--draft", "off"], "unrecognized arguments: --draft"),
        (["decode", "--against", "fixed-16"], "supported: .*off, lookup, shadow, auto, fixed-N$"),
        (["decode", "--against", "llama.cpp", "--temperature", "1"], "--against then supports off, .*fixed-N"),
        (["flat", "--max-tokens", "300"], "flat needs --max-tokens of at least 400"),
        (["flat", "--against", "llama.cpp"], "flat cannot compare with 'llama.cpp'; supported: off"),
        (["prefill", "--against", "off"], "prefill cannot compare with 'off'"),
        (["skips", "--mesh", "data=2,model=1"], "skips runs on one device"),
        (["decode", "--sequences", "2"], "unrecognized arguments: --sequences"),
        (["decode", "--rounds", "0"], "whole number of at least 1, got '0'"),
        (["serve", "--scenario", "events", "--clients", "2"], "--clients is not used with --scenario events"),
        (
            ["serve", "--scenario", "overhead", "--against", "llama.cpp"],
            "--against is not used with --scenario overhead",
        ),
        (["serve", "--scenario", "questions", "--trace", "t.jsonl"], "--trace is not used with --scenario questions"),
        (["serve", "--rate", "nan"], "must be a number above 0, got 'nan'"),
        (["serve", "--time-scale", "2"], "--time-scale is only used with --trace"),
        (["serve", "--trace", "t.jsonl", "--rate", "2"], "--rate is not used with --trace"),
        (["decode", "--mesh", "x=2"], "mesh 'x=2' is not understood"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_missing_peers_are_named_with_the_way_to_get_them(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["decode", "--against", "llama.cpp,transformers"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "llama_cpp, transformers, torch, accelerate" in error
    assert "pip install -e .[bench]" in error


def test_failures_are_one_line_and_status_1(tmp_path, capsys):
    assert cli.main(["decode", "--prompts", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot read the prompt file" in capsys.readouterr().err.splitlines()[-1]


def test_nothing_heavy_is_imported_for_the_command_line():
    heavy = {"jax", "torch", "llama_cpp", "transformers"}
    code = f"import sys; from umbra.scripts.bench import cli; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- with the real engine


@pytest.mark.parametrize(
    "argv",
    [
        ["decode", "--limit", "2", "--max-tokens", "64", "--against", "off,fixed-2"],
        ["levels", "--limit", "1", "--max-tokens", "8", "--tasks", "2"],
        ["prefill", "--limit", "1", "--prompt-tokens", "200"],
        ["batch", "--sequences", "3", "--max-tokens", "8"],
        ["serve", "--limit", "6", "--rate", "20", "--max-tokens", "4", "--starts", "1", "--sequences", "3"],
    ],
    ids=lambda argv: argv[0],
)
def test_benchmarks_of_the_tiny_model(tmp_path, argv, capsys):
    out = tmp_path / "report.json"
    assert cli.main([*argv, "--model", "tiny", "--rounds", "1", "--threads", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report.keys() >= KEYS
    assert all(row.keys() >= ROW_KEYS for row in report["rows"])
    assert not any(row.get("error") for row in report["rows"]), report["rows"]
    summary = report["summary"]["umbra"]
    assert summary["tok_s"] > 0 and summary["ttft_ms"] > 0
    assert "umbra" in capsys.readouterr().out
    if argv[0] == "serve":
        assert summary["errors"] == 0 and summary["start_s"] > 0 and summary["requests_s"] > 0
        assert {row["tokens"] for row in report["rows"]} == {4}


def test_a_closed_loop_asks_again_when_answered(http_server):
    server, some = SimpleNamespace(system="umbra"), plan("serve", scenario="concurrent", limit=5, max_tokens=5)
    prompts = [Prompt(str(i), "chat", ("good",)) for i in range(3)]
    rows, figures = scenarios._closed(some, Target(http_server, "m", []), server, prompts, 1, 2)
    assert len(rows) == 5 and all(row["ttft_ms"] < row["total_ms"] and row["clients"] == 2 for row in rows)
    assert figures["errors"] == 0 and figures["requests_s"] > 0 and figures["ttft_p95_ms"] >= figures["ttft_ms"]
    waited = max(row["total_ms"] for row in rows)
    assert waited < 1e3 * 5 / figures["requests_s"], "waiting for a place does not count"


def test_questions_of_so_many_words(http_server):
    server, some = SimpleNamespace(system="umbra"), plan("serve", scenario="questions", limit=2, max_tokens=5)
    asked = {words: [scenarios._question(words, i) for i in range(25)] for words in scenarios.WORDS}
    assert all({len(text.rstrip("?").split()) for text in texts} == {words} for words, texts in asked.items()), asked
    assert len({texts[i].split()[0] for texts in asked.values() for i in range(20)}) == 20
    rows = scenarios._ask(some, Target(http_server, "m", []), server, asked, 0)
    assert [row["words"] for row in rows] == [5, 10, 20] * 2
    systems = {body["messages"][0]["content"] for body in Handler.bodies}
    assert len(systems) == 1 and systems.pop().startswith("[0] You are")


def test_what_a_fast_source_gets_through(tmp_path):
    out = tmp_path / "report.json"
    argv = ["serve", "--scenario", "events", "--rate", "3000", "--max-tokens", "300", "--rounds", "1"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report.keys() >= KEYS and report["rows"]
    assert report["summary"]["umbra"]["tok_s"] > 0 and report["summary"]["umbra"]["events_s"] > 0


@pytest.mark.real
def test_the_server_against_the_engine(tmp_path):
    out = tmp_path / "report.json"
    argv = ["serve", "--scenario", "overhead", "--clients", "1,2", "--limit", "2", "--max-tokens", "4", "--rounds", "1"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["ratios"]["tok_s@2"]["engine"] > 0 and "ttft_more_ms" in report["summary"]["umbra"]


def test_lists_are_shown():
    assert _cell([101.26, 0.98, None]) == "101.3 0.98 "
