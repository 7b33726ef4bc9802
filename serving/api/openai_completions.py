"""`POST /v1/completions`: text or token ids in, text out, no template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ..engine.request import Emission, TokenLogprob
from .body import read_json
from .errors import bad_request, unsupported
from .openai import FINISH, Call, TextAligner, aligner, finite, respond, token_bytes
from .openai_options import check_ids, check_logprobs, check_options, choices_of, out_of_range, sampling_params
from .schemas import CompletionBody, parse
from .service import Loaded, Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | list[int]


async def completions(request: Request, service: Service) -> Response:
    loaded = service.loaded
    body = await read_json(request, service, lambda data: parse(CompletionBody, data))
    ignored = check_options(body, service, loaded)
    prompts = _prompts(body, loaded)
    _check(body, len(prompts), service.config.max_choices)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = check_logprobs(body.logprobs, "logprobs")
    params = sampling_params(body, loaded, max_tokens=max_tokens, max_name="max_tokens", logprobs=logprobs)
    call = Call(
        body=body,
        loaded=loaded,
        shape=_TextShape(loaded, logprobs is not None, _echoed(body, prompts, loaded), choices_of(body)),
        params=params,
        encode=lambda: [_encode(loaded, prompt, bool(body.parse_special)) for prompt in prompts],
        prompts=len(prompts),
        prompt_param="prompt",
        ignored=ignored,
    )
    return await respond(request, service, call)


def _prompts(body: CompletionBody, loaded: Loaded) -> list[Prompt]:
    """The prompts as a list. Token ids are checked against the vocabulary, text needs a tokenizer."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Prompt] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [check_ids(prompt, loaded.vocab_size, "prompt")]  # type: ignore[list-item]
    else:
        prompts = list(prompt)  # type: ignore[arg-type]
        for i, ids in enumerate(prompts):
            if not isinstance(ids, str):
                check_ids(ids, loaded.vocab_size, f"prompt[{i}]")
    if not prompts or any(prompt == [] for prompt in prompts):
        raise bad_request(
            "Invalid 'prompt': empty array. Expected at least one token or text.", "prompt", "empty_array"
        )
    if loaded.model.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise unsupported("prompt", f"The model '{loaded.name}' has no tokenizer; supported: arrays of token ids")
    return prompts


def _check(body: CompletionBody, prompts: int, max_choices: int) -> None:
    n = choices_of(body)
    if n * prompts > max_choices:
        message = f"Invalid 'n': {prompts} prompts times {n} choices are more than the {max_choices} supported."
        raise bad_request(message, "n", "integer_above_max_value")
    if body.best_of is not None and body.best_of != n:
        if body.best_of < 1:
            raise out_of_range("best_of", 1, max_choices, body.best_of)
        message = f"Unsupported value: 'best_of' other than 'n' is not supported; supported: {n}"
        raise unsupported("best_of", message)
    if body.suffix:
        raise unsupported("suffix", "Unsupported parameter: 'suffix': the model cannot fill in text; leave it out")
    if body.echo and body.logprobs is not None:
        message = "Unsupported parameter: 'echo' with 'logprobs': the prompt has no log-probabilities; use one of them"
        raise unsupported("echo", message)


def _encode(loaded: Loaded, prompt: Prompt, special: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    loaded.check_length([prompt], "prompt")
    tokenizer = loaded.model.tokenizer
    ids = tokenizer.encode(prompt, special=special, add_bos=tokenizer.add_bos)
    if not ids:
        raise bad_request(
            "Invalid 'prompt': expected at least one token, but got an empty text.", "prompt", "empty_string"
        )
    return ids


def _echoed(body: CompletionBody, prompts: Sequence[Prompt], loaded: Loaded) -> list[str]:
    """What each prompt's choices begin with: the prompt if `echo` is set."""
    if not body.echo:
        return [""] * len(prompts)
    tokenizer = loaded.model.tokenizer
    return [
        prompt if isinstance(prompt, str) else "" if tokenizer is None else tokenizer.decode(prompt, skip_special=False)
        for prompt in prompts
    ]


class _TextShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, loaded: Loaded, logprobs: bool, echoed: Sequence[str], n: int) -> None:
        self._loaded = loaded
        self._logprobs = logprobs
        self._echoed = echoed
        self._n = n
        self._started: set[int] = set()
        self._aligners: dict[int, TextAligner] = {}

    def whole(self, index: int, emission: Emission) -> dict[str, Any]:
        finish = FINISH.get(emission.finish_reason or "")
        return self._choice(index, self._echo(index) + emission.text, self._listed(index, emission), finish)

    def pieces(self, index: int, emission: Emission) -> list[dict[str, Any]]:
        text = emission.text
        if index not in self._started:
            self._started.add(index)
            text = self._echo(index) + text
        listed = self._listed(index, emission)
        finish = FINISH.get(emission.finish_reason or "")
        if text or finish or (listed and listed["tokens"]):
            return [self._choice(index, text, listed, finish)]
        return []

    def _choice(self, index: int, text: str, listed: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": finish}

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n]

    def _listed(self, index: int, emission: Emission) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        held = self._aligners.setdefault(index, aligner(self._loaded))
        ready = held.take(emission)
        return {
            "tokens": [self._name(item.token_id) for item, _ in ready],
            "token_logprobs": [finite(item.logprob) for item, _ in ready],
            "top_logprobs": [self._top(item) for item, _ in ready],
            "text_offset": [offset for _, offset in ready],
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        return {self._name(token): finite(logprob) for token, logprob in item.top}

    def _name(self, token: int) -> str:
        """The token's text; `bytes:\\\\xNN...` when it is only part of a character, as OpenAI writes it."""
        raw = token_bytes(self._loaded, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
