"""What `--help` says: options of a kind look alike, and every default is said once, in the same words."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

SCRIPTS = ("bench", "chat", "compile_tpu", "convert", "generate", "serve", "train_shadow")
PLACE = re.compile(r"[A-Z]+(,(\.\.\.|[A-Z]+))?|\{.+\}|data=D,model=M|QUANT\[.*\]")


def parsers():
    for name in SCRIPTS:
        made = importlib.import_module(f"umbra.scripts.{'bench.cli' if name == 'bench' else name}").parser()
        groups = [one for one in made._actions if isinstance(one, argparse._SubParsersAction)]
        for command, one in groups[0].choices.items() if groups else ((name, made),):
            yield pytest.param(one, id=command)


@pytest.mark.parametrize("parser", list(parsers()))
def test_every_option_is_explained_in_the_same_way(parser):
    formatter = parser._get_formatter()
    assert parser.format_help().isascii()
    for action in parser._actions:
        text = formatter._get_help_string(action)
        assert text, action.dest
        assert len(re.findall("default", text)) == text.count("(default: ") <= 1, text
        takes_value = bool(action.option_strings) and action.nargs != 0
        if takes_value and not isinstance(action, argparse.BooleanOptionalAction):
            place = formatter._format_args(action, formatter._get_default_metavar_for_optional(action)).split(" ")[0]
            assert PLACE.fullmatch(place), (action.dest, place)
            known = action.default not in (None, (), [], "")
            assert not known or text.endswith(")") and "(default: " in text, (action.dest, text)
