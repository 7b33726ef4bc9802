"""Keeping JAX's persistent compilation cache usable.

JAX writes an entry in place and never replaces one. After a full disk, or a process killed while writing, a broken
entry would make every later start warn and compile that program again. Here such entries are removed, and one line
says so instead of JAX's warnings.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

log = logging.getLogger(__name__)

_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']+)':?(.*)", re.DOTALL)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Compile inside this: entries that could not be read or written are removed afterwards."""
    with warnings.catch_warnings(record=True) as caught:  # of all threads, while this lasts
        warnings.simplefilter("always")
        yield
    broken: dict[str, str] = {}
    for warning in caught:
        if found := _TROUBLE.search(str(warning.message)):
            broken[found[2]] = f"could not be {'read' if found[1] == 'reading' else 'written'}:{found[3]}"
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if broken and folder:
        for name in broken:
            _remove(Path(folder), name)
        why = " ".join(next(iter(broken.values())).split())
        log.warning("compiled programs in %s %s; they are compiled again", folder, why)


def _remove(folder: Path, name: str) -> None:
    for entry in folder.glob(f"{name}-*"):
        with contextlib.suppress(OSError):
            entry.unlink()
