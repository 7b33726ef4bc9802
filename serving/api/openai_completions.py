"""`POST /v1/completions`: text or token ids in, text out, no template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ..effort import Prepared, at_level
from ..engine.request import Emission, TokenLogprob
from ..engine.thoughts import Thinking
from .body import read_json
from .errors import ApiError, bad_request, context_exceeded, unsupported
from .logprobs import TextAligner, aligner, finite, token_bytes
from .openai import FINISH, Call, respond
from .openai_effort import level_of
from .openai_format import asked_form
from .openai_options import check_ids, check_logprobs, check_options, choices_of, out_of_range, sampling_params
from .schemas import CompletionBody, parse
from .service import Loaded, Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | list[int]


async def completions(request: Request, service: Service) -> Response:
    loaded = service.loaded
    call = await read_json(request, service, lambda data: _call(data, service, loaded))
    return await respond(request, service, call)


def _call(data: dict[str, Any], service: Service, loaded: Loaded) -> Call:
    body = parse(CompletionBody, data)
    ignored = check_options(body, service, loaded)
    prompts = prompts_of(body.prompt, "prompt")
    _check(body, len(prompts), loaded.max_choices(service.config))
    for i, prompt in enumerate(prompts):
        check_prompt(prompt, "prompt" if len(prompts) == 1 else f"prompt[{i}]", loaded)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = check_logprobs(body.logprobs, "logprobs")
    params = sampling_params(
        body, loaded, max_tokens=max_tokens, max_name="max_tokens", logprobs=logprobs,
        grammar=asked_form(body, body.response_format, "response_format"),
    )  # fmt: skip
    params = at_level(params, level_of(body, service.config.level), loaded.policies)
    shape = _TextShape(loaded, logprobs is not None, choices_of(body))

    def prepare() -> list[Prepared]:
        if body.echo:
            shape.echoed = [_text(loaded, prompt) for prompt in prompts]
        return [Prepared(encode(loaded, prompt, bool(body.parse_special), "prompt"), params) for prompt in prompts]

    return Call(
        body=body,
        loaded=loaded,
        shape=shape,
        prepare=prepare,
        prompts=len(prompts),
        prompt_param="prompt",
        ignored=ignored,
    )


def prompts_of(prompt: str | Sequence[Any], param: str) -> list[Prompt]:
    """The prompts of the field `param` as a list."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]  # type: ignore[list-item]
    if not prompt:
        raise _empty(param)
    return list(prompt)


def _empty(param: str) -> ApiError:
    message = f"Invalid '{param}': empty array. Expected at least one token or text."
    return bad_request(message, param, "empty_array")


def check_prompt(prompt: Prompt, name: str, loaded: Loaded) -> None:
    """Token ids must be tokens of the vocabulary, and few enough to be looked at; text needs a tokenizer."""
    param = name.partition("[")[0]
    if isinstance(prompt, str):
        if loaded.model.tokenizer is None:
            raise unsupported(param, f"The model '{loaded.name}' has no tokenizer; supported: arrays of token ids")
    elif not prompt:
        raise _empty(param)
    elif len(prompt) >= loaded.engine.context_length:
        raise context_exceeded(param, str(len(prompt)), loaded.engine.context_length)
    else:
        check_ids(prompt, loaded.vocab_size, name)


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


def encode(loaded: Loaded, prompt: Prompt, special: bool, param: str) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    loaded.check_length([prompt], param)
    tokenizer = loaded.model.tokenizer
    ids = tokenizer.encode(prompt, special=special, add_bos=tokenizer.add_bos)
    if not ids:
        raise bad_request(
            f"Invalid '{param}': expected at least one token, but got an empty text.", param, "empty_string"
        )
    return ids


def _text(loaded: Loaded, prompt: Prompt) -> str:
    """The prompt as `echo` shows it."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = loaded.model.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special=False)


class _TextShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, loaded: Loaded, logprobs: bool, n: int) -> None:
        self.echoed: Sequence[str] = ()
        """What the choices of each prompt begin with; empty for nothing."""
        self._loaded = loaded
        self._logprobs = logprobs
        self._n = n
        self._started: set[int] = set()
        self._aligners: dict[int, TextAligner] = {}
        self.thinking: Thinking | None = None

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
        return self.echoed[index // self._n] if self.echoed else ""

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
