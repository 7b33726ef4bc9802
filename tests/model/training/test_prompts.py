"""The built-in prompts: varied, balanced, reproducible, and nothing that is measured on."""

from __future__ import annotations

import collections
import random

import pytest

from umbra.configs.prompt_sets import FOLDER, Prompt, load_prompts
from umbra.model.training import prompts as built_in
from umbra.model.training.templates import Filler, read_sections, read_slots


def material() -> built_in.Material:
    found = built_in.Material()
    rng = random.Random(0)
    words = [f"w{i}" for i in range(400)]
    for seedling in built_in.seedlings(300, 0):
        found.add(seedling, " ".join(rng.choices(words, k=80)) + ".", ended=True)
    return found


def test_slots_are_filled_consistently():
    fill = Filler({"name": ["A", "B"], "greeting": ["hi {name}"]}, random.Random(0))
    text = fill("{name} {name2} {name} {n:3-5} {n} {greeting} {code}", {"code": "{name}"})
    first, second, again, number, same, hi, who, code = text.split()
    assert {first, second} == {"A", "B"} and again == first
    assert number == same and 3 <= int(number) <= 5
    assert (hi, who, code) == ("hi", first, "{name}"), "given values are put in as they are"
    with pytest.raises(ValueError, match="no list of values is called 'nothing'"):
        fill("{nothing}")


def test_every_template_can_be_filled():
    slots = read_slots(built_in.DATA / "slots.txt")
    passages = {name + n: "Text." for name in ("news", "article") for n in ("", "2", "3")}
    given = {**passages, "code": "x", "bug": "x", "passage": "Text."}
    for file in ("templates.txt", "material.txt"):
        for section, lines in read_sections(built_in.DATA / file).items():
            for line in lines:
                filled = Filler(slots, random.Random(1))(line, given)
                assert "{" not in filled, (section, line)
    assert all(len(items) == len(set(items)) for items in slots.values())


def test_prompts_are_reproducible_different_and_in_the_shares_asked_for():
    prompts = built_in.build_prompts(600, 0, material())
    assert prompts == built_in.build_prompts(600, 0, material())
    assert prompts != built_in.build_prompts(600, 1, material())
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts) > 540
    counts = collections.Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(built_in.SHARES)
    parts = sum(built_in.SHARES.values())
    assert all(counts[c] <= round(600 * share / parts) for c, share in built_in.SHARES.items())


def test_any_beginning_is_balanced():
    prompts = built_in.build_prompts(1200, 0, material())
    whole, half = (collections.Counter(p.category for p in part) for part in (prompts, prompts[: len(prompts) // 2]))
    assert all(abs(half[category] - n / 2) <= 2 for category, n in whole.items())


def test_without_material_only_what_needs_it_is_missing():
    categories = {prompt.category for prompt in built_in.build_prompts(600, 0, built_in.Material())}
    assert set(built_in.SHARES) - categories == {"summarization", "rag", "reading"}


def test_what_shares_words_with_a_measured_prompt_is_left_out():
    measured = [Prompt("m", "", ("One two three, four five six seven EIGHT nine.",))]
    kept = Prompt("a", "", ("two three four five six seven eight",))
    short = Prompt("c", "", ("short",))
    dropped = Prompt("b", "", ("say: two three four five six seven eight nine!",))
    assert built_in.without([kept, dropped, short], measured) == [kept, short]
    assert built_in.without([short], [Prompt("d", "", ("Short!",))]) == []


def test_few_built_in_prompts_share_words_with_ours_for_measuring():
    prompts = built_in.build_prompts(2000, 0, material())
    measured = [prompt for path in FOLDER.glob("*.jsonl") for prompt in load_prompts(path)]
    assert len(built_in.without(prompts, measured)) >= 0.98 * len(prompts)


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("What is a tide?", True), ("Hi", False), ("one two", False), ("<|im_end|> what is this about", False),
        ("word " * 300, False),
    ],
)  # fmt: skip
def test_questions_of_the_trunk_are_filtered(text, usable):
    assert built_in.usable_question(text) == usable


def test_passages_end_with_a_sentence_and_do_not_repeat_themselves():
    sentence = " ".join(f"word{i}" for i in range(60)) + ". "
    assert built_in.usable_passage(sentence + "cut off in the") == sentence.strip()
    assert built_in.usable_passage("the same again and again. " * 30) is None
    assert built_in.usable_passage("too short.") is None


def test_a_planted_bug_changes_the_code_most_of_the_time():
    code = built_in.read_code(built_in.DATA / "code.txt")
    assert len(code) >= 30 and not any(piece.startswith("#") for piece in code)
    rng = random.Random(0)
    changed = sum(built_in.plant_bug(piece, rng) != piece for piece in code for _ in range(10))
    assert 0.7 <= changed / (10 * len(code)) <= 0.9
