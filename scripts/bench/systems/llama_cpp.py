"""llama.cpp through llama-cpp-python's bindings of its C interface.

The C interface decodes several sequences in one batch, which the Python class above it cannot, and costs less per
token: this is the fastest way to use it from Python. Logits are taken only where a token is chosen.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .base import Run, Setup, Stream, System

BATCH = 2048
"""Tokens of one call at most (llama.cpp's own default); it computes them in parts of 512."""


class LlamaCpp(System):
    def load(self, setup: Setup) -> dict[str, Any]:
        import llama_cpp

        self.c: Any = llama_cpp
        self.c.llama_backend_init()
        model = self.c.llama_model_load_from_file(setup.model.encode(), self.c.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {setup.model}")
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
                "weights": "as in the file",
                "threads": setup.threads,
                "n_ctx": params.n_ctx,
                "n_batch": BATCH,
                "n_ubatch": params.n_ubatch,
                "n_seq_max": setup.sequences,
                "instructions": self.c.llama_print_system_info().decode().strip(),
            },
        }

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        began = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in prompts]
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        while entries:
            for part in (entries[i : i + BATCH] for i in range(0, len(entries), BATCH)):
                for sequence, token in self._decode(part):
                    last[sequence] = time.perf_counter() - began
                    if not tokens[sequence]:
                        first[sequence] = last[sequence]
                    tokens[sequence].append(token)
            entries = [
                (made[-1], len(prompt) + len(made) - 1, sequence, True)
                for sequence, (prompt, made) in enumerate(zip(prompts, tokens, strict=True))
                if len(made) < max_tokens
            ]
        seconds = time.perf_counter() - began
        streams = [
            Stream(len(prompt), made, ttft, 1, end)
            for prompt, made, ttft, end in zip(prompts, tokens, first, last, strict=True)
        ]
        return Run(streams, seconds)

    def _decode(self, part: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run (token, position, sequence, wants logits) entries; gives (sequence, most likely next token)."""
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
        chosen = [sequence for _, _, sequence, wanted in part if wanted]
        if not chosen:
            self.c.llama_synchronize(self.context)
            return []
        size = len(chosen) * self.vocab_size
        address = ctypes.cast(self.c.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float * size))
        logits = np.frombuffer(address.contents, dtype=np.float32).reshape(len(chosen), self.vocab_size)
        return list(zip(chosen, logits.argmax(axis=1).tolist(), strict=True))
