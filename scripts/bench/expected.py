"""How fast others are known to be: a run in which a peer falls far behind its figure is void.

A peer that is slower than it should be means that something is wrong with the run (another process, a throttled
machine, a bad build of the peer), and a ratio against it flatters us. Figures hold for the kind of machine they were
measured on, so each names it; a run on another is not judged, and says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .plan import Plan

SHARE = 0.8
"""A peer below this share of its figure makes the run void."""

Summary = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine: `cpu` is how the name of its CPU begins, `instructions` the widest of `WIDEST` it has."""

    about: str
    cpu: str
    instructions: str
    cores: int

    def is_this(self, machine: Mapping[str, Any]) -> bool:
        return (
            machine["cpu"].startswith(self.cpu)
            and machine["instructions"] == self.instructions
            and machine["cores"] == self.cores
        )


@dataclasses.dataclass(frozen=True)
class Expectation:
    """`speeds` of the peers in a benchmark whose plan has the values `where`; `figure` is the summary's key."""

    bench: str
    where: Mapping[str, object]
    figure: str
    speeds: Mapping[str, float]  # tokens/s, one value per system


_F32, _BF16 = "transformers-float32", "transformers-bfloat16"

SMOLLM2: Sequence[tuple[Machine, Sequence[Expectation]]] = (
    (
        Machine("2 cores of an AMD EPYC (Zen 3), AVX2", "AMD EPYC", "avx2", 2),
        (
            Expectation("decode", {}, "tok_s", {"llama.cpp": 115, _F32: 16, _BF16: 23}),
            Expectation("prefill", {"prompt_tokens": 1024}, "tok_s", {"llama.cpp": 226, _F32: 480, _BF16: 79}),
            Expectation(
                "batch", {"sequences": 8, "max_tokens": 64}, "tok_s", {"llama.cpp": 63, _F32: 44, _BF16: 15}
            ),
        ),
    ),
    (
        Machine("2 cores of an AMD EPYC (Zen 4), AVX-512, 30 GB/s", "AMD EPYC", "avx512_vnni", 2),
        (
            Expectation("decode", {}, "tok_s", {"llama.cpp": 125, "llama.cpp-q4_0": 140, _F32: 17, _BF16: 23}),
            Expectation("prefill", {"prompt_tokens": 1024}, "tok_s", {"llama.cpp": 250, _F32: 520, _BF16: 890}),
            Expectation("batch", {"sequences": 16}, "decode_tok_s", {_F32: 130, _BF16: 175}),
        ),
    ),
)  # fmt: skip
"""Of the default model, all cores in use. Measured with llama-cpp-python 0.3.36 and Transformers 5 by this program (the
first) and with the same peers before it existed (the second)."""


def judge(plan: Plan, machine: Mapping[str, Any], summary: Mapping[str, Summary]) -> dict[str, Any]:
    """For the report: `expected`, what is known of the peers here, and `void`, why the run does not count (None when it
    does)."""
    known = next((entry for entry in SMOLLM2 if entry[0].is_this(machine)), None)
    expectation = known and next((e for e in known[1] if _applies(plan, e)), None)
    if known is None or plan.model != "smollm2" or plan.threads != known[0].cores or expectation is None:
        return {"expected": "no figures for this benchmark, model and machine: the peers are not judged", "void": None}
    slow = []
    for system, speed in expectation.speeds.items():
        got = summary.get(system, {}).get(expectation.figure)
        if got is not None and got < SHARE * speed:
            slow.append(f"{system} made {got:.4g} tokens/s and is known to make {speed:g} ({got / speed:.2f} of it)")
    expected = {"machine": known[0].about, "figure": expectation.figure, "speeds": dict(expectation.speeds)}
    return {"expected": expected, "void": "; ".join(slow) or None}


def _applies(plan: Plan, expectation: Expectation) -> bool:
    return plan.bench == expectation.bench and all(
        getattr(plan, name) == value for name, value in expectation.where.items()
    )
