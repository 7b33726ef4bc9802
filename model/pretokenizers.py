"""How byte-level BPE vocabularies cut text into words before merging: the meaning of `tokenizer.ggml.pre` names.

The patterns are part of each model's published tokenizer; a wrong one gives plausible but different ids, so a name
that is not listed is an error, not a guess. Several patterns of one entry are applied one after the other, each inside
the pieces the former left. Pieces that no pattern matches stay as they are.
"""

from __future__ import annotations

import dataclasses

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"(?:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_QWEN35 = (
    rf"(?:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"(?:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is that token, whatever the merges would give."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
    (PreTokenizer((_GPT2,)), ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "trillion", "granite-docling")),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "glm4"),
    ),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe")),
    (
        PreTokenizer((_QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"),
    ),
    (PreTokenizer((_QWEN35,)), ("qwen35",)),
    (PreTokenizer((_SEED_CODER,)), ("seed-coder",)),
    (PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), ("deepseek-v3", "hunyuan-dense")),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), ("falcon",)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: family for family, names in _FAMILIES for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rules called `name`; a `ValueError` names the supported ones."""
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
