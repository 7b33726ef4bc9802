"""Ids against llama.cpp's for GGUF files and Transformers' for tokenizer.json, as make_tokenizer.py recorded them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.model.gguf_header import read_header
from umbra.model.pretokenizers import PRE_TOKENIZERS
from umbra.model.tokenizer import Tokenizer, TokenizerError
from umbra.model.vocabulary import byte_of_char

GOLDEN = Path(__file__).parents[1] / "golden"
CORPUS = [json.loads(line) for line in (GOLDEN / "tokenizer_corpus.jsonl").read_text(encoding="utf-8").splitlines()]
SMALL = json.loads((GOLDEN / "tokenizer_small.json").read_text(encoding="utf-8"))
HF_FOLDERS = [GOLDEN / "tokenizer_hf_byte_level", GOLDEN / "tokenizer_hf_sentence_piece"]


def both_ways(tokenizer: Tokenizer) -> list[list[list[int]]]:
    return [[tokenizer.encode(text, special=special) for text in CORPUS] for special in (False, True)]


def expected_both_ways(golden: dict[str, Any]) -> list[list[list[int]]]:
    special = [golden["special"].get(str(i), ids) for i, ids in enumerate(golden["plain"])]
    return [golden["plain"], special]


def crc(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())


def bpe(**changes: Any) -> dict[str, Any]:
    """The metadata of a tiny byte-level vocabulary: all bytes, "ab", "abc", two special tokens and one user-defined."""
    tokens = [*byte_of_char(), "ab", "abc", "<|end|>", "<|im_start|>", "[x]"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 258 + [3, 3, 4], np.int32),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 258,
    }
    return {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "b", "ab", "\u2581ab", "  "]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5 + [4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0, -1000.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_models_give_llama_cpp_ids(name: str) -> None:
    from umbra.model.weights.fetch import fetch

    golden = json.loads((GOLDEN / f"tokenizer_{name}.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_gguf(read_header(fetch(name)).metadata)
    assert both_ways(tokenizer) == expected_both_ways(golden)
    assert set(tokenizer.eos_ids) <= set(golden["ends"])
    pieces = 0
    for token in range(tokenizer.vocab_size):  # the one exception is kept as text: see vocabulary.TokenKind.MARKUP
        piece = b"" if tokenizer.token_str(token) == "</s>" else tokenizer.token_bytes(token)
        pieces = zlib.crc32(piece + b"\0", pieces)
    assert pieces == golden["pieces_crc"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_llama_cpp_ids(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**SMALL["bpe"], "tokenizer.ggml.pre": pre})
    assert crc(both_ways(tokenizer)) == SMALL["crc_by_pre"][pre]


@pytest.mark.parametrize("prefix", [False, True])
def test_sentence_piece_gives_llama_cpp_ids(prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf({**SMALL["sentence_piece"], "tokenizer.ggml.add_space_prefix": prefix})
    assert crc(both_ways(tokenizer)) == SMALL["crc_by_space_prefix"][str(prefix)]


@pytest.mark.parametrize("folder", HF_FOLDERS, ids=lambda folder: folder.name)
def test_tokenizer_json_gives_transformers_ids(folder: Path) -> None:
    golden = json.loads((folder / "ids.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(folder)
    plain, special = both_ways(tokenizer)
    assert [plain, special] == expected_both_ways(golden)
    assert tokenizer.add_bos == golden["adds_bos"]
    assert [zlib.crc32(tokenizer.decode(ids).encode()) for ids in special] == golden["decoded_crc"]
    assert not {i for ids in plain for i in ids} & set(tokenizer.special_ids.values())
    assert Tokenizer.from_file(folder / "tokenizer.json").encode("abc") == tokenizer.encode("abc")


def test_fields_of_a_gguf_reader_will_do(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in bpe().items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, list(value) if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = Tokenizer.from_gguf(gguf.GGUFReader(tmp_path / "x.gguf").fields)
    made = Tokenizer.from_gguf(bpe())
    assert read.encode("ab[x]<|end|>", special=True) == made.encode("ab[x]<|end|>", special=True)
    assert (read.bos_id, read.eos_ids, read.special_ids) == (made.bos_id, made.eos_ids, made.special_ids)


def test_special_tokens_in_text_are_text() -> None:
    tokenizer = Tokenizer.from_gguf(bpe())
    text = "a<|end|>[x]"
    assert tokenizer.encode(text, special=True) == [tokenizer.encode("a")[0], 258, 260]
    plain = tokenizer.encode(text)
    assert 258 not in plain and plain[-1] == 260  # a user-defined token is text
    assert tokenizer.decode(plain) == text
    assert (
        tokenizer.decode([258, 259]) == "" and tokenizer.decode([258, 259], skip_special=False) == "<|end|><|im_start|>"
    )
    assert tokenizer.special_ids == {"<|end|>": 258, "<|im_start|>": 259}
    assert tokenizer.encode_parts([258, "ab", "", 259]) == [258, 256, 259]


def test_word_like_special_tokens_in_text_are_text(tmp_path: Path) -> None:
    """A model that has the special token among its words would make it from plain text."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models

    core = Core(models.Unigram([("<unk>", 0.0), ("STOP", -1.0), *((c, -5.0) for c in "STOPabc ")], unk_id=0))
    core.add_special_tokens(["STOP"])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.encode("aSTOPb", special=True)[1] == tokenizer.special_ids["STOP"]
    assert [tokenizer.token_str(i) for i in tokenizer.encode("aSTOPb STOP")] == list("aSTOPb STOP")
    mixed = tokenizer.encode_parts(["STOP", 1, "a"])
    assert mixed.count(1) == 1 and tokenizer.decode(mixed, skip_special=False) == "STOPSTOPa"


