"""`GET /v1/models` and `/v1/models/{id}`. Clients of OpenAI's and of Gemini's protocol ask the same paths; the objects
have the fields of both."""

from __future__ import annotations

from typing import Any

from .errors import model_not_found
from .gemini import EMBEDDING, METHODS
from .gemini_options import DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P
from .schemas import MAX_TEMPERATURE
from .service import Loaded


def describe(loaded: Loaded) -> dict[str, Any]:
    """Both shapes of one model. The prompt and the answer share the context."""
    context = loaded.engine.context_length
    return {
        "id": loaded.name,
        "object": "model",
        "created": loaded.created,
        "owned_by": "umbra",
        "name": f"models/{loaded.name}",
        "baseModelId": loaded.name,
        "version": "1",
        "displayName": loaded.name,
        "inputTokenLimit": context - 1,
        "outputTokenLimit": context - 1,
        "supportedGenerationMethods": [
            name for name in METHODS if name not in EMBEDDING or loaded.engine.config.embeddings
        ],
        "temperature": DEFAULT_TEMPERATURE,
        "maxTemperature": MAX_TEMPERATURE,
        "topP": DEFAULT_TOP_P,
        "topK": DEFAULT_TOP_K,
    }


def list_models(loaded: Loaded) -> dict[str, Any]:
    one = describe(loaded)
    keys = ("id", "object", "created", "owned_by")
    return {
        "object": "list",
        "data": [{key: one[key] for key in keys}],
        "models": [{key: value for key, value in one.items() if key not in keys}],
    }


def get_model(loaded: Loaded, name: str) -> dict[str, Any]:
    if name not in (loaded.name, loaded.model.name):
        raise model_not_found(name[:100], loaded.name)
    return describe(loaded)
