"""Log-probabilities beside the text of an answer."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable

from ..engine.request import Emission, TokenLogprob
from ..engine.thoughts import Thinking, ThoughtEnd
from .service import Loaded


def token_bytes(loaded: Loaded, token: int) -> bytes:
    """Bytes of a token in running text; of a special token those of its name; none without a tokenizer."""
    tokenizer = loaded.model.tokenizer
    if tokenizer is None:
        return b""
    return tokenizer.token_bytes(token) or tokenizer.token_str(token).encode()


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI's stand-in for an impossible token is -9999."""
    return max(logprob, -9999.0)


class TextAligner:
    """Holds log-probabilities back until their token's text is sent, as text may lag behind tokens.

    Tokens whose text is never sent (a stop string, the end of the turn) drop out, so that the tokens listed and the
    text agree. `take` gives (log-probability, position of the token's first character in the answer) pairs. Thoughts,
    and the white space after them, are not listed.
    """

    def __init__(self, running_bytes: Callable[[int], bytes] | None, thinking: Thinking | None = None) -> None:
        self._bytes = running_bytes
        self._thoughts = ThoughtEnd(thinking.close) if thinking is not None else None
        self._skip_space = thinking is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = 0  # characters before the next token
        self._sent = 0
        self._waiting: deque[tuple[TokenLogprob, int]] = deque()

    def take(self, emission: Emission) -> list[tuple[TokenLogprob, int]]:
        for item in emission.logprobs:
            if self._thoughts is not None and not self._thoughts.ended:
                self._thoughts.push(item.token_id)
                continue
            text = self._decoder.decode(self._bytes(item.token_id)) if self._bytes is not None else ""
            if self._skip_space and text:
                text = text.lstrip()
                self._skip_space = not text
                if not text:
                    continue
            self._waiting.append((item, self._start))
            self._start += len(text)
        self._sent += len(emission.text)
        ready = []
        while self._waiting and (self._bytes is None or self._waiting[0][1] < self._sent):
            ready.append(self._waiting.popleft())
        return ready


def aligner(loaded: Loaded, thinking: Thinking | None = None) -> TextAligner:
    tokenizer = loaded.model.tokenizer
    return TextAligner(None if tokenizer is None else tokenizer.token_bytes, thinking)
