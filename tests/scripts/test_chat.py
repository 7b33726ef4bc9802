from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from umbra.model.chat_template import ChatTemplate
from umbra.model.tokenizer import Tokenizer
from umbra.model.vocabulary import byte_of_char
from umbra.scripts.chat import Chat, ChatError, Piece, Speed, main
from umbra.serving.engine import Emission, Usage


class Backend:
    """Answers with what it was told; remembers what it was asked."""

    name = "fake"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.thinking = []
        self.left_early = False

    def answer(self, messages, think):
        self.asked.append(list(messages))
        self.thinking.append(str(think))
        given = self.answers.pop(0)
        try:
            for piece in given:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        except GeneratorExit:
            self.left_early = True
            raise

    def close(self):
        pass


def chat(monkeypatch, backend, *lines, system=None, typed=False):
    """Run a chat over typed lines; what appeared, and the notes."""
    given = iter(lines)

    def read(prompt=""):
        line = next(given, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    out, notes = io.StringIO(), io.StringIO()
    one = Chat(backend, system, Console(file=out, width=40), Console(file=notes, width=40), typed)
    one.run()
    return out.getvalue(), notes.getvalue(), one


def text(*pieces):
    return [Piece(piece, 1) for piece in pieces] + [Piece("", 0, "stop_token", len(pieces))]


def test_turns_build_a_conversation(monkeypatch):
    backend = Backend(text("A", "1"), text("B"))
    out, notes, _ = chat(monkeypatch, backend, "one", "", "two")
    assert out == "A1\nB\n"
    assert backend.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "two"},
    ]
    assert "2 tokens" in notes and "first after" in notes


def test_long_lines_are_not_wrapped(monkeypatch):
    out, _, _ = chat(monkeypatch, Backend(text("word " * 50)), "x")
    assert out == "word " * 50 + "\n"


def test_terminal_codes_are_taken_out(monkeypatch):
    out, _, _ = chat(monkeypatch, Backend(text("a\x1b[2Jb\x07c\td\n[bold]e")), "x")
    assert out == "a[2Jbc\td\n[bold]e\n"


def test_commands(monkeypatch):
    backend = Backend(text("A"), text("B"), text("C"))
    lines = ["one", "/reset", "two", "/system Be brief.", "three", "/help", "/nothing", "/quit", "never"]
    _, notes, _ = chat(monkeypatch, backend, *lines)
    assert [len(messages) for messages in backend.asked] == [1, 1, 2]
    assert backend.asked[2][0] == {"role": "system", "content": "Be brief."}
    assert "/reset" in notes and "/nothing is not a command" in notes


def test_the_system_message_can_be_taken_back(monkeypatch):
    backend = Backend(text("A"))
    chat(monkeypatch, backend, "/system", "one", system="Be rude.")
    assert backend.asked == [[{"role": "user", "content": "one"}]]


def test_interrupt_stops_the_answer_only(monkeypatch):
    backend = Backend([Piece("par", 1), KeyboardInterrupt()], text("B"))
    out, notes, _ = chat(monkeypatch, backend, "one", KeyboardInterrupt(), "two", typed=True)
    assert out == "par\nB\n" and "stopped" in notes
    assert backend.asked[1][1] == {"role": "assistant", "content": "par"}


def test_a_failed_answer_is_not_part_of_the_conversation(monkeypatch):
    backend = Backend([Piece("x", 1), ChatError("too long")], text("B"))
    out, notes, one = chat(monkeypatch, backend, "one", "two")
    assert "error: too long" in notes and one.failed
    assert backend.asked[1] == [{"role": "user", "content": "two"}]
    assert out == "x\nB\n"


def test_lines_that_go_on(monkeypatch):
    backend = Backend(text("A"))
    chat(monkeypatch, backend, "one\\", "two")
    assert backend.asked[0][0]["content"] == "one\ntwo"


def test_cut_off_answers_say_so(monkeypatch):
    backend = Backend([Piece("A", 1, "max_tokens", 1)], [Piece("B", 1, "context_length", 1)])
    _, notes, _ = chat(monkeypatch, backend, "one", "two")
    assert "at the token limit" in notes and "the context is full" in notes


THOUGHTS = [Piece("", 2, thought="Hm, "), Piece("", 1, thought="\x1b[2Jso."), Piece("5", 1)]


