"""Thoughts: what a model writes for itself before it answers, and where they end.

Thoughts end when one of a few token sequences is the end of the generated ids, and at the budget such an end is written
for the model. Both are said in token ids and in nothing else, so that the device, which forces the end, and the host,
which splits the text, agree without telling each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ...configs.levels import MAX_CLOSE, MAX_CLOSE_TOKENS, MAX_CONCLUDE_TOKENS
from .text import TextStream


@dataclasses.dataclass(frozen=True)
class Thinking:
    """How one answer thinks. Its first generated token is a thought (the prompt ends with the opening marker).

    `budget` tokens may be thoughts of the model's own choice. If none of `close` ended them, the tokens at generated
    indices `budget`, `budget + 1`, ... are those of `conclude`, whatever the model would have chosen, until one of
    `close` is the end of the generated ids; at the latest that is the last token of `conclude`.
    """

    budget: int
    close: tuple[tuple[int, ...], ...]
    conclude: tuple[int, ...]

    @property
    def most(self) -> int:
        """Tokens that count as thoughts at most."""
        return self.budget + len(self.conclude)

    def __post_init__(self) -> None:
        """Raises `ValueError` in one sentence."""
        if self.budget < 1:
            raise ValueError(f"a thinking budget must be at least 1 token, got {self.budget} (no thinking: None)")
        if not 1 <= len(self.close) <= MAX_CLOSE:
            raise ValueError(f"1 to {MAX_CLOSE} token sequences may end thoughts, got {len(self.close)}")
        for sequence in self.close:
            if not 1 <= len(sequence) <= MAX_CLOSE_TOKENS:
                raise ValueError(
                    f"a sequence that ends thoughts has 1 to {MAX_CLOSE_TOKENS} tokens, got {len(sequence)}"
                )
        if not 1 <= len(self.conclude) <= MAX_CONCLUDE_TOKENS:
            raise ValueError(
                f"the conclusion of thoughts has 1 to {MAX_CONCLUDE_TOKENS} tokens, got {len(self.conclude)}"
            )
        ends = ThoughtEnd(self.close)
        if [ends.push(token) for token in self.conclude] != [False] * (len(self.conclude) - 1) + [True]:
            raise ValueError("the conclusion of thoughts must end with a sequence that ends them, and hold no other")


class ThoughtEnd:
    """Finds the end of thoughts in token ids that come one at a time."""

    def __init__(self, close: Sequence[tuple[int, ...]]) -> None:
        self._close = close
        self._tokens = frozenset(token for sequence in close for token in sequence)
        self._longest = max(map(len, close))
        self._tail: tuple[int, ...] = ()
        self.ended = False
        self.held = 0
        """How many of the last tokens are, or may become, what ends the thoughts."""

    def push(self, token_id: int) -> bool:
        """Takes the next token; true if thoughts end with it."""
        if token_id not in self._tokens:
            self._tail, self.held = (), 0
            return False
        self._tail = (*self._tail, token_id)[-self._longest :]
        found = [len(close) for close in self._close if self._tail[-len(close) :] == close]
        if found:
            self.ended, self.held = True, max(found)
            return True
        self.held = max(
            (n for close in self._close for n in range(1, len(close)) if self._tail[-n:] == close[:n]), default=0
        )
        return False


class Channels:
    """The text of one request as its tokens arrive: thoughts (if `thinking`), then the answer.

    Used in place of a `TextStream`:

        channels = Channels(tokenizer.token_bytes, params.stop, params.thinking)
        thought, answer, stop_at = channels.push(token_ids)   # of every step
        thought, answer = channels.finish()                   # at the end: what was held back
        channels.thought_tokens                               # thought tokens so far, the closing ones included

    Both texts are certain when they come out, and how tokens are grouped into calls changes neither: the closing tokens
    belong to neither text, also when they are spread over calls. `stop_at` is the index in `token_ids` of the token
    that completed a stop string, or None; stop strings are looked for in the answer only. White space around the
    thoughts and between them and the answer is dropped. Without `thinking` all of it is the answer, as it is.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), thinking: Thinking | None = None
    ) -> None:
        self._end = ThoughtEnd(thinking.close) if thinking is not None else None
        self._thought = TextStream(token_bytes, skip_space=True)
        self._answer = TextStream(token_bytes, stop, skip_space=thinking is not None)
        self._held: list[int] = []  # tokens that may become what ends the thoughts
        self._space = ""  # white space that is thought text only if more follows
        self.thought_tokens = 0

    @property
    def thinking(self) -> bool:
        """Whether the next token is a thought."""
        return self._end is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._answer.stopped

    def push(self, token_ids: Sequence[int]) -> tuple[str, str, int | None]:
        """The thought text and the answer text that have become certain, and where in `token_ids` a stop string was
        completed."""
        thought, used = self._think(token_ids) if self._end is not None else ("", 0)
        answer, stop_at = self._answer.push(token_ids[used:])
        return thought, answer, None if stop_at is None else used + stop_at

    def finish(self) -> tuple[str, str]:
        """The texts that were held back."""
        thought = ""
        if self._end is not None:
            thought = self._trim(self._thought.push(self._held)[0] + self._thought.finish())
            self._held = []
        return thought, self._answer.finish()

    def _think(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Thought text, and how many of the tokens are thoughts."""
        assert self._end is not None
        certain: list[int] = []
        used, ended = 0, False
        for token in token_ids:
            used += 1
            ended = self._end.push(token)
            self._held.append(token)
            sure = len(self._held) - self._end.held
            certain += self._held[:sure]
            del self._held[:sure]
            if ended:
                break
        self.thought_tokens += used
        text = self._thought.push(certain)[0]
        if ended:
            text += self._thought.finish()
            self._end, self._held = None, []
        return self._trim(text), used

    def _trim(self, text: str) -> str:
        """`text` after the white space that was held back, without that at its end."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown
