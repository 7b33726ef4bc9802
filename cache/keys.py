"""Names of KV blocks: a SHA-256 chain over everything that determined a block's bytes.

    namespace = HMAC-SHA256(server secret, "kvns1" || principal)[:16]
    model     = SHA256("model1" || canonical fields)
    root      = SHA256("root1" || namespace || model)
    key       = SHA256("blk1" || parent key or root || token ids as little-endian u32 || extras)
    tail key  = SHA256("tail1" || parent key or root || number of tokens || token ids || extras)

Two blocks have the same name only if they belong to the same principal, come from the same weights in the same
numerics class and KV format, and hold the same tokens after the same tokens. Fields and extras are typed and
length-prefixed, so that no two different sets of them are the same bytes. Whoever finds a block by its name still
compares its token ids: a collision costs a recomputation, never a wrong answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import os
import secrets
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..configs.engine import BLOCK

NAMESPACE_BYTES = 16
KEY_BYTES = 32
SECRET_BYTES = 32

Field: TypeAlias = "None | bool | int | float | str | bytes | Sequence[Field] | Mapping[str, Field]"


def namespace(secret: bytes, principal: str) -> bytes:
    """The 16-byte namespace of a principal (tenant, API key). It comes from the server, never from a request's body.

    Without the secret nobody can name another principal's blocks, nor probe for them by timing.
    """
    if not secret:
        raise ValueError("the namespace secret must not be empty")
    return hmac.new(secret, b"kvns1" + principal.encode(), hashlib.sha256).digest()[:NAMESPACE_BYTES]


def model_fingerprint(*, weights_id: str, numerics_class: str, kv_format: str, **more: Field) -> bytes:
    """The 32-byte name of everything besides tokens that decides a block's bytes; the order of fields is irrelevant.

    Args:
        weights_id: digest of the weights' content (never a served name: names are reused for other weights).
        numerics_class: backend, instruction set, compiler version and what else may change rounding.
        kv_format: layout and element types of a block.
        more: whatever else matters (rope, quantisation, adapters, attention policy); None, bool, int, float, str,
            bytes, and lists and string-keyed mappings of these.
    """
    fields: dict[str, Field] = {"weights_id": weights_id, "numerics_class": numerics_class, "kv_format": kv_format}
    return hashlib.sha256(b"model1" + _canonical({**fields, **more})).digest()


def root_key(space: bytes, model: bytes) -> bytes:
    """The parent of every first block: `space` of `namespace`, `model` of `model_fingerprint`."""
    _check_length("namespace", space, NAMESPACE_BYTES)
    _check_length("model fingerprint", model, KEY_BYTES)
    return hashlib.sha256(b"root1" + space + model).digest()


def block_key(
    parent: bytes,
    token_ids: Sequence[int] | np.ndarray,
    extras: Mapping[str, bytes] | None = None,
    *,
    block_size: int = BLOCK,
) -> bytes:
    """The 32-byte key of the block that holds exactly `block_size` tokens after the block (or root) `parent`.

    `extras` names what else decided its bytes, for example the digest of an image or a sparse attention policy.
    """
    packed = pack_tokens(token_ids)
    _check_length("block of token ids", packed, 4 * block_size)
    return packed_block_key(parent, packed, extras)


def packed_block_key(parent: bytes, packed: bytes, extras: Mapping[str, bytes] | None = None) -> bytes:
    """`block_key` of tokens that `pack_tokens` already packed; their number is the caller's business."""
    _check_length("parent key", parent, KEY_BYTES)
    return hashlib.sha256(b"blk1" + parent + packed + _extras(extras)).digest()


