"""llama.cpp through llama-cpp-python's bindings of its C interface.

The C interface decodes several sequences in one batch, which the Python class above it cannot, and costs less per
token: this is the fastest way to use it from Python. Logits are taken only where a token is chosen.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .base import Run, Scores, Setup, Stream, System, between

BATCH = 2048
"""Tokens of one call at most (llama.cpp's own default); it computes them in parts of 512."""


class LlamaCpp(System):
    weights = "as in the file"

    def load(self, setup: Setup) -> dict[str, Any]:
        import llama_cpp

        self.c: Any = llama_cpp
        self.c.llama_backend_init()
        model = self._load_model(setup)
        params = self.c.llama_context_default_params()
        params.n_ctx = setup.sequences * setup.context
        params.n_seq_max = setup.sequences
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = setup.threads
        params.kv_unified = False  # each sequence attends to its own part: faster without a common prefix
        self.context = self.c.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self.vocab_size = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(model))
        self.batch = self.c.llama_batch_init(BATCH, 0, 1)
        return {
            "versions": {"llama-cpp-python": version("llama-cpp-python")},
            "settings": {
                "weights": self.weights,
                "threads": setup.threads,
                "n_ctx": params.n_ctx,
                "n_batch": BATCH,
                "n_ubatch": params.n_ubatch,
                "n_seq_max": setup.sequences,
                "kv": "float16",
                "instructions": self.c.llama_print_system_info().decode().strip(),
            },
        }

    def _load_model(self, setup: Setup) -> Any:
        return self._open(setup.model)

    def _open(self, path: str) -> Any:
        model = self.c.llama_model_load_from_file(path.encode(), self.c.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        return model

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        began = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while entries:
            for part in (entries[i : i + BATCH] for i in range(0, len(entries), BATCH)):
                for sequence, token in self._choose(part):
                    times[sequence].append(time.perf_counter() - began)
                    tokens[sequence].append(token)
            entries = [
                (made[-1], len(prompt) + len(made) - 1, sequence, True)
                for sequence, (prompt, made) in enumerate(zip(prompts, tokens, strict=True))
                if len(made) < max_tokens
            ]
        seconds = time.perf_counter() - began
        streams = [
            Stream(len(prompt), made, when[0], 1, when[-1], gaps=between(when), answer=self._answer(made))
            for prompt, made, when in zip(prompts, tokens, times, strict=True)
        ]
        return Run(streams, seconds)

    def _answer(self, tokens: Sequence[int]) -> int:
        """How many tokens there are up to the first end of text, that included."""
        vocab = self.c.llama_model_get_vocab(self.c.llama_get_model(self.context))
        ends = (i for i, token in enumerate(tokens, 1) if self.c.llama_vocab_is_eog(vocab, token))
        return next(ends, len(tokens))

    def score(self, sequences: Sequence[Sequence[int]], begins: Sequence[int]) -> list[Scores]:
        scores = []
        for ids, begin in zip(sequences, begins, strict=True):
            self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
            one = Scores()
            entries = [(token, i, 0, i >= begin - 1) for i, token in enumerate(ids[:-1])]
            for first in range(0, len(entries), BATCH):
                part = entries[first : first + BATCH]
                one.add(self._decode(part), [ids[position + 1] for _, position, _, wanted in part if wanted])
            scores.append(one)
        return scores

    def _choose(self, part: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run entries (see `_decode`); gives (sequence, most likely next token)."""
        tokens = self._decode(part).argmax(axis=1).tolist()
        return list(zip((sequence for _, _, sequence, wanted in part if wanted), tokens, strict=True))

    def _decode(self, part: Sequence[tuple[int, int, int, bool]]) -> Any:
        """Run (token, position, sequence, wants logits) entries; gives the logits of those that want them, valid until
        the next call."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(part)
        for i, (token, position, sequence, wanted) in enumerate(part):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = self.c.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        rows = sum(wanted for _, _, _, wanted in part)
        if not rows:
            self.c.llama_synchronize(self.context)
            return np.zeros((0, self.vocab_size), np.float32)
        size = rows * self.vocab_size
        address = ctypes.cast(self.c.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float * size))
        return np.frombuffer(address.contents, dtype=np.float32).reshape(rows, self.vocab_size)


class Requantised(LlamaCpp):
    """The same file converted to Q4_0, for which llama.cpp has its fastest products. Made again at every load."""

    weights = "requantised to Q4_0 by llama.cpp"

    def _load_model(self, setup: Setup) -> Any:
        params = self.c.llama_model_quantize_default_params()
        params.ftype = self.c.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        params.nthread = setup.threads
        with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
            path = str(Path(folder) / "q4_0.gguf")
            status = self.c.llama_model_quantize(setup.model.encode(), path.encode(), ctypes.byref(params))
            if status:
                raise RuntimeError(f"llama.cpp cannot requantise {setup.model}: status {status}")
            return self._open(path)  # mapped: the file may lose its name
