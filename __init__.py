"""Umbra: fast language-model serving in JAX for TPU and CPU."""

__version__ = "0.1.0"
