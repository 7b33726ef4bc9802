"""safetensors files: a JSON header of 8 bytes plus its length, then the bytes of the tensors.

Read without the `safetensors` package, which maps whole files into memory (see stored.py) and needs a framework for
bfloat16. The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import ModelError
from .stored import BF16, F16, F32, StoredTensor

ENCODINGS = {encoding.name: encoding for encoding in (F32, F16, BF16)}
_MAX_HEADER = 100_000_000  # the format's own limit


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; a `ModelError` says what is damaged or not supported."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header, start = _header(path, file, size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(path, name, entry, start)
            tensors[name].check_inside(size)
    return tensors


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ModelError(f"{path} is truncated or no safetensors file: its header claims {length} bytes of {size}")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is no safetensors file: its header is not a JSON object")
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        if not isinstance(kind, str) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged: the header entry of tensor {name!r} is {str(entry)[:60]}") from error
    if kind not in ENCODINGS:
        raise ModelError(f"tensor {name!r} in {path} has type {kind}; supported: {', '.join(ENCODINGS)}")
    tensor = StoredTensor(name, shape, ENCODINGS[kind], path, start + begin)
    if tensor.nbytes != end - begin:
        raise ModelError(f"{path} is damaged: tensor {name!r} of shape {list(shape)} has {end - begin} bytes")
    return tensor


def write(path: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterable[np.ndarray]) -> None:
    """Writes `arrays`, which come one at a time in the order of `shapes`; nothing is held in memory."""
    names = {encoding.exact: name for name, encoding in ENCODINGS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array, (name, (shape, dtype)) in zip(arrays, shapes.items(), strict=True):
            assert array.shape == shape and array.dtype == dtype, name
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
