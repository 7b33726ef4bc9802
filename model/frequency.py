"""Which tokens are frequent, without a large corpus.

Two things tell: the text of the prompts that ship with the project (configs/prompts), where a token that occurs is
certainly in use; and the id itself. A byte-pair vocabulary is learnt by merging the most frequent pair of a large
corpus first and numbering merges in that order (Sennrich et al. 2016), so ids ascend as frequency in that corpus falls;
control tokens come first of all. SentencePiece's byte-pair vocabularies (Gemma) are ordered alike.
So tokens are ranked by their count in the prompts, and equal counts by id.
"""

from __future__ import annotations

import numpy as np

from ..configs.prompt_sets import DEFAULT, load_prompts
from .tokenizer import Tokenizer


def frequent_tokens(n: int, vocab_size: int, tokenizer: Tokenizer | None) -> np.ndarray:
    """The `n` most frequent of `vocab_size` tokens, in ascending order."""
    counts = np.zeros(vocab_size, np.int64)
    if tokenizer is not None:
        for prompt in load_prompts(DEFAULT):
            for turn in prompt.turns:
                ids = np.asarray(tokenizer.encode(turn), np.int64)
                np.add.at(counts, ids[ids < vocab_size], 1)
    ranked = np.argsort(-counts, kind="stable")
    return np.sort(ranked[:n])
