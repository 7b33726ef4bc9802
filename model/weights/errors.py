"""The one error a model that cannot be loaded or written raises."""

from __future__ import annotations


class ModelError(Exception):
    """One sentence that names the file, tensor or field, what was found and what is supported."""
