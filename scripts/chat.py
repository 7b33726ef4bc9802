"""Chat with a model in the terminal, streaming.

    python scripts/chat.py --model smollm2
    python scripts/chat.py --url http://127.0.0.1:8000

Lines piped into stdin are questions, one a line; the answers are then plain text on stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx
from rich.console import Console

from umbra.scripts.level_options import (
    UNSAID,
    Think,
    add_level_option,
    add_lossy_option,
    add_think_option,
    effort,
    think,
)
from umbra.scripts.model_options import (
    OneLineParser,
    add_draft_option,
    add_model_options,
    open_engine,
    positive,
    prepare,
)

if TYPE_CHECKING:
    from umbra.model.load import Model
    from umbra.serving.effort import Prepared
    from umbra.serving.engine import Engine

HELP = """/help            this text
/think T         think before answering: off, low, medium, high, adaptive, or a number of tokens; without T: what is set
/reset           forget the conversation
/system TEXT     set the system message and start anew; without TEXT: back to the model's own
/quit            leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a model must not send to a terminal: everything that is not text, tab or newline."""

ODD = "the server sent something that is not OpenAI's format"

T = TypeVar("T")

Message = dict[str, str]


@dataclasses.dataclass
class Piece:
    """Some text of an answer, the number of tokens behind it if known, and how it ended if this is the last piece.
    `thought` is what the model writes for itself; all of it comes before the first `text`."""

    text: str
    tokens: int | None = None
    finish: str | None = None
    total: int | None = None
    """Tokens of the whole answer, thoughts included; on the last piece."""
    thought: str = ""
    thought_tokens: int | None = None
    """On the last piece."""


class ChatError(Exception):
    """An answer that could not be given, in one sentence."""


class Backend(Protocol):
    """Something that answers a conversation."""

    name: str

    def answer(self, messages: Sequence[Message], think: Think) -> Iterator[Piece]:
        """Pieces of the answer as they come. Leaving early cancels it. Raises `ChatError`."""
        ...

    def close(self) -> None: ...


class Local:
    """A model in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from umbra.model.thinking import Thinker
        from umbra.serving.console import StartupProgress
        from umbra.serving.effort import EXACT, lossy_policies
        from umbra.serving.engine import SamplingParams

        self._params = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens, draft=args.draft
        )
        with StartupProgress() as progress:
            self._model, self._engine = self._open(args, progress)
        if self._model.tokenizer is None or self._model.chat_template is None:
            self._engine.close()
            raise ChatError(f"the model {self._model.name!r} has no chat template; chat needs one")
        self.name = self._model.name
        self._level = args.level
        self._thinker = Thinker(self._model.tokenizer, self._model.chat_template)
        try:
            self._policies = lossy_policies(self._model) if args.lossy else EXACT
        except ValueError:
            self._engine.close()
            raise

    def _open(self, args: argparse.Namespace, progress: Any) -> tuple[Model, Engine]:
        return open_engine(
            args.model or "smollm2",
            args.quant,
            args.mesh,
            kernels=args.kernels,
            embedding=args.embedding,
            draft=args.draft,
            shadow=args.shadow,
            progress=progress,
            kv=args.kv,
            slots=1,
        )

    def answer(self, messages: Sequence[Message], think: Think) -> Iterator[Piece]:
        made = self._prepare(messages, think)
        try:
            for emission in self._engine.stream(made.prompt, made.params):
                if emission.finish_reason == "error":
                    raise ChatError(emission.error or "the engine failed")
                total, thoughts = None, None
                if emission.usage is not None:
                    total, thoughts = emission.usage.completion_tokens, emission.usage.thought_tokens
                tokens = len(emission.token_ids)
                yield Piece(emission.text, tokens, emission.finish_reason, total, emission.thought, thoughts)
        except ValueError as error:  # the prompt is too long
            raise ChatError(f"{error}; /reset starts anew") from None

    def _prepare(self, messages: Sequence[Message], think: Think) -> Prepared:
        from umbra.model.chat_template import ChatTemplateError
        from umbra.serving.effort import prepare

        context, asked = self._engine.context_length, effort(self._level, think)
        try:
            return prepare(self._thinker, context, messages, self._params, asked, policies=self._policies)
        except ChatTemplateError as error:
            raise ChatError(f"{error}; /reset starts anew") from None
        except ValueError as error:  # the model cannot think
            raise ChatError(str(error)) from None

    def close(self) -> None:
        self._engine.close()


