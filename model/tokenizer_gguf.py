"""Tokenizers from the metadata of GGUF files: byte-level BPE (`gpt2`) and SentencePiece (`llama`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from .pretokenizers import pre_tokenizer
from .token_split import Part, TokenSplitter, encode_ids
from .vocabulary import END_TOKENS, SPACE_MARK, TokenizerError, TokenKind, Vocabulary

_HTML_END = "</s>"
"""The end of a text in Llama 2, but of struck-out HTML in Gemma's vocabulary, where it must not end anything."""


@dataclasses.dataclass(frozen=True)
class FragmentEncoder:
    """Encodes text around special tokens as llama.cpp does: user-defined tokens are taken out first, then each piece
    of text is tokenized on its own."""

    core: Tokenizer
    user_defined: TokenSplitter
    spaces_marked: bool
    space_prefix: bool

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """The ids of `parts`; text in them never becomes a special token, as the core does not know any."""
        ids: list[int] = []
        at_start = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                at_start = True
                continue
            for piece in self.user_defined.split(part):
                if isinstance(piece, int):
                    ids.append(piece)
                    at_start = True
                else:
                    ids.extend(self._encode_text(piece, at_start))
                    at_start = False
        return ids

    def _encode_text(self, text: str, at_start: bool) -> list[int]:
        if self.spaces_marked:
            text = (" " + text if at_start and self.space_prefix else text).replace(" ", SPACE_MARK)
        return encode_ids(self.core, text)


def build(metadata: Mapping[str, Any]) -> tuple[Vocabulary, FragmentEncoder]:
    """The vocabulary and encoder that `metadata` describes; raises `TokenizerError`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentence_piece(metadata)
    raise TokenizerError(f"tokenizer.ggml.model is {kind!r}, which is not supported; supported: gpt2, llama")


def _vocabulary(metadata: Mapping[str, Any], byte_level: bool) -> Vocabulary:
    tokens = list(_field(metadata, "tokenizer.ggml.tokens"))
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = [int(TokenKind.NORMAL)] * len(tokens) if kinds is None else np.asarray(kinds).tolist()
    if len(kinds) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    for i, token in enumerate(tokens):
        if kinds[i] in (TokenKind.NORMAL, TokenKind.USER_DEFINED):  # declared as text, taken for special by llama.cpp
            if token in END_TOKENS:
                kinds[i] = int(TokenKind.CONTROL)
            elif token == _HTML_END:
                kinds[i] = int(TokenKind.MARKUP)
    return Vocabulary(tokens, kinds, byte_level)


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Vocabulary, FragmentEncoder]:
    vocabulary = _vocabulary(metadata, byte_level=True)
    try:
        rules = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    ids = _text_ids(vocabulary)
    merges = []
    for merge in _field(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    core = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.ignore_merges))
    core.pre_tokenizer = rules.build()
    encoder = FragmentEncoder(core, _user_defined(vocabulary), spaces_marked=False, space_prefix=False)
    return vocabulary, encoder


def _sentence_piece(metadata: Mapping[str, Any]) -> tuple[Vocabulary, FragmentEncoder]:
    vocabulary = _vocabulary(metadata, byte_level=False)
    scores = np.asarray(_field(metadata, "tokenizer.ggml.scores"), np.float32)
    if scores.shape != (len(vocabulary.tokens),):
        raise TokenizerError(f"tokenizer.ggml.scores has {scores.size} entries for {len(vocabulary.tokens)} tokens")
    ids = _text_ids(vocabulary)
    if not vocabulary.ids(TokenKind.BYTE):
        raise TokenizerError("the SentencePiece vocabulary has no byte tokens (<0x00> to <0xFF>), which are needed")
    mergeable = {token for token, i in ids.items() if vocabulary.kinds[i] != TokenKind.BYTE}
    order = np.argsort(-scores, kind="stable").tolist()
    merges = _merges([vocabulary.tokens[i] for i in order], mergeable)
    core = Tokenizer(models.BPE(ids, merges, byte_fallback=True))
    space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return vocabulary, FragmentEncoder(core, _user_defined(vocabulary), spaces_marked=True, space_prefix=space_prefix)


def _merges(tokens: Sequence[str], mergeable: Collection[str]) -> list[tuple[str, str]]:
    """Every way to make each token out of two others, best token first.

    SentencePiece joins the neighbours whose union has the best score, so the rank of a merge is that of its result.
    """
    merges = []
    for token in tokens:
        if token not in mergeable:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in mergeable and (right := token[cut:]) in mergeable:
                merges.append((left, right))
    return merges


def _text_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The tokens that plain text may become; of two tokens with the same text the later one, as in llama.cpp."""
    special = frozenset(vocabulary.special_ids().values())
    return {token: i for i, token in enumerate(vocabulary.tokens) if i not in special}


def _user_defined(vocabulary: Vocabulary) -> TokenSplitter:
    return TokenSplitter({token: i for token, i in vocabulary.ids(TokenKind.USER_DEFINED).items() if token})


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    if name not in metadata:
        raise TokenizerError(f"the tokenizer metadata has no field {name}")
    return metadata[name]
