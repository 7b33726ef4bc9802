"""What the options for levels and thinking mean together."""

from __future__ import annotations

import argparse

import pytest

from umbra.scripts.level_options import (
    UNSAID,
    Think,
    add_level_option,
    add_lossy_option,
    add_think_option,
    effort,
    think,
)
from umbra.serving.effort import Effort


def parsed(*argv):
    parser = argparse.ArgumentParser()
    add_level_option(parser)
    add_think_option(parser)
    add_lossy_option(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], Effort("medium", 0)),
        (["--level", "HIGH"], Effort("high", 0)),
        (["--think", "off"], Effort("medium", 0)),
        (["--think", "none"], Effort("medium", 0)),
        (["--think", "minimal"], Effort("minimal", 0)),
        (["--think", "Low"], Effort("low", 1024)),
        (["--think", "xhigh"], Effort("high", 16384)),
        (["--think", "adaptive"], Effort("medium", -1)),
        (["--think", "-1"], Effort("medium", -1)),
        (["--think", "0"], Effort("medium", 0)),
        (["--think", "300"], Effort("medium", 300)),
        (["--think", "low", "--level", "minimal"], Effort("minimal", 1024)),
        (["--think", "70", "--level", "high"], Effort("high", 70)),
    ],
)
def test_both_options_together(argv, wanted):
    args = parsed(*argv)
    assert effort(args.level, args.think) == wanted
    assert args.lossy is False


@pytest.mark.parametrize("text", ["", "very", "-2", "1.5", "9" * 40, "--", "low high"])
def test_what_cannot_be_thought(text):
    with pytest.raises(argparse.ArgumentTypeError, match="supported: off, adaptive, none, minimal, low, medium, high"):
        think(text)


def test_how_it_is_shown():
    assert [str(one) for one in (UNSAID, think("off"), think("low"), think("-1"), think("5"))] == [
        "off", "off", "low", "adaptive", "5 tokens",
    ]  # fmt: skip
    assert think("none") == Think(effort="none")
