"""Writes the golden ids of the tokenizer tests, made by llama.cpp and Transformers.

    python tests/golden/make_tokenizer.py

Needs the extra `[bench]`. The texts are the lines of `tokenizer_corpus.jsonl`; ids are lists in the order of its lines.

- `tokenizer_smollm2.json`, `tokenizer_gemma3-270m.json`: llama.cpp on the real files. `plain`: special tokens in the
  text are text; `special`: line number to ids where special tokens are tokens and that makes a difference;
  `pieces_crc`: CRC-32 of what every token adds to a text; `ends`: the ids llama.cpp stops at.
- `tokenizer_small.json`: small BPE and SentencePiece vocabularies as GGUF metadata, and the CRC-32 of llama.cpp's ids
  for each name of a pre-tokenizer, and with and without a space in front.
- `tokenizer_hf_<name>/`: small tokenizers as Transformers saves them, with `ids.json` of its ids.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from umbra.model.pretokenizers import PRE_TOKENIZERS
from umbra.model.weights.fetch import fetch

HERE = Path(__file__).parent
CORPUS = [json.loads(line) for line in (HERE / "tokenizer_corpus.jsonl").read_text(encoding="utf-8").splitlines()]
MODELS = ("smollm2", "gemma3-270m")
CONTROL = ["<|im_start|>", "<|im_end|>", "<|unknown|>"]


def crc(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())


def llama_ids(llama: llama_cpp.Llama, *, special: bool) -> list[list[int]]:
    return [llama.tokenize(text.encode(), add_bos=False, special=special) for text in CORPUS]


def write(name: str, value: Any) -> None:
    (HERE / name).write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def real_model(name: str) -> None:
    llama = llama_cpp.Llama(str(fetch(name)), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    plain, special = llama_ids(llama, special=False), llama_ids(llama, special=True)
    buffer = ctypes.create_string_buffer(1024)
    pieces, ends = 0, []
    for token in range(llama.n_vocab()):
        size = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, 1024, 0, False)
        pieces = zlib.crc32(buffer.raw[:size] + b"\0", pieces)
        if llama_cpp.llama_vocab_is_eog(vocabulary, token):
            ends.append(token)
    differing = {i: ids for i, ids in enumerate(special) if ids != plain[i]}
    value = {"plain": plain, "special": differing, "pieces_crc": pieces, "ends": ends}
    write(f"tokenizer_{name}.json", value)


def small_bpe() -> dict[str, Any]:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, min_frequency=2, show_progress=False, max_token_length=10,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    core.train_from_iterator(CORPUS * 2, trainer)
    model = json.loads(core.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *CONTROL]
    n = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (n - 3) + [3] * 3,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": n - 3,
        "tokenizer.ggml.eos_token_id": n - 2,
        "tokenizer.ggml.unknown_token_id": n - 1,
        "tokenizer.ggml.padding_token_id": n - 1,
    }


def small_sentence_piece() -> dict[str, Any]:
    core = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, min_frequency=2, show_progress=False, max_token_length=12)
    core.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS if len(text) < 100], trainer)
    vocab = json.loads(core.to_str())["model"]["vocab"]
    user_defined = ["\n\n", "\n\n\n", "  ", "   ", "<table>", "[multimodal]"]
    # Left out: NUL, which GGUF readers in C cannot hold, and ends of "<s>", from which llama.cpp merges the special
    # token out of plain text.
    reserved = {"\n", "\0", "s>", *user_defined}
    learned = sorted((token for token in vocab if token not in reserved), key=lambda t: (len(t) == 1, vocab[t]))
    tokens = ["<unk>", "<s>", "</s>", "<bos>", *user_defined, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    head = 4 + len(user_defined)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 3] + [4] * len(user_defined) + [6] * 256 + [1] * len(learned),
        "tokenizer.ggml.scores": [-1000.0] * head + [0.0] * 256 + [-float(i) for i in range(len(learned))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def as_llama(metadata: dict[str, Any]) -> llama_cpp.Llama:
    """llama.cpp's tokenizer of these metadata, through a file without tensors."""
    writers = {bool: "add_bool", int: "add_uint32", str: "add_string"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name in (
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
        ):
            writer.add_uint32(f"llama.{name}", 64)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        for name, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(name, value)
            else:
                getattr(writer, writers[type(value)])(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def small_models() -> None:
    bpe, sentence_piece = small_bpe(), small_sentence_piece()
    checks: dict[str, int] = {}
    for name in PRE_TOKENIZERS:
        llama = as_llama({**bpe, "tokenizer.ggml.pre": name})
        checks[name] = crc([llama_ids(llama, special=False), llama_ids(llama, special=True)])
    prefixed: dict[str, int] = {}
    for prefix in (False, True):
        llama = as_llama({**sentence_piece, "tokenizer.ggml.add_space_prefix": prefix})
        prefixed[str(prefix)] = crc([llama_ids(llama, special=False), llama_ids(llama, special=True)])
    value = {"bpe": bpe, "sentence_piece": sentence_piece, "crc_by_pre": checks, "crc_by_space_prefix": prefixed}
    write("tokenizer_small.json", value)


def hf_byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """In the manner of Llama 3 and Qwen: byte-level, special and ordinary added tokens, one that eats spaces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>", AddedToken("<mask>", lstrip=True)])
    core.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return core, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def hf_sentence_piece() -> tuple[Tokenizer, dict[str, Any]]:
    """In the manner of Llama 2 and Mistral: U+2581 for spaces, one in front, bytes as a last resort, BOS added."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *bytes_]
    )
    core.train_from_iterator([text for text in CORPUS if len(text) < 60], trainer)
    data = json.loads(core.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 5]
    core = Tokenizer.from_str(json.dumps(data))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def hf_folder(name: str, core: Tokenizer, tokens: dict[str, Any]) -> None:
    folder = HERE / f"tokenizer_hf_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    plain, special, begin, decoded = [], {}, [], []
    for i, text in enumerate(CORPUS):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        as_tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        plain.append(ids)
        if as_tokens != ids:
            special[i] = as_tokens
        begin.append(tokenizer(text, split_special_tokens=True)["input_ids"] != ids)
        text_again = tokenizer.decode(as_tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        decoded.append(zlib.crc32(str(text_again).encode()))
    value = {"plain": plain, "special": special, "adds_bos": any(begin), "decoded_crc": decoded}
    (folder / "ids.json").write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    for name in MODELS:
        real_model(name)
    small_models()
    hf_folder("byte_level", *hf_byte_level())
    hf_folder("sentence_piece", *hf_sentence_piece())


if __name__ == "__main__":
    main()
