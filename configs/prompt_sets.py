"""Prompt files: JSON lines with `question_id`, `category` and `turns`, the user messages of a conversation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prompts"
"""Our own sets, shipped with the package."""

DEFAULT = FOLDER / "umbra_100.jsonl"
"""100 prompts in eight categories, in turn, so that any first part of the file is varied."""


class PromptFileError(Exception):
    """A prompt file cannot be used; one sentence with the file and line."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    turns: tuple[str, ...]  # user messages in order; the answers go in between


def load_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file (all by default). Raises `PromptFileError`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptFileError(f"cannot read the prompt file {path}: {why}") from None
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):  # other characters that end lines may stand in JSON's strings
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        prompt = _parse(line, f"{path}, line {number}")
        if prompt.id in seen:
            raise PromptFileError(f"{path}, line {number}: question_id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise PromptFileError(f"the prompt file {path} holds no prompt")
    return prompts


def load_passages(path: str | Path) -> list[str]:
    """The passages of a text file, one a line. Raises `PromptFileError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptFileError(f"cannot read the passages {path}: {why}") from None
    passages = [line.strip() for line in lines if line.strip()]
    if not passages:
        raise PromptFileError(f"the file {path} holds no passage; expected one a line")
    return passages


def _parse(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict) or not {"question_id", "turns"} <= row.keys():
        raise PromptFileError(f"{where}: expected an object with question_id, category and turns")
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PromptFileError(f"{where}: turns must be a list of one or more non-empty user messages")
    return Prompt(str(row["question_id"]), str(row.get("category", "")), tuple(turns))
