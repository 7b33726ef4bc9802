"""The tokens of a model and the bytes they stand for."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection, Sequence

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this character."""


class TokenizerError(ValueError):
    """The tokenizer data is missing, inconsistent or of a kind that is not supported; one sentence."""


class TokenKind(enum.IntEnum):
    """What a token is for; the numbers are those of `tokenizer.ggml.token_type` in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # special: never made from plain text, no text of its own
    USER_DEFINED = 4  # taken out of plain text before anything else, for example runs of newlines
    UNUSED = 5
    BYTE = 6  # <0x00> to <0xFF>
    MARKUP = 7  # not in files: text when the model writes it, never made from plain text


END_TOKENS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<eos>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)  # fmt: skip
"""Tokens that end a turn or a text in the known model families. Files name one end token, chat models use several."""


@functools.cache
def byte_of_char() -> dict[str, int]:
    """The byte behind each character of a byte-level BPE token.

    GPT-2's table: printable Latin-1 bytes are written as themselves, the other 68 as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is the token with id i as its file writes it, `kinds[i]` what it is for.

    `byte_level` tokens are written in GPT-2's byte alphabet, others with U+2581 for spaces and `<0xNN>` for bytes.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    byte_level: bool

    def special_ids(self) -> dict[str, int]:
        """The tokens that plain text never becomes, by their text."""
        return self.ids(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.MARKUP)

    def ids(self, *kinds: TokenKind) -> dict[str, int]:
        """The tokens of these kinds, by their text."""
        return {self.tokens[i]: i for kind in kinds for i in self._by_kind.get(kind, ())}

    @functools.cached_property
    def _by_kind(self) -> dict[int, list[int]]:
        by_kind: dict[int, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            by_kind.setdefault(kind, []).append(i)
        return by_kind

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a running text; empty for tokens that are not text and ids past the vocabulary
        (models pad their embedding)."""
        if token_id < 0:
            raise IndexError(f"token ids start at 0, got {token_id}")
        if token_id >= len(self.tokens):
            return b""
        token, kind = self.tokens[token_id], self.kinds[token_id]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED):
            return b""
        if kind in (TokenKind.USER_DEFINED, TokenKind.MARKUP):
            return token.encode("utf-8")
        if kind == TokenKind.BYTE:
            return bytes([int(token[3:5], 16)])
        if self.byte_level:
            return _undo_byte_level(token)
        return token.replace(SPACE_MARK, " ").encode("utf-8")


def end_ids(vocabulary: Vocabulary, named: Collection[int | None]) -> tuple[int, ...]:
    """Ids that end a generation, ascending: those the file `named` and the special tokens with a known end name."""
    known = {i for token, i in vocabulary.ids(TokenKind.CONTROL).items() if token in END_TOKENS}
    return tuple(sorted(known.union(i for i in named if i is not None and 0 <= i < len(vocabulary.tokens))))


def _undo_byte_level(token: str) -> bytes:
    table = byte_of_char()
    if all(char in table for char in token):
        return bytes(table[char] for char in token)
    return b"".join(bytes([table[char]]) if char in table else char.encode("utf-8") for char in token)
