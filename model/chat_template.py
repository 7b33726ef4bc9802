"""Messages to the text and the token ids a chat model expects.

Templates are Jinja programs that come with a model. They see what Transformers shows them, so that they write the same
text, and they run in a sandbox, because a model file is data from a stranger.

What a message says must not become a turn of its own. `ChatTemplate.encode` therefore replaces everything in the
messages that could be read as a special token, or could become one beside other text, by characters of Unicode's
private planes before rendering, cuts the result at the special tokens that are left (the template's own), and puts the
characters back in the text between them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from .template_sandbox import MAX_OUTPUT, SandboxError, compile_template, free_variables, render_bounded
from .template_text import Disguise
from .tokenizer import Tokenizer
from .turn_templates import template_for

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some the second."""

_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Known:
    """The beginning of a prompt whose token ids are there already, for example a stored conversation.

    In the messages, `mark` stands where it ends: it takes the place of the last text that is known, and what comes
    before it may be left out as far as the template allows. `ends` are tokens that end a turn: one of them at the end
    of `ids` is left to the template, so that a turn that was cut off is closed as well.
    """

    ids: Sequence[int]
    mark: str
    ends: frozenset[int] = frozenset()

    def join(self, rest: Sequence[int]) -> list[int]:
        ids = list(map(int, self.ids))
        if ids and ids[-1] in self.ends:
            ids.pop()
        return [*ids, *rest]


class ChatTemplateError(ValueError):
    """The template is broken or does not accept these messages; one sentence."""


class ChatTemplate:
    """One model's chat template.

    `source` is the Jinja text, `tool_source` the one used when tools are given, if the model has another for them.
    `named_tokens` are the tokens that templates may name (`bos_token`, `unk_token`, ...); `bos_token` and `eos_token`
    can also be given on their own. Rendering is safe from several threads.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """Raises `ChatTemplateError` if a template cannot be compiled."""
        self.source = source
        self._template = _compile(source)
        self._tool_template = _compile(tool_source) if tool_source is not None else self._template
        self.variables = free_variables(source) | free_variables(tool_source or "")
        """The names that the templates read and do not set, for example `messages` and `enable_thinking`."""
        given = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {**(named_tokens or {}), **{name: text for name, text in given.items() if text is not None}}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in a GGUF file's metadata. A file without one gets that of the turn markers in its
        vocabulary; None if it has no such markers either."""
        source = metadata.get("tokenizer.chat_template") or template_for(tokenizer.special_ids)
        if source is None:
            return None
        tool_source = metadata.get("tokenizer.chat_template.tool_use")
        return cls(str(source), named_tokens=tokenizer.named_tokens, tool_source=tool_source)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in a Hugging Face folder: `chat_template.jinja`, else the one in `tokenizer_config.json` or
        `chat_template.json`; None if there is none and the vocabulary has no turn markers."""
        sources = _folder_templates(Path(folder))
        source = sources.get("default") or template_for(tokenizer.special_ids)
        if source is None:
            return None
        return cls(source, named_tokens=tokenizer.named_tokens, tool_source=sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text. `extra` are further variables the template may read (for example `enable_thinking`).
        Raises `ChatTemplateError`."""
        return self._render(_inputs(messages, tools, extra), add_generation_prompt)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        suffix: str = "",
        known: Known | None = None,
        until: str | None = None,
        **extra: Any,
    ) -> list[int]:
        """The prompt's token ids: special tokens where the template writes them, plain text for everything the
        messages, tools and `extra` say. BOS comes first if the model expects one and the template does not write it.
        `suffix` follows the prompt and is read as if the template had written it. With `known`, only what follows its
        mark is encoded, behind its ids; with `until`, only what comes before that mark. Counting a prompt's tokens and
        running it both use this. Raises `ChatTemplateError`."""
        inputs = _inputs(messages, tools, extra)
        text = self._render(inputs, add_generation_prompt)
        disguise = Disguise(tokenizer.look_alikes, inputs, self.source)
        hidden = disguise.hide(inputs)
        if hidden != inputs:
            hidden_text = self._render(hidden, add_generation_prompt)
            if disguise.reveal(hidden_text) != text:
                raise ChatTemplateError(
                    "the chat template treats a special token written inside a message as its own; remove it from the "
                    "message"
                )
            text = hidden_text
        text += suffix
        if known is not None or until is not None:
            text = _cut(text, known.mark if known is not None else None, until)
        parts = [disguise.reveal(p) if isinstance(p, str) else p for p in tokenizer.split_special(text)]
        ids = tokenizer.encode_parts(parts, add_bos=tokenizer.add_bos and known is None)
        return ids if known is None else known.join(ids)

    def _render(self, inputs: dict[str, Any], add_generation_prompt: bool) -> str:
        template = self._tool_template if inputs["tools"] is not None else self._template
        variables = {**self._tokens, "documents": None, **inputs, "add_generation_prompt": add_generation_prompt}
        try:
            return render_bounded(template, variables)
        except SandboxError as error:
            raise ChatTemplateError(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not accept these messages: {_line(error)}") from error
        except (MemoryError, RecursionError) as error:
            raise ChatTemplateError(
                f"the chat template was stopped: it needs too much memory or nests too deeply (limit {MAX_OUTPUT} "
                "characters)"
            ) from error
        except Exception as error:  # whatever the template's own operations raise: it is a program
            raise ChatTemplateError(
                f"the chat template cannot handle these messages: {type(error).__name__}: {_line(error)}"
            ) from error


def _cut(text: str, after: str | None, until: str | None) -> str:
    """What is between two marks. Raises `ChatTemplateError` when the template has not written one of them, once."""
    for mark in filter(None, (after, until)):
        if text.count(mark) != 1:
            raise ChatTemplateError("the chat template does not show every message as it is")
    if after is not None:
        text = text.partition(after)[2]
    return text if until is None else text.partition(until)[0]


def _compile(source: str) -> jinja2.Template:
    try:
        return compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has an error in line {error.lineno}: {_line(error)}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise ChatTemplateError(f"the chat template cannot be compiled: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _inputs(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The template's variables, as copies made of plain data only: objects would bring methods into the sandbox."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages must hold at least one message")
    if tools is not None and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence)):
        raise ChatTemplateError(f"tools must be a list of tool descriptions, got {type(tools).__name__}")
    return {
        **{name: _plain(value, name) for name, value in extra.items()},
        "messages": [_message(message, i) for i, message in enumerate(messages)],
        "tools": None if tools is None else [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
    }


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message as templates know it: fields that are None are left out, reasoning is found under its usual name."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got {type(message).__name__}")
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise ChatTemplateError(f"{where} has no role; every message needs one (system, user, assistant, tool)")
    content = plain.get("content", "")
    if not isinstance(content, (str, list)):
        raise ChatTemplateError(f"{where}.content must be text or a list of parts, got {type(content).__name__}")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > _DEPTH:
        raise ChatTemplateError(f"{where} is nested more than {_DEPTH} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # subclasses (enumerations) may carry methods
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise ChatTemplateError(f"{where} holds a value of type {type(value).__name__}; supported: what JSON can express")


def _folder_templates(folder: Path) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
        return {name: path.read_text(encoding="utf-8") for name, path in {**named, "default": file}.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise ChatTemplateError(f"{path} is not a JSON object ({_line(error)})") from error
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return {entry["name"]: entry["template"] for entry in value if {"name", "template"} <= entry.keys()}
    return {}