def test_thoughts_are_notes_and_not_part_of_the_conversation(monkeypatch):
    backend = Backend([*THOUGHTS, Piece("!", 2, "stop_token", 6, thought_tokens=3)], text("B"))
    out, notes, _ = chat(monkeypatch, backend, "one", "two")
    assert out == "5!\nB\n" and "Hm, [2Jso.\n\n6 tokens (3 of thought)" in notes
    assert backend.asked[1][1] == {"role": "assistant", "content": "5!"}


def test_thinking_is_set_by_a_command(monkeypatch):
    backend = Backend(*(text("A") for _ in range(5)))
    lines = ["1", "/think low", "2", "/think 300", "3", "/think", "/think adaptive", "4", "/think a lot"]
    _, notes, _ = chat(monkeypatch, backend, *lines, "/think off", "5")
    assert backend.thinking == ["off", "low", "300 tokens", "adaptive", "off"]
    assert notes.count("thinking is 300 tokens") == 2
    assert "/think: 'a lot' is not supported; supported: off, adaptive, none, minimal, low" in notes


def test_speed_leaves_the_first_piece_out(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    speed = Speed()
    for piece in (Piece("a", 4), Piece("b", 1), Piece("c", 1, "stop_token", 6)):
        speed.add(piece)
    assert str(speed) == "6 tokens, 1.0 tokens/s, first after 1000 ms"


def in_process(monkeypatch, *argv):
    """The exit code of one question to a scripted model in this process, and what its engine got."""
    tokens = [*byte_of_char()]
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * 256, "merges": []}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    template = ChatTemplate("{% for message in messages %}{{ message.content }}|{% endfor %}")
    asked = []

    def stream(prompt, params):
        asked.append((tokenizer.decode(prompt), params))
        if params.thinking is not None:
            yield Emission("", (1,), thought="Hm.")
        usage = Usage(len(prompt), 3, thought_tokens=2 if params.thinking else 0)
        yield Emission("5", (2,))
        yield Emission("!", (3,), finish_reason="stop_token", usage=usage)

    engine = SimpleNamespace(context_length=500, stream=stream, close=lambda: None)
    model = SimpleNamespace(name="fake", tokenizer=tokenizer, chat_template=template)
    monkeypatch.setattr("umbra.scripts.chat.open_engine", lambda *args, **options: (model, engine))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    return main(list(argv)), asked


@pytest.mark.parametrize(
    ("argv", "level", "budget"),
    [([], "medium", None), (["--level", "low"], "low", None), (["--think", "50"], "medium", 50),
     (["--think", "high", "--level", "minimal"], "minimal", 138)],
)  # fmt: skip
def test_a_model_in_this_process(monkeypatch, capsys, argv, level, budget):
    code, ((prompt, params),) = in_process(monkeypatch, *argv)
    out, err = capsys.readouterr()
    assert code == 0 and out == "5!\n"
    assert params.level == level and (params.thinking and params.thinking.most) == budget
    if budget:
        assert prompt.startswith("Hi\n\nThink step by step") and prompt.endswith("|<think>\n")
        assert "Hm.\n\n3 tokens (2 of thought)" in err
    else:
        assert prompt == "Hi|" and "3 tokens, " in err and "thought" not in err


def test_a_model_that_was_not_calibrated_cannot_be_lossy(monkeypatch, capsys):
    def refuse(model):
        raise ValueError("relaxed acceptance was not calibrated for fake; supported: exact levels")

    monkeypatch.setattr("umbra.serving.effort.lossy_policies", refuse)
    code, asked = in_process(monkeypatch, "--lossy")
    assert code == 1 and not asked and "supported: exact levels" in capsys.readouterr().err


def served(monkeypatch, models, *lines, argv=(), bodies=None):
    """The exit code of one question to a server that sends these bodies; a test looks at what was printed."""

    def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, content=models)
        if bodies is not None:
            bodies.append(json.loads(request.content))
        return httpx.Response(200, content="".join(f"data: {line}\n\n" for line in lines))

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(handle))
    monkeypatch.setattr("umbra.scripts.chat.httpx.Client", client)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    return main(["--url", "http://server", *argv])


MODELS = '{"data": [{"id": "m"}]}'
TEXT = '{"choices": [{"delta": {"content": "A"}}]}'
END = '{"choices": [{"delta": {}, "finish_reason": "length"}]}'


@pytest.mark.parametrize("models", ["", "[]", "{}", '{"data": []}', '{"data": [{"id": 5}]}', "[" * 100_000, b"\xff"])
def test_a_server_with_odd_models(monkeypatch, capsys, models):
    assert served(monkeypatch, models) == 1
    assert capsys.readouterr().err == "chat.py: the server sent something that is not OpenAI's format\n"


