"""The process a system under test lives in: requests as JSON lines on stdin, answers as JSON lines on stdout.

    python -m umbra.scripts.bench.worker MODULE:CLASS

A request is `{"op": ...}`; the answer is `{"ok": ...}` or `{"error": "one sentence"}`. What libraries print goes to
stderr. The process ends with its parent.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .launch import end_with_parent
from .systems.base import Setup, System


def main() -> int:
    end_with_parent()
    answers = _take_stdout()
    module, _, name = sys.argv[1].partition(":")
    system: System | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if system is None:
                system = getattr(importlib.import_module(module), name)()
            reply = {"ok": answer(system, request)}
        except Exception as error:  # whatever an engine under test may raise belongs in the report
            text = " ".join(str(error).split())
            reply = {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    return 0


def answer(system: System, request: dict[str, Any]) -> Any:
    """Carry out one request."""
    if request["op"] in ("load", "describe"):
        mesh = request["setup"]["mesh"]
        setup = Setup(**{**request["setup"], "mesh": tuple(mesh) if mesh else None})
        return getattr(system, request["op"])(setup)
    if request["op"] == "generate":
        return dataclasses.asdict(system.generate(request["prompts"], request["max_tokens"]))
    if request["op"] == "score":
        return [dataclasses.asdict(scores) for scores in system.score(request["sequences"], request["begins"])]
    method: Callable[..., Any] = getattr(system, request["op"])
    return method(*request["args"])


def _take_stdout() -> TextIO:
    """The real stdout for answers; whatever else writes to file descriptor 1 from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.exit(main())
