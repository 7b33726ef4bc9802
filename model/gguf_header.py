"""The header of a GGUF file: its metadata and where its tensors lie, read in a fraction of a second.

`gguf.GGUFReader` makes a numpy array of every string, which takes seconds for a vocabulary of 262,144 tokens; starting
a server needs the header twice. The format is the one of the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMS = 8


class GGUFError(ValueError):
    """The file is not a GGUF file, is damaged, or ends too early; one sentence."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` slowest axis first (as numpy has it), `type` a `gguf.GGMLQuantizationType` number, `offset`
    in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """`metadata` holds plain Python values; arrays of numbers are numpy arrays, arrays of strings are lists."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Metadata and tensor positions of the GGUF file at `path`; raises `GGUFError` or `OSError`."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise GGUFError(f"{path} is too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(buffer, path)


def _parse(buffer: mmap.mmap, path: str | os.PathLike[str]) -> GGUFHeader:
    if buffer[:4] != b"GGUF":
        raise GGUFError(f"{path} is not a GGUF file: it starts with {buffer[:4]!r}")
    cursor = _Cursor(buffer, 4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise GGUFError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    tensors: list[TensorInfo] = []
    where = "its first field"
    try:
        for _ in range(field_count):
            name = cursor.string()
            where = f"field {name!r}"
            metadata[name] = cursor.value(cursor.number("I"))
        where = "its first tensor"
        for _ in range(tensor_count):
            tensors.append(cursor.tensor())
            where = f"tensor {tensors[-1].name!r}"
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        detail = "the file ends there" if isinstance(error, struct.error) else error
        raise GGUFError(f"{path} is damaged or cut off at {where} ({detail})") from error
    alignment = int(metadata.get("general.alignment", 32))
    if alignment <= 0:
        raise GGUFError(f"{path}: general.alignment must be positive, got {alignment}")
    start = math.ceil(cursor.position / alignment) * alignment
    return GGUFHeader(metadata, tuple(dataclasses.replace(t, offset=start + t.offset) for t in tensors))


class _Cursor:
    """Reads values one after the other; anything past the end raises `ValueError` or `struct.error`."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position
        self._length = struct.Struct("<Q")

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.buffer, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        (size,) = self._length.unpack_from(self.buffer, self.position)
        start = self.position + 8
        if start + size > len(self.buffer):
            raise ValueError(f"a string of {size} bytes passes the end of the file")
        self.position = start + size
        return self.buffer[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.number(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if count > len(self.buffer):
            raise ValueError(f"an array of {count} values passes the end of the file")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown array type {kind}")
        dtype = np.dtype("<" + {"?": "b1"}.get(_SCALARS[kind], _SCALARS[kind]))
        values = np.frombuffer(self.buffer, dtype, count, self.position).copy()
        self.position += values.nbytes
        return values

    def tensor(self) -> TensorInfo:
        name = self.string()
        dims = self.number("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"tensor {name!r} claims {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))
        kind, offset = self.number("I"), self.number("Q")
        return TensorInfo(name, shape[::-1], kind, offset)
