"""How a model is made to think before it answers, and how it says that it has finished.

A model that was trained to think has markers around its thoughts in its chat template (`native`), often with a switch
for them. Any other chat model is asked to (`generic`): an instruction follows the last user message, and the markers
are plain words, after which even a small model has something to say (after `</think>`, SmolLM2-135M mostly ends its
turn). In both cases the opening marker ends the prompt, so that the first generated token is a thought, and all else is
said in token ids: sequences that end the thoughts, and one that concludes them for a model that found no end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..configs.levels import MAX_CLOSE, MAX_CLOSE_TOKENS, MAX_CONCLUDE_TOKENS
from .chat_template import ChatTemplate, ChatTemplateError, Known
from .tokenizer import Tokenizer

Ids = tuple[int, ...]

NATIVE_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
GENERIC_MARKERS = (("Let me think step by step.", "Final answer:"), ("<think>", "</think>"))
"""The first whose end the vocabulary writes in few enough tokens."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn thoughts on and off."""

PREAMBLE = '\n\nThink step by step first. Then write "{close}" followed by your answer.'
CONCLUSIONS = {"native": ("\n\nThat is enough thought; now I can answer.\n", "\n"), "generic": ("\n\n",)}
"""What is written before the closing marker at the end of the budget: the first that is short enough, else nothing."""

_AROUND = (("a\n", ""), ("a\n", "\n\n"), ("a", "\n"), ("a. ", " a"), ("a.", "\n\n"), ("a)", "a"), ("**", "**"))
"""Texts around a closing marker: the neighbours may share a token with it."""


class Thinker:
    """One model's way of thinking. Immutable and safe to use from several threads.

    `close`: up to 4 token sequences of at most 8 tokens; thoughts end where one of them is the end of the generated
    ids. `conclusions`: the longest first, each of at most 48 tokens, the last of which are one of `close`. Both are
    empty for a vocabulary that needs too many tokens for the closing marker: such a model cannot think.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        native = next((pair for pair in NATIVE_MARKERS if pair[1] in template.source), None)
        self._switches = tuple(name for name in SWITCHES if name in template.variables)
        if native is None and "enable_thinking" in self._switches:
            native = NATIVE_MARKERS[0]
        self.kind: Literal["native", "generic"] = "generic" if native is None else "native"
        pairs = GENERIC_MARKERS if native is None else (native,)
        self.open_text, self.close_text = next((pair for pair in pairs if _closing(tokenizer, pair[1])), pairs[0])
        self._suffix_on = "" if self._opens(True) else f"{self.open_text}\n"
        self._suffix_off = f"{self.close_text}\n\n" if native is not None and self._opens(False) else ""
        self.close = _closing(tokenizer, self.close_text)
        self.conclusions = self._conclusions()

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        known: Known | None = None,
        **extra: Any,
    ) -> list[int]:
        """The prompt's token ids; with `thinking` they end with the opening marker, without it the model answers at
        once. `known` is that of `ChatTemplate.encode`, `extra` are variables of the template. Raises
        `ChatTemplateError`, and `ValueError` for thoughts of a model that cannot think."""
        if thinking and not self.close:
            raise ValueError(
                f"the vocabulary needs more than {MAX_CLOSE_TOKENS} tokens for {self.close_text!r}, which ends "
                "thoughts; supported for this model: no thinking"
            )
        if thinking and self.kind == "generic":
            messages = self._instructed(messages)
        suffix = self._suffix_on if thinking else self._suffix_off
        switches: dict[str, Any] = {name: thinking for name in self._switches}
        extra = {**switches, **extra}
        return self._template.encode(self._tokenizer, messages, tools=tools, suffix=suffix, known=known, **extra)

    def conclusion(self, budget: int) -> Ids:
        """What concludes thoughts of `budget` tokens, itself included: the longest that takes at most half of them,
        else the shortest. Empty if that would leave no token for a thought."""
        for ids in self.conclusions:
            if 2 * len(ids) <= budget:
                return ids
        shortest = self.conclusions[-1] if self.conclusions else ()
        return shortest if len(shortest) < budget else ()

    def _opens(self, thinking: bool) -> bool:
        """Whether prompts end with the opening marker as the template writes them."""
        try:
            messages = [{"role": "user", "content": "a"}]
            switches: dict[str, Any] = {name: thinking for name in self._switches}
            text = self._template.render(messages, **switches)
        except ChatTemplateError:
            return False
        return text.rstrip().endswith(self.open_text)

    def _conclusions(self) -> tuple[Ids, ...]:
        written = [
            tuple(self._tokenizer.encode(text + self.close_text, special=True)) for text in CONCLUSIONS[self.kind]
        ]
        ending = [ids for ids in written if any(ids[-len(close) :] == close for close in self.close)]
        return (*(ids for ids in ending if len(ids) <= MAX_CONCLUDE_TOKENS), *self.close[:1])

    def _instructed(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """`messages` with the instruction to think at the end of the last user message."""
        preamble = PREAMBLE.format(close=self.close_text)
        for i in range(len(messages) - 1, -1, -1):
            message = messages[i]
            if message.get("role") == "user":
                content = message.get("content") or ""
                content = content + preamble if isinstance(content, str) else [*content, _part(preamble)]
                return [*messages[:i], {**message, "content": content}, *messages[i + 1 :]]
        return [*messages, {"role": "user", "content": preamble.strip()}]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _closing(tokenizer: Tokenizer, marker: str) -> tuple[Ids, ...]:
    """The token sequences that write `marker`: one if the vocabulary has it as a token, else as it is cut in
    different surroundings, the likeliest first. Empty if all are too long."""
    alone = tuple(tokenizer.encode(marker, special=True))
    if len(alone) == 1:
        return (alone,)
    found = [_span(tokenizer, before, marker, after) for before, after in _AROUND]
    short = [ids for ids in dict.fromkeys(found) if ids is not None and len(ids) <= MAX_CLOSE_TOKENS]
    return tuple(short[:MAX_CLOSE])


def _span(tokenizer: Tokenizer, before: str, marker: str, after: str) -> Ids | None:
    """The tokens that touch `marker` between two texts; None if its bytes do not come back."""
    ids = tokenizer.encode(before + marker + after)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    start = b"".join(pieces).find(marker.encode())
    if start < 0:
        return None
    end, touching, position = start + len(marker.encode()), [], 0
    for token, piece in zip(ids, pieces, strict=True):
        if position < end and position + len(piece) > start:
            touching.append(token)
        position += len(piece)
    return tuple(touching)
