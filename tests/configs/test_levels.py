from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.configs.levels import (
    COMPLEXITY,
    DEFAULT_LEVEL,
    EFFORTS,
    LEVELS,
    LOSSY,
    RELAXED,
    Complexity,
    Level,
    Relaxation,
    check_budget,
    find_effort,
    find_level,
    fit_budget,
    relaxation,
)
from umbra.model.shadow import shadow_id, shipped


def test_the_levels_and_their_budgets():
    assert {level.name: level.thinking for level in LEVELS.values()} == {
        "minimal": 0,
        "low": 1024,
        "medium": 7500,
        "high": 16384,
    }
    assert DEFAULT_LEVEL == "medium" and list(LEVELS) == [level.name for level in LEVELS.values()]


def test_levels_are_exact_unless_a_lossy_one_is_asked_for():
    assert all(level.exact and level.draft == "auto" and level.layers == "all" for level in LEVELS.values())
    assert [name for name, level in LOSSY.items() if not level.exact] == ["minimal", "low"]
    assert find_level("low").exact and not find_level("low", lossy=True).exact
    assert find_level("high", lossy=True) is find_level("high")


def test_names_are_found_in_any_case():
    assert find_level("HIGH").name == "high"
    assert find_effort("XHIGH") is LEVELS["high"] and find_effort("none") is None
    assert {name: level and level.name for name, level in ((n, find_effort(n)) for n in EFFORTS)} == EFFORTS


@pytest.mark.parametrize("name", ["", "xhigh", "turbo", "Medium ", "x" * 1000])
def test_unknown_levels_are_told_what_is_supported(name):
    with pytest.raises(ValueError, match="is not supported; supported: minimal, low, medium, high$"):
        find_level(name)


def test_unknown_efforts_are_told_what_is_supported():
    with pytest.raises(ValueError, match="supported: none, minimal, low, medium, high, xhigh$"):
        find_effort("huge")


@pytest.mark.parametrize("tokens", [-2, 2**31, -(2**70), 2**70])
def test_budgets_out_of_range(tokens):
    with pytest.raises(ValueError, match=r"supported: -1 \(adaptive\), 0 \(off\), or a number of tokens"):
        check_budget(tokens)


@given(st.integers(0, 20000), st.integers(-10, 40000))
def test_a_budget_leaves_room_for_the_answer(asked, room):
    budget = fit_budget(asked, room)
    assert 0 <= budget <= asked and budget <= max(room, 0) / 3
    assert budget in (0, asked, room // 3)  # nothing is given away


def test_what_is_no_level():
    for wrong in ({"thinking": -1}, {"thinking": 0, "draft": "magic"}, {"thinking": 0, "layers": "some"}):
        with pytest.raises(ValueError):
            Level("x", **wrong)


def test_adaptive_budgets_rise_with_the_score():
    scores = [score / 2 for score in range(60)]
    budgets = [COMPLEXITY.budget(score) for score in scores]
    assert budgets == sorted(budgets) and budgets[0] == 0 and budgets[-1] == LEVELS["high"].thinking


@pytest.mark.parametrize(
    ("points", "most", "budgets"),
    [
        ({"a": 1.0}, {}, ((0.0, 0),)),
        ({"a": -1.0}, {"a": 1.0}, ((0.0, 0),)),
        ({}, {}, ()),
        ({}, {}, ((1.0, 0),)),
        ({}, {}, ((0.0, 5), (2.0, 10), (1.0, 20))),
        ({}, {}, ((0.0, 50), (2.0, 10))),
    ],
)
def test_rules_that_are_not_monotone_are_refused(points, most, budgets):
    with pytest.raises(ValueError):
        Complexity(points, most, budgets)


def calibrated(folder, **changes):
    data = {"weights_id": "w", "shadow_id": "s", "margin": 0.4, "bound": 0.03, "confidence": 0.95, "prompts": 80}
    data |= {"grid": [], **changes}
    (folder / "tiny.json").write_text(json.dumps(data))


def test_the_calibrated_margin_of_a_trunk(tmp_path):
    calibrated(tmp_path)
    assert relaxation("tiny", "w", "s", tmp_path) == Relaxation(0.4, 0.03, 0.95, 80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_id": "other"}, "calibrated on other weights"),
        ({"shadow_id": "other"}, "calibrated with another shadow"),
        ({"margin": "much"}, "damaged"),
        ({"margin": None}, "damaged"),
        ({"margin": -1}, "must not be negative"),
        ({"bound": 2}, "must be shares"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, changes, message):
    calibrated(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        relaxation("tiny", "w", "s", tmp_path)


@pytest.mark.parametrize("file", sorted(RELAXED.glob("*.json")), ids=lambda file: file.name)
def test_what_ships_was_calibrated_with_the_shadow_that_ships(file):
    weights = json.loads(file.read_text())["weights_id"]
    shadow = shipped(weights)
    assert shadow is not None
    assert relaxation(file.stem, weights, shadow_id(shadow)).margin > 0


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(ValueError, match="not calibrated for tiny; supported: exact levels"):
        relaxation("tiny", "w", "s", tmp_path)
    (tmp_path / "tiny.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        relaxation("tiny", "w", "s", tmp_path)