@pytest.mark.parametrize(
    "line",
    ["", "x", "5", "[]", "{}", "[" * 100_000, '{"choices": 5}', '{"choices": [5]}', '{"choices": [{}]}',
     '{"choices": [{"delta": null}]}', '{"choices": [{"delta": {"content": 5}}]}', '{"error": "no"}',
     '{"choices": [{"delta": {}, "finish_reason": 5}]}', '{"choices": [], "usage": 5}',
     '{"choices": [], "usage": {"completion_tokens": "many"}}',
     '{"choices": [{"delta": {"reasoning_content": 5}}]}',
     '{"choices": [], "usage": {"completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": "some"}}}',
     '{"choices": [], "usage": {"completion_tokens": 1, "completion_tokens_details": 5}}'],
)  # fmt: skip
def test_a_server_with_odd_answers(monkeypatch, capsys, line):
    assert served(monkeypatch, MODELS, TEXT, line) == 1
    out, err = capsys.readouterr()
    assert out == "A\n" and err == "error: the server sent something that is not OpenAI's format\n"


@pytest.mark.parametrize("lines", [(TEXT, END, "[DONE]"), (TEXT, END)])
def test_a_server_that_sends_no_usage(monkeypatch, capsys, lines):
    assert served(monkeypatch, MODELS, *lines) == 0
    out, err = capsys.readouterr()
    assert out == "A\n" and "cut off: at the token limit" in err


def test_what_a_server_is_asked_and_its_thoughts(monkeypatch, capsys):
    bodies = []
    thought = '{"choices": [{"delta": {"reasoning_content": "Hm."}}]}'
    used = '{"choices": [], "usage": {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 8}}}'
    for argv in ([], ["--think", "low"], ["--think", "off"], ["--level", "low"], ["--level", "high", "--think", "-1"]):
        assert served(monkeypatch, MODELS, thought, TEXT, END, used, "[DONE]", argv=argv, bodies=bodies) == 0
        out, err = capsys.readouterr()
        assert out == "A\n" and err.startswith("Hm.\n\n9 tokens (8 of thought)")
    names = ("level", "reasoning_effort", "thinking_budget")
    assert [{name: body[name] for name in names if name in body} for body in bodies] == [
        {},
        {"reasoning_effort": "low"},
        {"thinking_budget": 0},
        {"level": "low", "reasoning_effort": "none"},
        {"level": "high", "thinking_budget": -1},
    ]


def test_a_server_that_breaks_off(monkeypatch, capsys):
    assert served(monkeypatch, MODELS, TEXT) == 1
    assert "ended the answer early" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--url", "http://x", "--quant", "none"],
        ["--url", "http://x", "--lossy"],
        ["--api-key", "k"],
        ["--max-tokens", "0"],
        ["--level", "xhigh"],
        ["--think", "much"],
        ["--think", "-2"],
    ],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [["--url", "http://127.0.0.1:9"], ["--url", "nonsense"], ["--temperature", "-1"], ["--model", "/no/such.gguf"]],
)
def test_a_start_that_fails(argv, capsys):
    assert main(argv) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("chat.py: ")


IN_A_TERMINAL = """
import readline, sys, time
from rich.console import Console
from umbra.scripts.chat import Chat, Piece

class Slow:
    name = "slow"

    def answer(self, messages, think):
        for letter in messages[-1]["content"].upper() + "\\n" * 3:
            yield Piece(letter, 1)
            time.sleep(0.1)
        yield Piece("", 0, "stop")

console = Console()
Chat(Slow(), None, console, console, True).run()
"""


def test_what_is_typed_during_an_answer_waits_for_the_prompt():
    """Two lines and half of one: none is lost, and none is shown among the answer."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "dumb"}
    child = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = ""

    def until(text):
        nonlocal shown
        while text not in shown:
            shown += os.read(ours, 4096).decode()

    try:
        until("you> ")
        os.write(ours, b"alpha\n")
        until("AL")
        os.write(ours, b"bravo\ncharlie\ndel")
        until("CHARLIE")
        until("del")
        os.write(ours, b"ta\n")
        until("DELTA")
        os.write(ours, b"/quit\n")
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-z]", "", shown)
    for word in ("alpha", "bravo", "charlie", "delta"):
        assert shown.count(word) == 1 and shown.index(f"you> {word}") < shown.index(word.upper())
