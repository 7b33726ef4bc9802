"""Embeddings of texts: the mean of the model's last hidden states over the tokens, of length 1.

`POST /v1/embeddings` of OpenAI's protocol, `embedContent` and `batchEmbedContents` of Gemini's. A request for fewer
dimensions gets the first ones, scaled to length 1 again.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from ..effort import Prepared
from ..engine.request import SamplingParams
from .body import read_json
from .conversation import check_model
from .errors import ApiError, bad_request, model_not_found, unsupported
from .gemini_schemas import Content, Message, Messages, invalid
from .gemini_schemas import parse as parse_message
from .middleware import request_info
from .openai_completions import Prompt, check_prompt, encode, prompts_of
from .openai_options import check_model_named, out_of_range
from .reporting import google_headers, timing_headers
from .schemas import EmbeddingBody, parse
from .service import Loaded, Service, gather
from .stream import Watch
from .wishes import FIELDS, from_body

PARAMS = SamplingParams(max_tokens=1, embed=True, draft="off", ignore_eos=True)


class EmbedBody(Message):
    """Body of `embedContent`, and each request of `batchEmbedContents`. Tasks and titles are for models that were
    trained with them."""

    content: Content
    model: str | None = None
    task_type: str | None = None
    title: str | None = None
    output_dimensionality: int | None = None
    auto_truncate: bool | None = None


class BatchEmbedBody(Message):
    requests: Messages[EmbedBody]


@dataclasses.dataclass(frozen=True)
class Call:
    """Texts to be embedded."""

    loaded: Loaded
    prompts: Sequence[Prompt]
    dimensions: Sequence[int | None]
    param: str
    as_base64: bool = False


# ---- OpenAI


async def embeddings(request: Request, service: Service) -> Response:
    loaded = _able(service.loaded)
    call = await read_json(request, service, lambda data: _call(data, service, loaded))
    vectors, tokens, headers = await _embed(request, service, call)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector) if call.as_base64 else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": loaded.name, "usage": usage}
    return Response(to_json(answer), media_type="application/json", headers=headers)


def _encoded(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _call(data: dict[str, Any], service: Service, loaded: Loaded) -> Call:
    body = parse(EmbeddingBody, data)
    check_model_named(body.model, loaded)
    from_body({name: value for name, value in (body.model_extra or {}).items() if name in FIELDS})
    prompts = prompts_of(body.input, "input")
    if body.encoding_format not in (None, "float", "base64"):
        message = f"Invalid value: {body.encoding_format[:40]!r}. Supported values are: 'float' and 'base64'."
        raise bad_request(message, "encoding_format", "invalid_value")
    most = loaded.max_choices(service.config)
    if len(prompts) > most:
        message = f"Invalid 'input': at most {most} texts are supported in one request, got {len(prompts)}."
        raise bad_request(message, "input", "array_above_max_length")
    for i, prompt in enumerate(prompts):
        check_prompt(prompt, "input" if len(prompts) == 1 else f"input[{i}]", loaded)
    width = loaded.model.config.d_model
    if body.dimensions is not None and not 1 <= body.dimensions <= width:
        raise out_of_range("dimensions", 1, width, body.dimensions)
    return Call(loaded, prompts, [body.dimensions] * len(prompts), "input", body.encoding_format == "base64")


# ---- Gemini


async def embed_content(request: Request, service: Service, model: str) -> Response:
    loaded = _found(service, model)
    call = await read_json(
        request, service, lambda data: _gemini_call([parse_message(EmbedBody, data)], service, loaded, model, "")
    )
    (vector,), tokens, headers = await _embed(request, service, call)
    return _google({"embedding": {"values": vector.tolist()}}, tokens, headers, request)


async def batch_embed_contents(request: Request, service: Service, model: str) -> Response:
    loaded = _found(service, model)

    def read(data: dict[str, Any]) -> Call:
        return _gemini_call(parse_message(BatchEmbedBody, data).requests, service, loaded, model, "requests[{}].")

    call = await read_json(request, service, read)
    vectors, tokens, headers = await _embed(request, service, call)
    return _google({"embeddings": [{"values": vector.tolist()} for vector in vectors]}, tokens, headers, request)


def _google(answer: dict[str, Any], tokens: int, headers: dict[str, str], request: Request) -> Response:
    times = request_info(request.scope).answered
    latency = max((one.timings.total for one in times if one.timings is not None), default=0.0)
    return Response(to_json(answer), media_type="application/json", headers=headers | google_headers(latency, tokens))


def _gemini_call(bodies: Sequence[EmbedBody], service: Service, loaded: Loaded, model: str, where: str) -> Call:
    most = loaded.max_choices(service.config)
    if not 1 <= len(bodies) <= most:
        raise invalid("requests", f"expected 1 to {most} requests, got {len(bodies)}")
    prompts, dimensions = [], []
    width = loaded.model.config.d_model
    for i, body in enumerate(bodies):
        at = where.format(i)
        if body.model and body.model.removeprefix("models/") != model.removeprefix("models/"):
            raise invalid(f"{at}model", f"{body.model[:60]!r} is not the model of the path, {model[:60]!r}")
        if body.output_dimensionality is not None and not 1 <= body.output_dimensionality <= width:
            raise invalid(f"{at}outputDimensionality", f"expected 1 to {width}, got {body.output_dimensionality}")
        prompts.append(_text(body, f"{at}content"))
        dimensions.append(body.output_dimensionality)
    return Call(loaded, prompts, dimensions, "content")


def _text(body: EmbedBody, where: str) -> str:
    texts = []
    for i, part in enumerate(body.content.parts or ()):
        if part.text is None:
            raise invalid(f"{where}.parts[{i}]", "only text can be embedded")
        texts.append(part.text)
    if not "".join(texts):
        raise invalid(where, "there is no text to embed")
    return "".join(texts)


def _found(service: Service, model: str) -> Loaded:
    loaded = service.loaded
    if model.removeprefix("models/") not in (loaded.name, loaded.model.name):
        raise model_not_found(model.removeprefix("models/")[:100], loaded.name)
    check_model(loaded)
    return _able(loaded)


# ---- both


def _able(loaded: Loaded) -> Loaded:
    if not loaded.engine.config.embeddings:
        raise unsupported("model", "This server makes no embeddings: it was started with --no-embeddings")
    return loaded


async def _embed(request: Request, service: Service, call: Call) -> tuple[list[np.ndarray], int, dict[str, str]]:
    """The vectors, the tokens of all texts, and headers."""

    def prepare() -> list[Prepared]:
        return [Prepared(encode(call.loaded, prompt, False, call.param), PARAMS) for prompt in call.prompts]

    reply = service.new_reply()
    watch = Watch(request, reply)
    try:
        prepared = await service.submit(reply, prepare, 1, call.param)
        emissions = await gather(reply, len(call.prompts))
    finally:
        reply.close()
        await watch.stop()
    tokens = sum(len(one.prompt) for one in prepared)
    request_info(request.scope).notes["prompt_tokens"] = tokens
    vectors = []
    for emission, dimensions in zip(emissions, call.dimensions, strict=True):
        if emission.embedding is None:
            raise ApiError(500, "The engine gave no embedding", kind="server_error", code="engine_error")
        vectors.append(_shortened(emission.embedding, dimensions))
    return vectors, tokens, {"x-umbra-prompt-tokens": str(tokens), **timing_headers(emissions[0])}


def _shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    if dimensions is None:
        return vector
    short = vector[:dimensions]
    return short / max(float(np.linalg.norm(short)), 1e-30)