class Remote:
    """A running server, over HTTP."""

    def __init__(self, args: argparse.Namespace) -> None:
        base = args.url.rstrip("/").removesuffix("/v1")
        key = args.api_key or os.environ.get("UMBRA_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=httpx.Timeout(600, connect=5))
            listed = self._http.get("/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(f"no server answers at {base}: {error or type(error).__name__}") from None
        if listed.status_code != 200:
            raise ChatError(f"the server at {base} says: {_message(listed.content, listed.status_code)}")
        self.name = args.model or _first_model(listed.content)
        self._options = {name: getattr(args, name) for name in ("temperature", "top_p", "seed", "max_tokens")}
        self._level = args.level

    def answer(self, messages: Sequence[Message], think: Think) -> Iterator[Piece]:
        options = {name: value for name, value in self._options.items() if value is not None}
        options |= _effort(self._level, think)
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_message(response.read(), response.status_code))
                yield from self._pieces(response)
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error or type(error).__name__}") from None

    def _pieces(self, response: httpx.Response) -> Iterator[Piece]:
        """Text as it comes, then one last piece: the number of tokens comes after the reason."""
        last, done = Piece(""), False
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                done = True
                break
            piece = _piece(data)
            last.finish = piece.finish or last.finish
            last.total = piece.total if piece.total is not None else last.total
            last.thought_tokens = piece.thought_tokens if piece.thought_tokens is not None else last.thought_tokens
            if piece.text or piece.thought:
                yield Piece(piece.text, thought=piece.thought)
        if last.finish is None and not done:
            raise ChatError("the server ended the answer early")
        yield last

    def close(self) -> None:
        self._http.close()


def _effort(level: str | None, think: Think) -> dict[str, Any]:
    """Fields of a request to a server; with a level but nothing said of thoughts there are none."""
    fields: dict[str, Any] = {"level": level, "reasoning_effort": think.effort, "thinking_budget": think.budget}
    if level is not None and think == UNSAID:
        fields["reasoning_effort"] = "none"
    return {name: value for name, value in fields.items() if value is not None}


NOT_OURS = (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError)
"""What reading JSON of an unexpected shape raises."""


def _message(body: bytes, status: int) -> str:
    """The sentence of an error reply."""
    try:
        return f"{json.loads(body)['error']['message']} (status {status})"
    except NOT_OURS:
        return f"status {status}"


def _first_model(body: bytes) -> str:
    """The first model of a list of models."""
    try:
        return _of(str, json.loads(body)["data"][0]["id"])
    except NOT_OURS:
        raise ChatError(ODD) from None


def _piece(data: str) -> Piece:
    """One chunk of a streamed answer; text, reason and total may each be missing."""
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ChatError(_of(str, chunk["error"]["message"]))
        choices, usage = chunk["choices"], chunk.get("usage")
        return Piece(
            "".join(choice["delta"].get("content") or "" for choice in choices),
            finish=next((_of(str, one["finish_reason"]) for one in choices if one.get("finish_reason")), None),
            total=_of(int, usage["completion_tokens"]) if usage else None,
            thought="".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
            thought_tokens=_of(int, usage["completion_tokens_details"].get("reasoning_tokens", 0))
            if usage and usage.get("completion_tokens_details")
            else None,
        )
    except NOT_OURS:
        raise ChatError(ODD) from None


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind}, got {type(value)}")
    return value


