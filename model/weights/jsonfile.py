"""JSON files that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
