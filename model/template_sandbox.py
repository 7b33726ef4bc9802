"""The Jinja environment chat templates run in: Transformers' extensions, filters and flags, no way out, and an end.

Beyond Jinja's own sandbox (no underscore attributes, no changes to data, ranges of at most 100,000 numbers), a template
may not write more than `MAX_OUTPUT` characters, repeat a value to more than that many elements, compute huge powers, or
step through more than `MAX_STEPS` numbers with `range`. It is still a program of the model's author: these limits stop
accidents and the obvious attacks, they do not bound its time in every case.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MAX_OUTPUT = 1 << 26
"""Characters; far above any context, far below the machine's memory."""
MAX_STEPS = 1_000_000
_MAX_EXPONENT = 1024

_used = threading.local()


class SandboxError(Exception):
    """The template tried something it may not do."""


def compile_template(source: str) -> jinja2.Template:
    """Raises `jinja2.TemplateSyntaxError`."""
    return _environment().from_string(source)


def free_variables(source: str) -> frozenset[str]:
    """The names that a template, which compiles, reads from its caller."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text `template` writes; raises `SandboxError`, `jinja2.TemplateError` and what its operations raise."""
    _used.steps = 0
    pieces, size = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_OUTPUT:
            raise SandboxError(f"it writes more than {MAX_OUTPUT} characters")
    return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not _small(left) or not _small(right):
                raise SandboxError(f"it computes a power of numbers above {_MAX_EXPONENT}")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int) and len(sequence) * count > MAX_OUTPUT:
                    raise SandboxError(f"it repeats a value to more than {MAX_OUTPUT} elements")
        return super().call_binop(context, operator, left, right)


def _small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _MAX_EXPONENT


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the model itself wrote, for training; here it only passes the text on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without underscore names, which would reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SandboxError(f"it stores {name!r} in a namespace; names must not start with an underscore")


class _Dict:
    """`dict` as templates use it; the class itself would give them its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, HTML characters stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    numbers = jinja2.sandbox.safe_range(*args)
    _used.steps += len(numbers)
    if _used.steps > MAX_STEPS:
        raise SandboxError(f"it steps through more than {MAX_STEPS} numbers")
    return numbers


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace, range=_range
    )
    return environment