class Speed:
    """Tokens per second of one answer: those after the first piece over the time after it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._began
        self._seen = 0
        self._total: int | None = None
        self._thoughts = 0

    def add(self, piece: Piece) -> None:
        if piece.text or piece.thought or piece.tokens:
            self._last = time.perf_counter()
            self._seen += piece.tokens if piece.tokens is not None else 1
            if self._first is None:
                self._first, self._first_tokens = self._last, self._seen
        self._total = piece.total if piece.total is not None else self._total
        self._thoughts = piece.thought_tokens or self._thoughts

    def __str__(self) -> str:
        if self._first is None:
            return "no tokens"
        tokens = self._total if self._total is not None else self._seen
        rest, seconds = tokens - self._first_tokens, self._last - self._first
        rate = f", {rest / seconds:.1f} tokens/s" if rest > 0 and seconds > 0 else ""
        thoughts = f" ({self._thoughts} of thought)" if self._thoughts else ""
        return f"{tokens} tokens{thoughts}{rate}, first after {(self._first - self._began) * 1000:.0f} ms"


@contextmanager
def _unechoed() -> Iterator[None]:
    """What is typed meanwhile is not shown among the answer; it waits for the next prompt, which shows it."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, OSError, ValueError, TypeError):  # no terminal that could be told
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class Chat:
    """The conversation and its screen."""

    def __init__(
        self,
        backend: Backend,
        system: str | None,
        console: Console,
        notes: Console,
        typed: bool,
        think: Think = UNSAID,
    ) -> None:
        self._backend = backend
        self._system = system
        self._console = console
        self._notes = notes
        self._typed = typed
        self._think = think
        self._turns: list[Message] = []
        self.failed = False

    def run(self) -> None:
        if self._typed:
            self._note(f"{self._backend.name}: /help shows the commands, Ctrl-D leaves")
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            else:
                self._ask(line)

    def _read(self) -> str | None:
        """The next question; None at the end of input. Ctrl-C throws away what was typed."""
        lines: list[str] = []
        while True:
            try:
                prompt = "... " if lines else "you> "
                line = input(f"\001\033[1;36m\002{prompt}\001\033[0m\002" if self._typed else "")
            except KeyboardInterrupt:
                self._notes.print()
                lines.clear()
                continue
            except EOFError:
                if self._typed:
                    self._notes.print()
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _command(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self._turns.clear()
            self._note("the conversation starts anew")
        elif name == "/system":
            self._system = rest.strip() or None
            self._turns.clear()
            self._note(f"system message {'set' if self._system else 'taken back'}; the conversation starts anew")
        elif name == "/think":
            self._set_thinking(rest.strip())
        elif name == "/help":
            self._note(HELP)
        else:
            self._note(f"{name} is not a command; supported: /help, /reset, /system, /think, /quit")
        return True

    def _set_thinking(self, text: str) -> None:
        try:
            self._think = think(text) if text else self._think
        except argparse.ArgumentTypeError as error:
            self._note(f"/think: {error}")
        else:
            self._note(f"thinking is {self._think}")

    def _ask(self, question: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": question}
        pieces = self._backend.answer([*system, *self._turns, asked], self._think)
        with _unechoed() if self._typed else nullcontext():
            self._tell(asked, pieces)

    def _tell(self, asked: Message, pieces: Iterator[Piece]) -> None:
        """Show an answer as it comes."""
        speed, ending, thoughts = Speed(), "", False
        text: list[str] = []
        try:
            for piece in pieces:
                speed.add(piece)
                if piece.thought:
                    thoughts = True
                    self._show_thought(piece.thought)
                if thoughts and piece.text and not text:
                    self._notes.print("\n")
                if piece.text:
                    text.append(piece.text)
                    self._show(piece.text)
                if piece.finish in ("length", "max_tokens", "context_length"):
                    ending = ", cut off: " + (
                        "the context is full" if piece.finish == "context_length" else "at the token limit"
                    )
        except KeyboardInterrupt:
            ending = ", stopped"
        except ChatError as error:
            self.failed = True
            self._show("\n" if text else "")
            self._note(f"error: {error}", "red")
            return
        finally:
            with suppress(KeyboardInterrupt):
                pieces.close()  # type: ignore[attr-defined]  # generators cancel what they wait for
        self._show("\n")
        self._note(f"{speed}{ending}")
        self._turns += [asked, {"role": "assistant", "content": "".join(text)}]

    def _show(self, text: str) -> None:
        """Text of an answer as it is: rich would turn tabs into spaces and `:names:` into emoji."""
        self._console.file.write(CONTROL.sub("", text))
        self._console.file.flush()

    def _show_thought(self, text: str) -> None:
        """Thoughts go where notes go, dimmed: with piped answers stdout has the answers only."""
        self._notes.print(
            CONTROL.sub("", text), style="dim", end="", markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="chat.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_model_options(p)
    p.set_defaults(model=None)  # with --url: whichever the server has
    add_draft_option(p)
    add_level_option(p)
    add_think_option(p)
    add_lossy_option(p)
    p.add_argument("--url", metavar="URL", help="chat with a running server instead; --model is then one of its models")
    p.add_argument("--api-key", metavar="KEY", help="key for --url (or $UMBRA_API_KEY)")
    p.add_argument("--system", metavar="TEXT", help="system message (default: the model's own)")
    p.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    p.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens that add up to this")
    p.add_argument("--seed", type=int, metavar="N", help="makes answers with a temperature repeatable")
    p.add_argument("--max-tokens", type=positive, default=1024, metavar="N", help="tokens of an answer")
    return p


def main(argv: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    automatic = {getattr(args, name) for name in ("quant", "kv", "kernels", "draft", "shadow")} == {"auto"}
    if args.url and (args.threads or args.mesh or args.lossy or not automatic):
        local = "--quant, --kv, --kernels, --threads, --mesh, --draft, --shadow and --lossy"
        options.error(f"{local} belong to a local model, not to --url")
    if args.api_key and not args.url:
        options.error("--api-key belongs to --url")
    typed = sys.stdin.isatty()
    console = Console()
    notes = console if typed and console.is_terminal else Console(stderr=True)
    try:
        if not args.url:
            prepare(args.threads, args.mesh, args.kernels)
        backend: Backend = Remote(args) if args.url else Local(args)
    except KeyboardInterrupt:
        os._exit(130)  # a compilation may be running, which cannot be interrupted
    except Exception as error:
        print(f"chat.py: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
    chat = Chat(backend, args.system, console, notes, typed, args.think)
    try:
        chat.run()
    finally:
        backend.close()
    return 1 if chat.failed and not typed else 0


if __name__ == "__main__":
    sys.exit(main())
