"""KV blocks: their names (`keys`), who holds the device's (`pool`), the tiers behind it (`context`), and everything
that outlives a request (`store`)."""

from .context import ContextCache, Match
from .database import NotFound, Unavailable, Unreadable
from .keys import BlockInfo, Extras, Identity, Namespaces, block_key, model_fingerprint, namespace, root_key
from .layout import BlockLayout
from .load import Load, Loaded
from .pool import BlockPool
from .store import Store

__all__ = [
    "BlockInfo",
    "BlockLayout",
    "BlockPool",
    "ContextCache",
    "Extras",
    "Identity",
    "Load",
    "Loaded",
    "Match",
    "Namespaces",
    "NotFound",
    "Store",
    "Unavailable",
    "Unreadable",
    "block_key",
    "model_fingerprint",
    "namespace",
    "root_key",
]
