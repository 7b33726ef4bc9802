"""A stored block: a header that says everything about it, then its bytes. The same in segment files and object stores.

    header   4,096 bytes: fixed fields, codec, extras, token ids, zeros, CRC-32 of all before
    payload  the block's bytes, filled up with zeros to a multiple of 4,096; the CRC-32 of all of it is in the header

The header carries the record's place, so that a record that was moved, or read from the wrong place, is noticed; and
the block's key can be computed from its other fields, so that a reader does not depend on any index being right.
CRC-32 finds all errors of up to 32 neighbouring bits, and others with a probability of 1 - 2^-32.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from isal.isal_zlib import crc32  # zlib's, five times as fast

from .keys import BlockInfo

HEADER = 4096
ALIGN = 4096
MAGIC = b"UMBRABLK"
VERSION = 1

_FIXED = struct.Struct("<8sHBB16sQQQ d 32s32s32s16s QIQIHH".replace(" ", ""))
_ZEROS = bytes(ALIGN)


class Damaged(Exception):
    """A stored block cannot be used. `reason` is a short word for metrics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Kind(enum.IntEnum):
    BLOCK = 1
    DEAD = 2  # deleted: its length still leads to the next record


@dataclass(frozen=True)
class Place:
    """Where a record lies: which store, which file of it, at which byte."""

    store: bytes
    segment: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A decoded header."""

    kind: Kind
    place: Place
    sequence: int  # records of a store are numbered in the order they were written
    written: float  # seconds since 1970
    info: BlockInfo
    codec: str
    payload_bytes: int
    payload_crc: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)


def record_bytes(payload: int) -> int:
    """Bytes of a record with `payload` bytes."""
    return HEADER + padded(payload)


def padded(payload: int) -> int:
    """`payload` bytes, filled up."""
    return -(-payload // ALIGN) * ALIGN


def padding(payload: int) -> bytes:
    """The zeros behind `payload` bytes."""
    return _ZEROS[: padded(payload) - payload]


def payload_crc(payload: bytes | memoryview) -> int:
    """The CRC of a payload and the zeros behind it."""
    return crc32(padding(len(payload)), crc32(payload))


def encode(header: Header) -> bytes:
    """The header's bytes. Raises `ValueError` if codec and extras are too long for it."""
    info = header.info
    codec, extras = header.codec.encode(), _encode_extras(info.extras)
    body = _FIXED.pack(
        MAGIC, VERSION, header.kind, 0, header.place.store, header.place.segment, header.place.offset,
        header.sequence, header.written, info.key, info.parent, info.model, info.space, info.position, info.n_tokens,
        header.payload_bytes, header.payload_crc, len(codec), len(extras),
    )  # fmt: skip
    body += codec + extras + info.tokens
    if len(body) > HEADER - 4:
        raise ValueError(f"codec, extras and token ids of a block must fit {HEADER - 4 - _FIXED.size} bytes")
    body = body.ljust(HEADER - 4, b"\0")
    return body + struct.pack("<I", crc32(body))


def decode(data: bytes | memoryview) -> Header:
    """The header in the first 4,096 bytes of `data`. Raises `Damaged` if they are none, or not whole."""
    data = bytes(data[:HEADER])
    if len(data) < HEADER or data[:8] != MAGIC:
        raise Damaged("header", "no record starts here")
    if struct.unpack_from("<I", data, HEADER - 4)[0] != crc32(data[: HEADER - 4]):
        raise Damaged("header", "checksum")
    (
        _, version, kind, _, store, segment, offset, sequence, written, key, parent, model, space, position, n_tokens,
        payload, crc, n_codec, n_extras,
    ) = _FIXED.unpack_from(data)  # fmt: skip
    if version != VERSION:
        raise Damaged("version", f"record version {version}, supported: {VERSION}")
    at = _FIXED.size
    codec, extras = data[at : at + n_codec], data[at + n_codec : at + n_codec + n_extras]
    at += n_codec + n_extras
    info = BlockInfo(key, parent, data[at : at + 4 * n_tokens], position, space, model, _decode_extras(extras))
    place = Place(store, segment, offset)
    return Header(Kind(kind), place, sequence, written, info, codec.decode(), payload, crc)


def verify(header: Header, payload: bytes | memoryview, *, place: Place, info: BlockInfo, codec: str) -> None:
    """Make sure that what was read from `place` is the block `info`, undamaged. Raises `Damaged` if it is not.

    `payload` includes the zeros behind it.
    """
    if header.kind is not Kind.BLOCK:
        raise Damaged("deleted")
    if header.place != place:
        raise Damaged("place", f"a record of {header.place} was found at {place}")
    if header.info.model != info.model:
        raise Damaged("model", "other weights, numerics or KV format")
    if header.info.tokens != info.tokens:
        raise Damaged("tokens", "other token ids")
    if header.info != info:
        raise Damaged("key", "another block")
    if header.codec != codec:
        raise Damaged("codec", f"{header.codec!r} instead of {codec!r}")
    if len(payload) != padded(header.payload_bytes) or crc32(payload) != header.payload_crc:
        raise Damaged("checksum", "payload")


def _encode_extras(extras: Mapping[str, bytes]) -> bytes:
    out = b""
    for kind in sorted(extras):
        name = kind.encode()
        out += struct.pack("<HI", len(name), len(extras[kind])) + name + extras[kind]
    return out


def _decode_extras(data: bytes) -> dict[str, bytes]:
    extras, at = {}, 0
    while at < len(data):
        n_name, n_value = struct.unpack_from("<HI", data, at)
        at += 6
        extras[data[at : at + n_name].decode()] = data[at + n_name : at + n_name + n_value]
        at += n_name + n_value
    return extras
