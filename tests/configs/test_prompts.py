"""Our own prompt sets and the reader of prompt files."""

from __future__ import annotations

import collections
import json

import pytest

from umbra.configs.prompt_sets import DEFAULT, FOLDER, PromptFileError, load_passages, load_prompts

CATEGORIES = {"chat", "maths", "code", "code_edit", "summary", "retrieval", "json", "translation"}


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.name)
def test_every_set_is_well_formed(path):
    for row in rows(path):
        assert list(row) == ["question_id", "category", "turns"]
        assert row["turns"] and all(turn == turn.strip() and turn for turn in row["turns"])
    prompts = load_prompts(path)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    assert all(sum(map(len, prompt.turns)) < 4000 for prompt in prompts)


def test_the_default_set_covers_the_categories():
    prompts = load_prompts(DEFAULT)
    counts = collections.Counter(prompt.category for prompt in prompts)
    assert len(prompts) == 100
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 12
    assert sum(len(prompt.turns) > 1 for prompt in prompts) >= 10


def test_any_first_part_of_the_default_set_is_varied():
    assert {prompt.category for prompt in load_prompts(DEFAULT, limit=8)} == CATEGORIES


def test_the_edit_set_asks_for_its_own_code_again():
    prompts = load_prompts(FOLDER / "edits_30.jsonl")
    assert len(prompts) == 30
    assert all("```" in prompt.turns[0] and "whole code again" in prompt.turns[0] for prompt in prompts)


def test_the_copy_set_asks_for_its_own_text():
    prompts = load_prompts(FOLDER / "copy_10.jsonl")
    assert len(prompts) == 10
    assert all("exactly" in prompt.turns[0].split("\n\n")[0] for prompt in prompts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{not json", "line 1: not JSON"),
        ('{"question_id": 1}', "line 1: expected an object with question_id"),
        ('{"question_id": 1, "turns": []}', "turns must be a list"),
        ('{"question_id": 1, "turns": ["a", 2]}', "turns must be a list"),
        ('{"question_id": 1, "turns": ["a"]}\n\n{"question_id": 1, "turns": ["b"]}', "line 3: question_id '1' occurs"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=message) as caught:
        load_prompts(path)
    assert "\n" not in str(caught.value)


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ('{"question_id": 1, "turns": ["a\u2028b\u0085c"]}', '{"question_id": 2, "turns": ["d"]}')
    path.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [prompt.turns[0] for prompt in load_prompts(path)] == ["a\u2028b\u0085c", "d"]


def test_passages_are_the_lines_of_a_file(tmp_path):
    path = tmp_path / "passages.txt"
    path.write_text("\ufeffOne passage.\n\n  Another\u2028one. \r\n", encoding="utf-8", newline="")
    assert load_passages(path) == ["One passage.", "Another\u2028one."]
    path.write_text(" \n")
    with pytest.raises(PromptFileError, match="passages.txt holds no passage; expected one a line"):
        load_passages(path)
    with pytest.raises(PromptFileError, match="cannot read the passages .*: No such file"):
        load_passages(tmp_path / "nowhere.txt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PromptFileError, match="nowhere.jsonl: No such file"):
        load_prompts(tmp_path / "nowhere.jsonl")