def pack_tokens(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as little-endian u32, 4 bytes each."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat sequence of integers, got {ids.dtype} of shape {ids.shape}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= 1 << 32:
        raise ValueError(f"token ids must fit in 32 unsigned bits, got {low if low < 0 else high}")
    return ids.astype("<u4").tobytes()


def packed_tail_key(parent: bytes, packed: bytes, extras: Mapping[str, bytes] | None = None) -> bytes:
    """The key of a partly filled last block; its token ids are packed by `pack_tokens`."""
    _check_length("parent key", parent, KEY_BYTES)
    return hashlib.sha256(b"tail1" + parent + _prefixed(packed) + _extras(extras)).digest()


@dataclasses.dataclass(frozen=True)
class Extras:
    """What else decided the bytes of a block, by type; an empty field adds nothing to the key."""

    policy: str = ""
    """The attention policy it was computed under, if that is not exact."""
    layers: tuple[int, ...] = ()
    """The layers it was computed with, if not all."""
    adapter: bytes = b""
    """Digest of an adapter's weights."""
    media: bytes = b""
    """Digest of what stands behind placeholder tokens, such as images."""

    def fields(self) -> dict[str, bytes]:
        """What `block_key` takes. Each type has one encoding, so that equal bytes of two types never meet."""
        layers = b"".join(struct.pack("<I", layer) for layer in self.layers)
        every = {"policy": self.policy.encode(), "layers": layers, "adapter": self.adapter, "media": self.media}
        return {kind: value for kind, value in every.items() if value}


@dataclasses.dataclass(frozen=True)
class BlockInfo:
    """Everything about a block but its bytes: what tiers keep, compare and store beside them."""

    key: bytes
    parent: bytes
    """Key of the block it continues, or the root."""
    tokens: bytes
    """Its token ids as `pack_tokens` packs them; fewer than a block's if it is a tail."""
    position: int
    """Of its first token; 0: it continues the root."""
    space: bytes
    model: bytes
    extras: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def first(self) -> bool:
        """Whether it is the first block of a chain."""
        return self.position == 0

    def expected_key(self, block_size: int = BLOCK) -> bytes:
        """The key that the other fields ask for."""
        make = packed_block_key if self.n_tokens == block_size else packed_tail_key
        return make(self.parent, self.tokens, self.extras)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Whose blocks, and computed by what: a namespace and a model fingerprint."""

    space: bytes
    model: bytes
    block_size: int = BLOCK

    @functools.cached_property
    def root(self) -> bytes:
        return root_key(self.space, self.model)

    def chain(
        self, token_ids: Sequence[int] | np.ndarray, extras: Extras | None = None, *, tail: bool = False
    ) -> list[BlockInfo]:
        """The blocks of a sequence from its first token on; `tail`: also the partly filled last one."""
        packed, size = pack_tokens(token_ids), 4 * self.block_size
        fields = extras.fields() if extras is not None else {}
        blocks: list[BlockInfo] = []
        parent = self.root
        for start in range(0, len(packed), size):
            part = packed[start : start + size]
            if len(part) < size and not tail:
                break
            make = packed_block_key if len(part) == size else packed_tail_key
            key = make(parent, part, fields)
            blocks.append(BlockInfo(key, parent, part, start // 4, self.space, self.model, fields))
            parent = key
        return blocks


class Namespaces:
    """Namespaces of principals under one secret, which is kept in a file so that they outlive the process."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        namespace(secret, "")  # refuses an empty secret

    @classmethod
    def load(cls, path: Path) -> Namespaces:
        """The secret in `path`, made at random if there is none yet; only its owner may read it.

        Machines that share an object store share this file. Raises `OSError` if it can be neither read nor made, and
        `ValueError` if it is not a secret.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(name, path)  # unlike a rename, never replaces a secret that another process has just made
            os.unlink(name)
        try:
            secret = bytes.fromhex(path.read_text().strip())
        except ValueError:
            secret = b""
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"{path} must hold a secret of at least {SECRET_BYTES} bytes as hexadecimal digits")
        return cls(secret)

    def of(self, principal: str) -> bytes:
        """The namespace of whom the server has authenticated."""
        return namespace(self._secret, principal)


def _check_length(what: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise ValueError(f"a {what} has {length} bytes, got {len(value)}")


def _extras(extras: Mapping[str, bytes] | None) -> bytes:
    """Type and value, each behind its length, in the order of the types."""
    return b"".join(_prefixed(kind.encode()) + _prefixed(extras[kind]) for kind in sorted(extras)) if extras else b""


def _prefixed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _canonical(value: Field) -> bytes:
    """One type letter, then a fixed-size or length-prefixed body. bool comes before int, whose subclass it is."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return b"i" + _prefixed(str(value).encode())
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + _prefixed(value.encode())
    if isinstance(value, bytes):
        return b"y" + _prefixed(value)
    if isinstance(value, Mapping):
        parts = [_prefixed(name.encode()) + _canonical(value[name]) for name in sorted(value)]
        return b"m" + _prefixed(b"".join(parts))
    if isinstance(value, list | tuple):
        return b"l" + _prefixed(b"".join(_canonical(item) for item in value))
    raise TypeError(
        "a fingerprint field may be None, bool, int, float, str, bytes, a list or a mapping, "
        f"got {type(value).__name__}"
    )
