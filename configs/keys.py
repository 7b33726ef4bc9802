"""API keys as data: who a key belongs to and what it may use. Only digests of keys are kept, in files and in memory.

A file of keys is TOML, a table for each key:

    [alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "research"           # whose data it sees; the table's name if left out
    requests_per_minute = 60      # this and the others: what the server's options say if left out
    tokens_per_minute = 100000
    max_concurrent = 8
    priority = "normal"           # the highest that it may ask for: low, normal or high

`python scripts/serve.py --new-api-key alice` makes a key and prints it with its table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import tomllib
from pathlib import Path
from typing import Any

PRIORITIES = {"low": -1, "normal": 0, "high": 1}

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a key may use; 0: as much as there is."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers together. Counted when they have been used, so one request may overdraw it."""
    max_concurrent: int = 0
    """Requests in progress."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} must be 0 (no limit) or a positive integer, got {value!r}")


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key by its digest."""

    name: str
    """For logs."""
    sha256: str = dataclasses.field(repr=False)
    """Hexadecimal digest of the key's UTF-8 bytes. Keys are long and random, so a plain hash cannot be guessed back."""
    tenant: str
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    """Fields of `Limits` that differ from what the server has for all keys."""
    priority: str = "high"
    """The highest that it may ask for."""

    def __post_init__(self) -> None:
        for field in ("name", "tenant"):
            if not isinstance(getattr(self, field), str) or not _NAME.fullmatch(getattr(self, field)):
                text = "1 to 64 letters, digits, '_', '.', '@' or '-'"
                raise ValueError(f"{field} of an API key must be {text}, got {getattr(self, field)!r}")
        if not isinstance(self.sha256, str) or not _DIGEST.fullmatch(self.sha256):
            raise ValueError("sha256 must be the 64 lower-case hexadecimal digits of the key's digest")
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be one of {', '.join(PRIORITIES)}, got {self.priority!r}")
        Limits(**self.limits)


def plain_keys(*secrets: str) -> tuple[ApiKey, ...]:
    """Keys given as they are, on the command line or in the environment: each a tenant of its own."""
    if not all(secret.strip() for secret in secrets):
        raise ValueError("an API key must not be empty")
    digests = dict.fromkeys(digest_of(secret.encode()) for secret in secrets)
    return tuple(ApiKey(f"key-{digest[:8]}", digest, f"key-{digest[:16]}") for digest in digests)


def digest_of(secret: bytes) -> str:
    """What is stored and compared in place of a key."""
    return hashlib.sha256(secret).hexdigest()


def new_key(name: str) -> tuple[str, str]:
    """A random key of 256 bits, and its table for a file of keys."""
    secret = f"umbra-{secrets.token_urlsafe(32)}"
    key = ApiKey(name, digest_of(secret.encode()), name)
    header = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    return secret, f'[{header}]\nsha256 = "{key.sha256}"\n'


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; a `ValueError` that names the file and the table for anything that is not understood."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a file of API keys (TOML, a table for each key): {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the API keys in {path}: {error.strerror or error}") from None
    keys = tuple(_key(path, name, table) for name, table in tables.items())
    if not keys:
        raise ValueError(f"{path} has no API key")
    return keys


def _key(path: Path, name: str, table: Any) -> ApiKey:
    where = f"{path}, key {name!r}"
    if not isinstance(table, dict):
        raise ValueError(f'{where}: expected a table with sha256 = "..."; --new-api-key makes one')
    limits = {field.name for field in dataclasses.fields(Limits)}
    known = {"sha256", "tenant", "priority"}
    if unknown := sorted(set(table) - known - limits):
        raise ValueError(f"{where}: {unknown[0]!r} is not known; supported: {', '.join(sorted(known | limits))}")
    if "sha256" not in table:
        raise ValueError(f"{where}: sha256 is missing; keys are stored as digests, and --new-api-key makes one")
    given = {field: table[field] for field in ("priority",) if field in table}
    try:
        return ApiKey(
            name, table["sha256"], table.get("tenant", name), {k: v for k, v in table.items() if k in limits}, **given
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
