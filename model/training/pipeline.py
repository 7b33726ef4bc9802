"""From answers on disk to a calibrated shadow: ranking, warm start, fitting, calibration, measuring, report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ...configs.files import replacing
from ...configs.shadow import ShadowConfig, TrainingConfig
from ...configs.trunk import TrunkConfig
from ..shadow import Count, Shadow, count, drafting_from, initial, save_shadow
from .answers import Answered
from .chains import Proposals, propose
from .corpus import CALIBRATION, TEST, TRAIN, Corpus, build_corpus, coverage, rank_vocabulary, teach
from .fit import Batches, Trained, fit
from .gate import Gate, fit_gate
from .measure import Measured, bigram_table, gate_thresholds, measure
from .warm_start import warm_start

Progress = Callable[[str, int, int, int, str], None]
"""What is being done, how much is done, how much there is, how much was done before this run, and a few words."""


@dataclasses.dataclass(frozen=True)
class TrunkArrays:
    """What training needs of the trunk: its embedding as it is served, float32 `[V, D]`, the gain of its last norm
    `[D]`, and its output matrix `[V, D]` (the embedding itself where they are tied)."""

    embedding: np.ndarray
    final_norm: np.ndarray
    output: np.ndarray

    def save(self, path: Path) -> None:
        arrays = {"embedding": self.embedding, "final_norm": self.final_norm}
        if self.output is not self.embedding:
            arrays["output"] = self.output
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # names are not options

    @classmethod
    def load(cls, path: Path) -> TrunkArrays:
        with np.load(path) as file:
            embedding = file["embedding"]
            return cls(embedding, file["final_norm"], file["output"] if "output" in file.files else embedding)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run is about."""

    trunk: TrunkConfig
    weights_id: str
    shadow: ShadowConfig
    config: TrainingConfig
    out: Path
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, for the report."""

    run: Run
    shadow: Shadow
    size: Count
    tokens: dict[str, int]
    coverage: dict[str, float]
    trained: Trained
    held_out: Measured
    outside: Measured | None
    seconds: dict[str, float]


def train(
    run: Run, answered: Sequence[Answered], tests: Sequence[Answered], trunk: TrunkArrays, progress: Progress
) -> Result:
    """Train, calibrate, measure, and write `shadow.safetensors`."""
    clock = _Clock()
    corpus = build_corpus(answered)
    vocab = rank_vocabulary(corpus, run.trunk.vocab_size, run.shadow.vocab)
    rows = trunk.embedding[vocab]
    start = initial(run.shadow, vocab, run.config.seed)
    values = warm_start(
        run.shadow, {name: np.asarray(start[name]) for name in run.shadow.shapes}, corpus, trunk.embedding,
        trunk.final_norm, rows, vocab,
    )  # fmt: skip
    teacher = teach(corpus, trunk.final_norm, run.trunk.norm_eps, trunk.output[vocab])
    clock.lap("preparation")
    batches = Batches(corpus, teacher, vocab, run.trunk.vocab_size, run.config)

    def fitting(done: int, total: int, before: int, row: Mapping[str, float]) -> None:
        words = f"loss {row['loss']:.3f}, first place {row['right1']:.1%}" if row else ""
        progress("training, in steps", done, total, before, words)

    trained = fit(
        Shadow(run.shadow, values, vocab), batches, trunk.embedding, run.config, run.out / "checkpoints",
        mesh=run.mesh, identity=_identity(run, corpus), report=fitting,
    )  # fmt: skip
    clock.lap("training")
    shadow = Shadow(run.shadow, values | trained.values, vocab)
    gate, thresholds = calibrate(run, shadow, corpus, trunk, progress)
    shadow = Shadow(run.shadow, values | trained.values | gate.values, vocab)
    clock.lap("calibration")
    bigrams = bigram_table(corpus, run.trunk.vocab_size)

    def measured(part: Corpus, answers: np.ndarray) -> Measured:
        proposals = _proposals(shadow, part, answers, trunk, "measuring, in tokens", progress)
        return measure(part, proposals, gate, thresholds, bigrams, run.shadow.temperatures)

    held_out = measured(corpus, corpus.answers(TEST))
    outside = build_corpus(tests) if tests else None
    measured_outside = measured(outside, np.arange(len(outside.part))) if outside is not None else None
    clock.lap("measuring")
    result = Result(
        run=run, shadow=shadow, size=count(run.shadow, run.trunk),
        tokens={name: corpus.n_tokens(part) for name, part in _PARTS.items()},
        coverage={name: coverage(corpus, vocab, part) for name, part in _PARTS.items()},
        trained=trained, held_out=held_out, outside=measured_outside, seconds=clock.laps,
    )  # fmt: skip
    save_shadow(
        shadow, run.out / "shadow.safetensors", trunk=run.trunk.name, weights_id=run.weights_id, notes=_notes(result)
    )
    return result


_PARTS = {"training": TRAIN, "calibration": CALIBRATION, "test": TEST}


def calibrate(
    run: Run, shadow: Shadow, corpus: Corpus, trunk: TrunkArrays, progress: Progress
) -> tuple[Gate, list[dict[str, float]]]:
    """The gate, and its thresholds for wanted precisions in each temperature class."""
    answers = corpus.answers(CALIBRATION)
    proposals = _proposals(shadow, corpus, answers, trunk, "calibration, in tokens", progress)
    classes = len(run.shadow.temperatures)
    gate = fit_gate(proposals, corpus, classes)
    return gate, gate_thresholds(corpus, proposals, gate, classes)


def _proposals(
    shadow: Shadow, corpus: Corpus, answers: np.ndarray, trunk: TrunkArrays, what: str, progress: Progress
) -> Proposals:
    weights = drafting_from(shadow, trunk.embedding)
    return propose(corpus, answers.tolist(), weights, lambda done, total: progress(what, done, total, 0, ""))


def _identity(run: Run, corpus: Corpus) -> str:
    """What the checkpoints depend on."""
    digest = hashlib.sha256(corpus.tokens.tobytes() + corpus.part.tobytes() + corpus.hidden[::997].tobytes())
    plain = {"shadow": dataclasses.asdict(run.shadow), "config": dataclasses.asdict(run.config)}
    devices = run.mesh.size if run.mesh is not None else 1
    return json.dumps({**plain, "corpus": digest.hexdigest(), "devices": devices}, sort_keys=True)


def _notes(result: Result) -> dict[str, Any]:
    """What a file tells of its making; nothing in it depends on the time or the machine."""
    return {
        "training": dataclasses.asdict(result.run.config), "tokens": result.tokens, "steps": result.trained.steps,
        "tokens_per_pass": {name: round(value, 3) for name, value in result.held_out.gated["all"].items()},
    }  # fmt: skip


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now