def test_bos_comes_once_and_ends_are_found() -> None:
    tokenizer = Tokenizer.from_gguf(bpe(add_bos_token=True))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (259, (258,), True)
    assert tokenizer.encode("ab", add_bos=True) == [259, 256]
    assert tokenizer.encode("<|im_start|>ab", special=True, add_bos=True) == [259, 256]
    assert tokenizer.encode("", add_bos=True) == [259] and tokenizer.encode("") == []
    assert tokenizer.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|end|>"}
    turns = bpe(eos_token_id=256, eot_token_id=257)
    assert Tokenizer.from_gguf(turns).eos_ids == (256, 257, 258)


def test_a_word_that_is_a_token_may_beat_the_merges() -> None:
    def ids(pre: str) -> list[int]:
        return Tokenizer.from_gguf(bpe(pre=pre, merges=["a b"])).encode("abc")

    assert ids("llama-bpe") == [257]
    assert len(ids("dbrx")) == 2


def test_token_bytes() -> None:
    byte_level = Tokenizer.from_gguf(bpe())
    alphabet = byte_of_char()
    assert [byte_level.token_bytes(i) for i in range(256)] == [bytes([byte]) for byte in alphabet.values()]
    assert sorted(alphabet.values()) == list(range(256))
    assert byte_level.token_bytes(258) == b"" and byte_level.token_bytes(260) == b"[x]"
    assert byte_level.token_bytes(5000) == b""  # models pad their embedding
    with pytest.raises(IndexError):
        byte_level.token_bytes(-1)
    pieces = Tokenizer.from_gguf(sentence_piece())
    assert [pieces.token_bytes(i) for i in (0, 1, 3 + 0xE9, 263, 264)] == [b"", b"", b"\xe9", b" ab", b"  "]


def test_sentence_piece_merges_spaces_and_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece())
    assert tokenizer.encode("ab ab") == [262, 263]
    assert tokenizer.encode("a  b") == [260, 264, 261]
    assert tokenizer.encode("\u00e9") == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("<s>", special=True) == [1] and 1 not in tokenizer.encode("<s>")
    prefixed = Tokenizer.from_gguf(sentence_piece(add_space_prefix=True))
    assert prefixed.encode("ab") == [263] and prefixed.decode([263, 263]) == "ab ab"
    assert prefixed.encode("<s>ab", special=True) == [1, 263]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_survives(text: str) -> None:
    byte_level, pieces = Tokenizer.from_gguf(bpe()), Tokenizer.from_gguf(sentence_piece())
    assert byte_level.decode(byte_level.encode(text)) == text
    assert pieces.decode(pieces.encode(text)) == text.replace("\u2581", " ")


def test_half_a_surrogate_pair_is_replaced() -> None:
    tokenizer = Tokenizer.from_gguf(bpe())
    assert tokenizer.decode(tokenizer.encode("a\ud83d!")) == "a\ufffd!"


def test_long_texts_take_linear_time() -> None:
    for tokenizer in (Tokenizer.from_gguf(bpe(pre="llama-bpe")), Tokenizer.from_gguf(sentence_piece())):
        for text in ("ab" * 100_000, " " * 200_000, "<" * 200_000, "\n" * 200_000, "!" * 200_000):
            assert len(tokenizer.encode(text, special=True)) > 0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe(model="bert"), r"tokenizer.ggml.model is 'bert', which is not supported; supported: gpt2, llama"),
        ({}, "tokenizer.ggml.model is None"),
        (bpe(pre="klingon"), r"'klingon', which is not supported; supported: .*llama-bpe.*qwen2.*smollm"),
        (bpe(token_type=[1, 1]), "token_type has 2 entries for 261 tokens"),
        (sentence_piece(scores=[0.0]), "scores has 1 entries for 265 tokens"),
        (sentence_piece(token_type=[1] * 265), "no byte tokens"),
        ({k: v for k, v in bpe().items() if "merges" not in k}, "no field tokenizer.ggml.merges"),
        ({k: v for k, v in bpe().items() if k != "tokenizer.ggml.tokens"}, "no field tokenizer.ggml.tokens"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(metadata)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json that can be read"):
        Tokenizer.from_file(tmp_path)
    from tokenizers import Tokenizer as Core
    from tokenizers import models

    Core(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece tokenizer, which is not supported; supported: BPE, Unigram"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        Tokenizer.from_file(tmp_path)
