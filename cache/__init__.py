"""KV blocks: their names (`keys`) and who holds them (`pool`)."""

from .keys import block_key, model_fingerprint, namespace, root_key
from .pool import BlockPool

__all__ = ["BlockPool", "block_key", "model_fingerprint", "namespace", "root_key"]
