"""The detector of complexity: sensible on prompts labelled by hand, never lowered by more of a feature, explained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.configs.levels import COMPLEXITY, LEVELS, Complexity
from umbra.serving.thinking import assess, findings

LABELLED = {
    "none": [
        "Hi",
        "Hello, how are you today?",
        "Thanks a lot!",
        "What is the capital of France?",
        "Translate 'good morning' into German.",
        "Write a haiku about autumn.",
        "Tell me a joke about cats.",
        "Who wrote Hamlet?",
        "Give me a synonym for happy.",
        "What colour is the sky?",
        "Name a famous painter.",
        "Write a short birthday greeting for my aunt.",
    ],
    "some": [
        "Explain why the sky is blue.",
        "Write a Python function that reverses a string.",
        "What is 17 * 23?",
        "Compare tea and coffee.",
        "Plan a weekend trip to Rome: first the sights, then the food.",
        "How many legs do three spiders have?",
        "Fix the bug in this code: `for i in range(10) print(i)`",
        "Is 91 a prime number?",
        "What are the pros and cons of remote work?",
        "Convert a recipe from four people to six: 300 g of flour, 2 eggs.",
    ],
    "much": [
        "A train leaves at 9:00 at 80 km/h, another at 10:00 at 120 km/h. How many hours until the second one "
        "catches up? Then calculate the distance.",
        "Prove that the sum of two odd numbers is even, then show that the product of two odd numbers is odd.",
        "Implement an LRU cache class in Python with get(key) and put(key, value), explain its complexity and write "
        "unit tests. Then compare it with functools.lru_cache.",
        "Solve the equation x^2 - 5x + 6 = 0, then find the area of the triangle with these roots as legs and compute "
        "the ratio of its sides.",
        "Find the bug, explain why it happens and refactor the function:\n```python\ndef total(items):\n    s = 0\n"
        "    for i in range(len(items)+1):\n        s += items[i]\n    return s\n```",
        "1. Read the table below.\n2. Compute the mean and the median of each column.\n3. Explain which of them is the "
        "better summary: 3, 5, 8, 13; 2, 2, 2, 90.",
        "Suppose a fair coin is thrown ten times. What is the probability of exactly three heads, and why? Derive the "
        "general formula.",
    ],
}
GROUPS = list(LABELLED)


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("label", "prompt"), [(label, prompt) for label in GROUPS for prompt in LABELLED[label]])
def test_labelled_prompts(label, prompt):
    budget = assess(user(prompt)).budget
    low, high = LEVELS["low"].thinking, LEVELS["high"].thinking
    if label == "none":
        assert budget == 0
    elif label == "some":
        assert 0 < budget <= low
    else:
        assert low < budget <= high


def test_every_label_scores_above_the_one_before():
    scores = {label: [assess(user(prompt)).score for prompt in LABELLED[label]] for label in GROUPS}
    for lower, higher in zip(GROUPS, GROUPS[1:], strict=False):
        assert max(scores[lower]) < min(scores[higher])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([p for group in LABELLED.values() for p in group]), min_size=1, max_size=5))
def test_more_never_lowers_the_score(prompts):
    scores = [assess(user("\n".join(prompts[:n]))).score for n in range(1, len(prompts) + 1)]
    assert scores == sorted(scores)


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        ("maths", "Solve the equation"),
        ("maths", "a ≤ b"),
        ("maths", r"\frac{a}{b}"),
        ("numbers", "3.5 or seventy and twelve"),
        ("code", "```\nx\n```"),
        ("code", "call my_function(x)"),
        ("code", "obj.method(x)"),
        ("steps", "- one\n- another"),
        ("steps", "Who? Where?"),
        ("reasoning", "Why is it so"),
        ("reasoning", "if it rains then what"),
        ("length", "word " * 130),
    ],
)
def test_features(feature, text):
    assert findings(text)[feature] > 0


@pytest.mark.parametrize("text", ["", "the weather is nice", "Ein schöner Tag.", "今日はいい天気です"])
def test_plain_text_has_no_features(text):
    assert not any(findings(text).values())


def test_tools_count():
    plain, with_tools = (
        assess(user("What is the weather?"), tools=tools) for tools in (None, [{"name": "weather"}] * 2)
    )
    assert with_tools.score == plain.score + 2 * COMPLEXITY.points["tools"]
    assert dict(with_tools.features)["tools"] == 2


def test_the_last_user_message_counts():
    hard = LABELLED["much"][0]
    messages = [*user(hard), {"role": "assistant", "content": hard}, *user("Thanks!")]
    assert assess(messages).budget == 0
    assert assess(
        [*user("Thanks!"), {"role": "user", "content": [{"type": "text", "text": hard}, {"type": "x"}]}]
    ).budget
    assert assess([{"role": "system", "content": hard}]).score == 0
    assert assess([]).score == 0


def test_the_choice_explains_itself_and_is_the_same_every_time():
    found = assess(user("Solve 3 * x = 12, then explain why."))
    assert str(found) == f"score {found.score:g} (reasoning 3, maths 2, numbers 1, steps 1)"
    assert found.score == sum(points for _, points in found.features) == 7
    assert all(assess(user("Solve 3 * x = 12, then explain why.")) == found for _ in range(5))
    assert str(assess(user("Hi"))) == "score 0"


def test_points_and_limits_are_data():
    rules = Complexity(
        dict.fromkeys(COMPLEXITY.points, 2.0), dict.fromkeys(COMPLEXITY.points, 3.0), ((0.0, 1), (3.0, 2))
    )
    found = assess(user("why why why"), rules=rules)
    assert found.features == (("reasoning", 3.0),) and found.budget == 2


def test_the_ends_of_a_long_message_are_looked_at():
    filler = "nothing here " * 10_000
    assert findings(f"why {filler}")["reasoning"] == 1 and findings(f"{filler} why")["reasoning"] == 1
    assert findings(filler)["length"] == 20_000 // 120


HOSTILE = ("a_", " \n", "if ", "a", "1", ";\t")


@pytest.mark.parametrize("text", [piece * 50_000 for piece in HOSTILE], ids=map(repr, HOSTILE))
def test_hostile_texts_take_few_steps(text):
    findings(text)  # a pattern that backtracks would not come back
