"""Tensors as they lie in files: read a few rows at a time, so that no file is ever in memory as a whole.

Reads are plain `pread` calls. A memory map would be simpler, but its pages count as this process's memory, and a file
that shrinks while it is mapped kills the process instead of raising an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from .errors import ModelError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_HASH_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How elements are stored: `block` elements take `block_bytes`; `decode` turns bytes into flat float32.

    `exact` is the smallest float type that holds every value the encoding can express.
    """

    name: str
    block: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    exact: np.dtype


def _decode_bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


F32 = Encoding("F32", 1, 4, lambda raw: raw.view("<f4"), np.dtype(np.float32))
F16 = Encoding("F16", 1, 2, lambda raw: raw.view("<f2").astype(np.float32), np.dtype(np.float16))
BF16 = Encoding("BF16", 1, 2, _decode_bfloat16, BFLOAT16)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. `shape` has the slowest axis first; a row is a run along the last axis."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    path: Path
    offset: int

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) <= 0:
            raise ModelError(f"tensor {self.name!r} in {self.path} has the impossible shape {list(self.shape)}")
        if self.shape[-1] % self.encoding.block:
            raise ModelError(
                f"tensor {self.name!r} in {self.path} has rows of {self.shape[-1]} elements, which are no whole "
                f"number of {self.encoding.name} blocks of {self.encoding.block}"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block * self.encoding.block_bytes

    def check_inside(self, file_size: int) -> None:
        """Raises `ModelError` unless the file is long enough to hold the tensor."""
        if self.offset < 0 or self.offset + self.nbytes > file_size:
            raise ModelError(
                f"{self.path} is truncated or damaged: tensor {self.name!r} needs bytes {self.offset} to "
                f"{self.offset + self.nbytes}, the file has {file_size}"
            )

    def read_rows(self, file: int, start: int, stop: int, cols: int, dtype: np.dtype) -> np.ndarray:
        """Rows `start` to `stop` of the tensor seen as `[-1, cols]`, from the open descriptor `file`.

        The result is float32, or `dtype` where the file holds exactly that.
        """
        raw = self.read_raw(file, start, stop, cols)
        if self.encoding.exact == dtype and self.encoding.block_bytes == dtype.itemsize:
            return raw.view(dtype)
        return self.decode(raw)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """float32 rows from the bytes of rows, `[rows, bytes of a row]`."""
        with np.errstate(all="ignore"):  # a damaged scale may be infinite: not this function's business
            return self.encoding.decode(raw.reshape(-1)).reshape(len(raw), -1)

    def read_raw(self, file: int, start: int, stop: int, cols: int) -> np.ndarray:
        """The bytes of rows `start` to `stop` of the tensor seen as `[-1, cols]`: uint8, a row each."""
        per_row = cols // self.encoding.block * self.encoding.block_bytes
        raw = np.frombuffer(self._read(file, start * per_row, (stop - start) * per_row), np.uint8)
        return raw.reshape(stop - start, per_row)

    def digest(self, file: int) -> bytes:
        """SHA-256 over the raw bytes."""
        hashed = hashlib.sha256()
        for start in range(0, self.nbytes, _HASH_BYTES):
            hashed.update(self._read(file, start, min(_HASH_BYTES, self.nbytes - start)))
        return hashed.digest()

    def _read(self, file: int, start: int, size: int) -> bytearray:
        raw = bytearray(size)
        done = 0
        while done < size:
            got = os.preadv(file, [memoryview(raw)[done:]], self.offset + start + done)
            if got == 0:
                raise ModelError(f"{self.path} is truncated: it ended inside tensor {self.name!r}")
            done += got
        return raw


class OpenFiles:
    """Read-only descriptors by path, closed together."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __getitem__(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def row_spans(rows: int, cols: int, elements: int) -> Iterator[tuple[int, int]]:
    """Cuts `rows` rows of `cols` into spans of about `elements` elements."""
    step = max(1, elements // cols)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
