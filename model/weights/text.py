"""The tokenizer, chat template and end ids that come with a model's weights, and how they move between formats.

A GGUF file has them as fields. They are either the tokenizer itself (`tokenizer.ggml.tokens` and so on) or whole files
of a Hugging Face folder (`tokenizer.huggingface.json`, as the GGUF specification provides, and the like). A folder made
from a GGUF file keeps its fields in `tokenizer.gguf.json`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..chat_template import ChatTemplate, ChatTemplateError
from ..tokenizer import Tokenizer, TokenizerError
from .errors import ModelError
from .jsonfile import read_json
from .source import Source

GGUF_FIELDS = "tokenizer.gguf.json"
_EMBEDDED = {
    "tokenizer.json": "tokenizer.huggingface.json",
    "tokenizer_config.json": "tokenizer.huggingface.tokenizer_config.json",
    "special_tokens_map.json": "tokenizer.huggingface.special_tokens_map.json",
    "generation_config.json": "tokenizer.huggingface.generation_config.json",
    "chat_template.json": "tokenizer.huggingface.chat_template.json",
    "chat_template.jinja": "tokenizer.chat_template",
}


@dataclasses.dataclass(frozen=True)
class Text:
    """All None and empty for weights that came without a tokenizer."""

    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    eos_ids: tuple[int, ...] = ()


def load_text(source: Source) -> Text:
    """From GGUF fields or from the files of a folder; a `ModelError` says what is damaged or not supported."""
    fields = source.metadata
    try:
        if fields is None:
            return _from_folder(source.text_folder)
        if "tokenizer.ggml.tokens" in fields:
            return _from_gguf(fields)
        with tempfile.TemporaryDirectory() as folder:
            _write_files(_embedded_files(fields), Path(folder))
            return _from_folder(Path(folder))
    except TokenizerError as error:
        raise ModelError(f"the model's tokenizer cannot be used: {error}") from error
    except ChatTemplateError as error:
        raise ModelError(f"the model's chat template cannot be used: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ModelError(f"the model's tokenizer is damaged: {type(error).__name__}: {error}") from error


def _from_gguf(fields: Mapping[str, Any]) -> Text:
    tokenizer = Tokenizer.from_gguf(fields)
    return Text(tokenizer, ChatTemplate.from_gguf(fields, tokenizer), tokenizer.eos_ids)


def _from_folder(folder: Path) -> Text:
    if not (folder / "tokenizer.json").is_file():
        if (folder / "tokenizer.model").is_file() or (folder / "vocab.json").is_file():
            raise ModelError(
                f"{folder} has a tokenizer, but no tokenizer.json; supported: tokenizer.json (Transformers writes it "
                "with `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`)"
            )
        return Text(eos_ids=_configured_ends(folder))
    tokenizer = Tokenizer.from_file(folder)
    ends = {*tokenizer.eos_ids, *_configured_ends(folder)}
    return Text(tokenizer, ChatTemplate.from_folder(folder, tokenizer), tuple(sorted(ends)))


def _configured_ends(folder: Path) -> tuple[int, ...]:
    """The ids config.json and generation_config.json name."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).is_file():
            continue
        config = read_json(folder / name)
        nested = config.get("text_config")
        value = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                ids.add(item)
    return tuple(sorted(ids))


def text_files(source: Source, text: Text) -> dict[str, str]:
    """The files by which a folder keeps the tokenizer and chat template of `source`."""
    fields = source.metadata
    if fields is None:
        files = _folder_files(source.text_folder)
    elif "tokenizer.ggml.tokens" in fields:
        files = {GGUF_FIELDS: json.dumps(_json_fields(fields))}
        if text.chat_template is not None:
            files["chat_template.jinja"] = text.chat_template.source
    else:
        files = _embedded_files(fields)
    if text.eos_ids:
        generation = json.loads(files.get("generation_config.json", "{}"))
        files["generation_config.json"] = json.dumps({**generation, "eos_token_id": list(text.eos_ids)}, indent=2)
    return files


def text_fields(source: Source, text: Text) -> dict[str, Any]:
    """The fields by which a GGUF file keeps the tokenizer and chat template of `source`."""
    if source.metadata is not None and "tokenizer.ggml.tokens" in source.metadata:
        return {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    files = text_files(source, text)
    fields = {_EMBEDDED[name]: content for name, content in files.items() if name in _EMBEDDED}
    return {"tokenizer.ggml.model": "no_vocab", **fields}


def write_text_files(source: Source, text: Text, folder: Path) -> None:
    """Writes `text_files` into `folder`."""
    _write_files(text_files(source, text), folder)


def read_gguf_fields(folder: Path) -> dict[str, Any] | None:
    """The fields in the folder's `tokenizer.gguf.json`; None if it has none or has a tokenizer.json."""
    if not (folder / GGUF_FIELDS).is_file() or (folder / "tokenizer.json").is_file():
        return None
    fields = read_json(folder / GGUF_FIELDS)
    for key, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], int | float):
            fields[key] = np.array(value, np.float32 if isinstance(value[0], float) else np.int32)
    return fields


def _json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in wanted.items()}


def _folder_files(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in _EMBEDDED if (folder / name).is_file()}


def _embedded_files(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: fields[key] for name, key in _EMBEDDED.items() if isinstance(fields.get(key), str)}


def _write_files(files: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
