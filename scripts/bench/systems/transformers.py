"""Transformers on PyTorch, with the weights of the same GGUF file expanded to one float type."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .base import Run, Setup, Stream, System, between


class _Transformers(System):
    dtype: str

    def load(self, setup: Setup) -> dict[str, Any]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(setup.threads)
        file = Path(setup.model)
        self.model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=getattr(torch, self.dtype)
        ).eval()
        for config in (self.model.config, self.model.generation_config):
            config.eos_token_id = None  # every system makes the same number of tokens
        return {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "settings": {
                "weights": self.dtype,
                "threads": setup.threads,
                "attention": self.model.config._attn_implementation,
            },
        }

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        torch = self.torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = _Clock()
        with torch.inference_mode():
            made = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None,
                pad_token_id=0, use_cache=True, streamer=clock,
            )  # fmt: skip
        seconds = time.perf_counter() - clock.began
        streams = [
            Stream(len(prompt), row[width:].tolist(), clock.times[0], 1, clock.times[-1], gaps=between(clock.times))
            for prompt, row in zip(prompts, made, strict=True)
        ]
        return Run(streams, seconds)


class _Clock:
    """Stands where a streamer would, and notes when each step's tokens came."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []
        self._seen_prompt = False

    def put(self, value: Any) -> None:
        if self._seen_prompt:
            self.times.append(time.perf_counter() - self.began)
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing to flush."""


class Float32(_Transformers):
    dtype = "float32"


class BFloat16(_Transformers):
    dtype = "bfloat16"
