"""Identities of files, computed once: hashing a large model on every start would take longer than loading it.

Results are kept in `cache_dir()/state/<kind>.json` under everything that tells whether a file is still the same one:
path, size, time of the last change and inode.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...configs.files import cache_dir, write_text
from .errors import ModelError
from .stored import OpenFiles, StoredTensor

_KEPT = 256


def weights_id(tensors: Mapping[str, StoredTensor]) -> str:
    """Hex SHA-256 over the names, shapes, types and raw bytes of `tensors`, whatever their order and files' names."""

    def compute() -> str:
        names = sorted(tensors)
        with concurrent.futures.ThreadPoolExecutor(2) as pool, OpenFiles() as files:
            work = [(tensors[name], files[tensors[name].path]) for name in names]
            digests = list(pool.map(lambda item: item[0].digest(item[1]), work))
        whole = hashlib.sha256()
        for (tensor, _), digest in zip(work, digests, strict=True):
            head = json.dumps([tensor.name, list(tensor.shape), tensor.encoding.name])
            whole.update(head.encode() + b"\0" + digest)
        return whole.hexdigest()

    return remembered("weights_ids", (tensor.path for tensor in tensors.values()), compute)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a whole file, read now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """Hex SHA-256 of a whole file, from memory if the file is unchanged."""
    return remembered("file_hashes", [path], lambda: file_sha256(path))


def remembered(kind: str, files: Iterable[Path], compute: Callable[[], str]) -> str:
    """`compute()`, or what it gave for the same unchanged `files` before."""
    key = json.dumps([_stat(path) for path in sorted({file.resolve() for file in files})])
    store = cache_dir() / "state" / f"{kind}.json"
    known = _load(store)
    if key in known:
        return known[key]
    value = compute()
    known = {**_load(store), key: value}
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not correctness
        write_text(store, json.dumps(dict(list(known.items())[-_KEPT:]), indent=1))
    return value


def _stat(path: Path) -> tuple[str, int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return str(path), found.st_size, found.st_mtime_ns, found.st_ino


def _load(store: Path) -> dict[str, str]:
    try:
        known = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
