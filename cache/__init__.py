"""KV blocks: their names (`keys`) and who holds them (`pool`)."""

from .keys import BLOCK, block_key, model_fingerprint, namespace, root_key
from .pool import SCRATCH, BlockPool

__all__ = ["BLOCK", "SCRATCH", "BlockPool", "block_key", "model_fingerprint", "namespace", "root_key"]
