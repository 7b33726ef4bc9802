"""Completions on disk: shards that are only ever added, each written in one step and checked when read.

A shard `part-00042.npz` holds some completions of jobs, in the order in which they ended. Killing the process loses
what is not in a shard yet, which is then generated again.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...configs.files import replacing, write_text
from .jobs import Completion, Job

SHARDS = "part-*.npz"
SHARD_TOKENS = 8192
"""Tokens after which a shard is written."""


class StoreError(Exception):
    """The files of a store cannot be used; one sentence."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A finished job."""

    job: Job
    completion: Completion


class CompletionStore:
    """The completions of one list of jobs, by index. `settings` say what they depend on: a folder with other settings
    is refused."""

    def __init__(self, folder: Path, settings: Mapping[str, object], *, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self._shard_tokens = shard_tokens
        self._pending: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        header, text = folder / "settings.json", json.dumps(dict(settings), sort_keys=True, indent=1)
        if header.exists() and header.read_text(encoding="utf-8") != text:
            raise StoreError(
                f"{folder} holds answers made with other settings; give another --out or remove the folder"
            )
        write_text(header, text)
        self.rows = read_rows(folder)
        last = max((int(path.stem.split("-")[1]) for path in folder.glob(SHARDS)), default=-1)
        self._next = last + 1

    def add(self, index: int, job: Job, completion: Completion) -> None:
        self.rows[index] = Row(job, completion)
        self._pending.append(index)
        if sum(len(self.rows[i].completion.token_ids) for i in self._pending) >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if not self._pending:
            return
        arrays = _arrays({index: self.rows[index] for index in self._pending})
        with replacing(self.folder / f"part-{self._next:05d}.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, crc=np.uint32(_crc(arrays)), **arrays)  # type: ignore[arg-type]  # names are not options
        self._next += 1
        self._pending = []


def read_rows(folder: Path) -> dict[int, Row]:
    """The completions of a store's folder, by the index of their job."""
    rows: dict[int, Row] = {}
    for path in sorted(folder.glob(SHARDS)):
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            damaged = int(arrays.pop("crc")) != _crc(arrays)
        except Exception:  # whatever a damaged archive makes numpy and zipfile raise
            damaged = True
        if damaged:
            raise StoreError(f"the shard {path} is damaged; remove it, and its answers are generated again")
        rows |= _rows(arrays)
    return rows


def _crc(arrays: Mapping[str, np.ndarray]) -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), crc))
    return crc


def _arrays(rows: Mapping[int, Row]) -> dict[str, np.ndarray]:
    jobs = [row.job for row in rows.values()]
    done = [row.completion for row in rows.values()]
    features = [completion.features for completion in done if completion.features is not None]
    return {
        "index": np.array(list(rows), np.int32),
        "max_tokens": np.array([job.max_tokens for job in jobs], np.int32),
        "temperature": np.array([job.temperature for job in jobs], np.float32),
        "seed": np.array([job.seed for job in jobs], np.uint32),
        "ended": np.array([completion.ended for completion in done], np.bool_),
        "has_features": np.array([completion.features is not None for completion in done], np.bool_),
        "prompt_lengths": np.array([len(job.prompt_ids) for job in jobs], np.int32),
        "answer_lengths": np.array([len(completion.token_ids) for completion in done], np.int32),
        "prompts": np.array([token for job in jobs for token in job.prompt_ids], np.int32),
        "answers": np.array([token for completion in done for token in completion.token_ids], np.int32),
        "features": np.concatenate(features) if features else np.zeros((0, 0), np.float16),
    }


def _rows(arrays: Mapping[str, np.ndarray]) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
    answers = np.split(arrays["answers"], np.cumsum(arrays["answer_lengths"])[:-1])
    at = 0
    for i, index in enumerate(arrays["index"].tolist()):
        features = None
        if arrays["has_features"][i]:
            features = arrays["features"][at : at + len(answers[i])]
            at += len(answers[i])
        job = Job(
            tuple(prompts[i].tolist()), int(arrays["max_tokens"][i]), float(arrays["temperature"][i]),
            int(arrays["seed"][i]),
        )  # fmt: skip
        rows[index] = Row(job, Completion(tuple(answers[i].tolist()), features, bool(arrays["ended"][i])))
    return rows
