"""Where the program keeps its files, and how it writes them so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/umbra`, by default `~/.cache/umbra`. Everything written outside the repository is in here:
    `models/`, `compile/`, `native/`, `state/`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "umbra"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file name beside `path` that takes its place when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp's files are private; these are ordinary ones
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
