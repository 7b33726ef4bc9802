"""Weights in and out: GGUF files, Hugging Face folders, Orbax folders, and the models fetched from a package index."""

from .errors import ModelError

__all__ = ["ModelError"]
