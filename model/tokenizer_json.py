"""Tokenizers from Hugging Face's `tokenizer.json`, with the settings of the files beside it."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from .token_split import Part, TokenSplitter, encode_ids
from .vocabulary import TokenizerError, TokenKind, Vocabulary

_MODELS = ("BPE", "Unigram")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the files beside tokenizer.json say: token texts by role (`bos_token`, ...), whether prompts start with
    BOS (None: not said), and further ids that end a generation."""

    named_tokens: Mapping[str, str]
    add_bos: bool | None
    end_ids: tuple[int, ...]


class PipelineEncoder:
    """Encodes text around special tokens through the file's own pipeline.

    The library would turn every special token it reads in the text into its id. Here it is told to read them as plain
    text, and stand-ins with random names, which no text can contain, mark the places of real ones.
    """

    def __init__(self, core: Tokenizer, specials: Mapping[int, AddedToken]) -> None:
        self._core = core
        self._core.encode_special_tokens = True
        self._specials = TokenSplitter({token.content: i for i, token in specials.items()})
        self._texts = {i: token.content for i, token in specials.items()}
        name = f"\U0010fffd{secrets.token_hex(16)}"
        flags = {i: (token.lstrip, token.rstrip) for i, token in specials.items()}
        kinds = sorted({(False, False), *flags.values()})
        stand_ins = {kind: f"{name}-{n}\U0010fffd" for n, kind in enumerate(kinds)}
        core.add_tokens(
            [AddedToken(text, lstrip=kind[0], rstrip=kind[1], normalized=False) for kind, text in stand_ins.items()]
        )
        self._stand_in = {i: stand_ins[kind] for i, kind in flags.items()}
        self._break = stand_ins[False, False]
        self._stand_in_ids = frozenset(core.token_to_id(text) for text in stand_ins.values())

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """The ids of `parts`; text in them never becomes a special token."""
        ids = self._encode(parts)
        placed = sum(isinstance(part, int) for part in parts)
        if sum(i in self._texts for i in ids) > placed:  # a word-like special token that the model knows as text
            ids = self._encode(list(self._broken_up(parts)))
        return ids

    def _encode(self, parts: Sequence[Part | None]) -> list[int]:
        placed = [part for part in parts if not isinstance(part, str)]
        text = "".join(part if isinstance(part, str) else self._mark(part) for part in parts)
        ids, specials = [], iter(placed)
        for token_id in encode_ids(self._core, text):
            if token_id not in self._stand_in_ids:
                ids.append(token_id)
            elif (special := next(specials)) is not None:
                ids.append(special)
        return ids

    def _mark(self, token_id: int | None) -> str:
        return self._break if token_id is None else self._stand_in.get(token_id, self._break)

    def _broken_up(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        """`parts` with a break (None) after the first character of each special token that is written in text."""
        for part in parts:
            if isinstance(part, int):
                yield part
                continue
            position = 0
            for piece in self._specials.split(part):
                length = len(piece) if isinstance(piece, str) else len(self._texts[piece])
                text, position = part[position : position + length], position + length
                if isinstance(piece, str):
                    yield text
                else:
                    yield from (text[:1], None, text[1:])


def build(path: Path) -> tuple[Vocabulary, PipelineEncoder, dict[int, AddedToken], Tokenizer]:
    """Vocabulary, encoder, special tokens and the library's tokenizer for the `tokenizer.json` at `path`."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        core = Tokenizer.from_str(text)
    except OSError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer.json that can be read ({error})") from error
    model = data.get("model", {}).get("type") or "BPE"
    if model not in _MODELS:
        raise TokenizerError(
            f"{path} holds a {model} tokenizer, which is not supported; supported: {', '.join(_MODELS)}"
        )
    core.no_padding()
    core.no_truncation()
    added = core.get_added_tokens_decoder()
    vocabulary = _vocabulary(core, added, data)
    specials = {i: token for i, token in added.items() if token.special}
    return vocabulary, PipelineEncoder(core, specials), specials, core


def read_settings(folder: Path) -> Settings:
    """The settings in `tokenizer_config.json`, `special_tokens_map.json` and `generation_config.json`, if there."""
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    named = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    add_bos = config.get("add_bos_token")
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return Settings(named, add_bos if isinstance(add_bos, bool) else None, tuple(i for i in ends if isinstance(i, int)))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _vocabulary(core: Tokenizer, added: Mapping[int, AddedToken], data: Mapping[str, Any]) -> Vocabulary:
    byte_level = _uses_byte_level(data)
    ids = core.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values()) + 1)
    kinds = [int(TokenKind.UNUSED)] * len(tokens)
    for token, i in ids.items():
        tokens[i], kinds[i] = token, int(TokenKind.NORMAL)
        if not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[i] = int(TokenKind.BYTE)
    for i, entry in added.items():
        tokens[i] = entry.content
        kinds[i] = int(TokenKind.CONTROL if entry.special else TokenKind.USER_DEFINED)
    return Vocabulary(tokens, kinds, byte_level)


def _uses_byte_level(data: Mapping[str, Any]) -> bool:
    steps = [data.get("decoder"), data.get("pre_tokenizer")]
    while steps:
        step = steps.pop()
        if isinstance(step, dict):
            if step.get("type") == "ByteLevel":
                return True
            steps += step.get("decoders") or step.get("pretokenizers") or []
    return False
