"""From requests to sequences: what is asked for is checked and completed here, on the thread that asks."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from ...configs.engine import EngineConfig
from ...kernels.draft import LOOKUP, SHADOW
from .grammar import BadGrammar, Grammar
from .grammars import Compiled, Grammars, Guide
from .identity import Identities
from .request import MAX_STOP_IDS, SOURCES, DraftSource, Keep, PromptTooLong, SamplingParams, Sink
from .sequence import Sequence
from .thoughts import Channels

if TYPE_CHECKING:
    from ...model.load import Model


class Intake:
    """Makes sequences for one engine, on any thread."""

    def __init__(self, model: Model, config: EngineConfig, identities: Identities, *, drafts: bool) -> None:
        """`drafts`: whether the engine ever drafts."""
        if len(model.eos_ids) > MAX_STOP_IDS:
            raise ValueError(f"{model.name} has {len(model.eos_ids)} end ids; at most {MAX_STOP_IDS} are supported")
        self._model, self._config, self._identities = model, config, identities
        self._context_length = config.context(model.config)
        self._available = 0
        if drafts:
            self._available = LOOKUP | (SHADOW if model.shadow is not None else 0)
        self._grammars: Grammars | None = None
        if model.tokenizer is not None and model.eos_ids:
            self._grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)

    def prepare(self) -> None:
        """Do beforehand what the first grammar would wait for."""
        if self._grammars is not None:
            self._grammars.prepare()

    def sequence(
        self, prompt_ids: Seq[int], params: SamplingParams, sink: Sink, request_id: str | None, principal: str,
        keep: Keep,
    ) -> Sequence:  # fmt: skip
        """Raises `PromptTooLong`, `BadGrammar`, or `ValueError` for what the engine or the model does not have."""
        prompt = np.array(prompt_ids, dtype=np.int64).reshape(-1)
        self._check(prompt, params)
        last = self._context_length - 1
        wanted = last if params.max_tokens is None else len(prompt) - 1 + params.max_tokens
        limit = min(wanted, last)
        sources = self._sources(params.draft)
        tokenizer, guide = self._model.tokenizer, None
        if params.grammar is not None:
            guide = Guide(self.compile_grammar(params.grammar), limit - len(prompt) + 1)
        return Sequence(
            id=request_id or uuid.uuid4().hex,
            params=params,
            prompt=prompt.astype(np.int32),
            seed=params.seed if params.seed is not None else secrets.randbits(64),
            stop_ids=(() if params.ignore_eos else self._model.eos_ids) + params.stop_token_ids,
            limit=limit,
            limit_reason="max_tokens" if params.max_tokens is not None and wanted <= last else "context_length",
            sink=sink,
            text=Channels(tokenizer.token_bytes, params.stop, params.thinking) if tokenizer is not None else None,
            identity=self._identities.of(principal, params.layers),
            sources=sources,
            keep=keep,
            guide=guide,
        )

    def compile_grammar(self, grammar: Grammar) -> Compiled:
        """The grammar ready to be followed; made once. Raises `BadGrammar`."""
        if self._grammars is None:
            raise BadGrammar(f"{self._model.name} has no tokenizer, or no token that ends an answer", grammar.field)
        return self._grammars.compile(grammar)

    def _check(self, prompt: np.ndarray, params: SamplingParams) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty; at least one token is needed")
        if params.embed and not self._config.embeddings:
            raise ValueError("embeddings need an engine that makes them: EngineConfig(embeddings=True)")
        if params.digest and not self._config.logits:
            raise ValueError("digests need an engine that keeps logits: EngineConfig(logits=True)")
        vocab = self._model.config.vocab_size
        for what, ids in (
            ("prompt", prompt),
            ("prediction", np.array(params.prediction, np.int64)),
            ("stop_token_ids", np.array(params.stop_token_ids, np.int64)),
            ("logit_bias", np.array([token for token, _ in params.logit_bias], np.int64)),
        ):
            if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
                raise ValueError(f"{what} has a token id outside 0 to {vocab - 1}")
        if len(prompt) >= self._context_length:
            raise PromptTooLong(len(prompt), self._context_length)

    def _sources(self, draft: DraftSource) -> int:
        """Where drafts of a request may come from, as bits. `ValueError` when it asks for what there is not."""
        wanted = {"auto": self._available, "off": 0, "lookup": LOOKUP, "shadow": SHADOW}[draft]
        if wanted & ~self._available:
            have = ["auto", "off", *(name for bit, name in SOURCES.items() if self._available & bit)]
            raise ValueError(
                f"draft {draft!r} is not possible with {self._model.name} here; possible: {', '.join(have)}"
            )
        return wanted
