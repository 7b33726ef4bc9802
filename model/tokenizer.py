"""Text to token ids and back.

Text of users and text of templates are different things: in the former a written-out special token ("<|im_end|>") is
plain text, in the latter it is the token. `encode` takes the former by default and the latter with `special=True`;
`encode_parts` takes a mixture.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import tokenizer_gguf, tokenizer_json
from .token_split import LookAlikes, Part, TokenSplitter
from .vocabulary import TokenizerError, TokenKind, Vocabulary, end_ids

__all__ = ["Part", "Tokenizer", "TokenizerError"]

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class Encoder(Protocol):
    def encode(self, parts: Sequence[Part]) -> list[int]:
        """The ids of plain text and given tokens; plain text never becomes a special token."""
        ...


class Tokenizer:
    """The tokenizer of one model. Immutable and safe to use from several threads.

    `add_bos` says whether the model expects prompts to start with `bos_id`; `eos_ids` end a text or a turn;
    `named_tokens` are the texts templates refer to as `bos_token`, `eos_token` and so on.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Sequence[int] = (),
        add_bos: bool = False,
        strip_first_space: bool = False,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._strip_first_space = strip_first_space
        self._special_ids = vocabulary.special_ids()
        self._splitter = TokenSplitter(self._special_ids)
        self._bytes = functools.lru_cache(maxsize=1 << 16)(vocabulary.token_bytes)
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = tuple(end_ids)
        self.add_bos = add_bos and bos_id is not None
        self.named_tokens = dict(named_tokens or {})

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata: names such as `tokenizer.ggml.tokens` to plain values (as
        `read_header` gives them) or to the fields of a `gguf.GGUFReader`. Raises `TokenizerError`."""
        metadata = {name: _plain(value) for name, value in metadata.items() if name.startswith("tokenizer.")}
        vocabulary, encoder = tokenizer_gguf.build(metadata)
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
        ids = {role: _token_id(metadata, name, len(vocabulary.tokens)) for role, name in roles.items()}
        sentence_piece = metadata["tokenizer.ggml.model"] == "llama"
        return cls(
            vocabulary,
            encoder,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            end_ids=end_ids(vocabulary, (ids["eos"], ids["eot"], ids["eom"])),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", sentence_piece)),
            strip_first_space=encoder.space_prefix,
            named_tokens={
                f"{role}_token": vocabulary.tokens[token_id]
                for role in ("bos", "eos", "unk", "pad")
                if (token_id := ids[role]) is not None
            },
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer in a `tokenizer.json`, or in a folder that has one; `tokenizer_config.json`,
        `special_tokens_map.json` and `generation_config.json` beside it are read too. Raises `TokenizerError`."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"{file} does not exist; a Hugging Face folder needs a tokenizer.json")
        settings = tokenizer_json.read_settings(file.parent)
        vocabulary, encoder, specials, core = tokenizer_json.build(file)
        ids = {role: core.token_to_id(text) for role, text in settings.named_tokens.items()}
        bos_id, eos_id = ids.get("bos_token"), ids.get("eos_token")
        first_bytes = b"".join(map(vocabulary.token_bytes, encoder.encode(["a"])))
        add_bos = settings.add_bos
        if add_bos is None:
            add_bos = core.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
        return cls(
            vocabulary,
            encoder,
            bos_id=bos_id,
            eos_id=eos_id,
            end_ids=end_ids(vocabulary, (eos_id, *settings.end_ids)),
            add_bos=add_bos,
            strip_first_space=not vocabulary.byte_level and first_bytes.startswith(b" "),
            named_tokens=settings.named_tokens,
        )

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens: those only templates and the model itself may write."""
        return dict(self._special_ids)

    @functools.cached_property
    def look_alikes(self) -> LookAlikes:
        """Finds what reads like a special token of this model."""
        return LookAlikes(self._special_ids)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. With `special`, written-out special tokens become those tokens; without, they stay
        text. With `add_bos`, BOS comes first (once, if the text already begins with it and `special` is set)."""
        parts = self.split_special(text) if special else [text]
        return self.encode_parts(parts, add_bos=add_bos)

    def encode_parts(self, parts: Sequence[Part], *, add_bos: bool = False) -> list[int]:
        """Token ids of plain text and, between it, tokens given by their id."""
        ids = self._encoder.encode([_valid(part) if isinstance(part, str) else part for part in parts if part != ""])
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def split_special(self, text: str) -> list[Part]:
        """`text` cut at written-out special tokens."""
        return self._splitter.split(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Special tokens are left out or written out."""
        if skip_special:
            data = b"".join(map(self.token_bytes, ids))
        else:
            data = b"".join(self.token_str(i).encode() if self._is_special(i) else self.token_bytes(i) for i in ids)
        if self._strip_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a running text: part of a character, or several words. Empty for special tokens
        and for ids past the vocabulary."""
        return self._bytes(token_id)

    def token_str(self, token_id: int) -> str:
        """The token as its file writes it, for example `Ġthe`, `▁the` or `<0x0A>`; empty past the vocabulary (some
        models have more rows than tokens)."""
        return self._vocabulary.tokens[token_id] if token_id < self.vocab_size else ""

    def _is_special(self, token_id: int) -> bool:
        return token_id < self.vocab_size and self._vocabulary.kinds[token_id] in (
            TokenKind.CONTROL,
            TokenKind.UNKNOWN,
        )


def _valid(text: str) -> str:
    """JSON can carry half of a surrogate pair, which no encoding of Unicode can."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _plain(value: Any) -> Any:
    contents = getattr(value, "contents", None)
    return contents() if callable(contents) else value


def _token_id(metadata: Mapping[str, Any], role: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return int(value) if value is not None and 0 <= int(value) < size else None
