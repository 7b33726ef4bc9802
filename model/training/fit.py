"""The optimiser's loop: the shadow learns to guess the trunk's next tokens, places of a chain side by side.

An example is a token of an answer (the anchor) with the tokens behind it. A place of a greedy chain only counts when
all places before it were guessed right, so unrolling over the true tokens is exactly what happens when drafting.
The loss of a place is the cross-entropy with the token that the trunk chose, mixed with that with the trunk's own
probabilities of its likeliest tokens.

Letters: B examples of a step, K places, D model width, V vocabulary, Z draft vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...configs.files import write_text
from ...configs.shadow import TrainingConfig
from ..shadow import CALIBRATED, Shadow, rms, step
from .corpus import TRAIN, Corpus, Teacher

CHECKPOINT_STEPS = 100
"""Optimiser steps between checkpoints."""


class Batch(NamedTuple):
    """Examples of a step. The first share of them is trained on at every place, fewer at each later one."""

    hidden: np.ndarray  # float16 [B, D]
    tokens: np.ndarray  # int32 [B, K]: the token before each place
    labels: np.ndarray  # int32 [B, K]: place in the draft vocabulary of the token chosen; -1: none
    teacher: np.ndarray  # int32 [B, K, top]
    weight: np.ndarray  # float16 [B, K, top]; 0 behind the end of an answer


class Batches:
    """Examples in an order that depends on the seed and the step alone."""

    def __init__(self, corpus: Corpus, teacher: Teacher, vocab: np.ndarray, vocab_size: int, config: TrainingConfig):
        self._corpus, self._teacher, self._config = corpus, teacher, config
        self._anchors = corpus.anchors(TRAIN)
        if not len(self._anchors):
            raise ValueError("there are no answers to train on; give more prompts")
        self._place = np.full(vocab_size, -1, np.int32)
        self._place[vocab] = np.arange(len(vocab))
        self.size = min(config.batch, len(self._anchors))
        self.per_epoch = len(self._anchors) // self.size
        self._epoch, self._order = -1, self._anchors

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self._config.epochs * self.per_epoch))

    def at(self, step: int) -> Batch:
        epoch, number = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._anchors))
            self._epoch, self._order = epoch, self._anchors[order]
        return self.of(self._order[number * self.size : (number + 1) * self.size])

    def of(self, anchors: np.ndarray) -> Batch:
        corpus, K = self._corpus, self._config.unroll
        ahead = anchors[:, None] + np.arange(1, K + 1)
        inside = np.arange(1, K + 1) <= corpus.left[anchors][:, None]
        ahead = np.minimum(ahead, len(corpus.tokens) - 1)
        return Batch(
            hidden=corpus.hidden[anchors],
            tokens=corpus.tokens[np.concatenate([anchors[:, None], ahead[:, :-1]], axis=1)],
            labels=np.where(inside, self._place[corpus.tokens[ahead]], -1),
            teacher=self._teacher.index[ahead],
            weight=np.where(inside[:, :, None], self._teacher.weight[ahead], np.float16(0)),
        )


def place_sizes(batch: int, config: TrainingConfig, devices: int = 1) -> tuple[int, ...]:
    """How many examples of a batch each place is trained on: a multiple of the devices."""
    sizes = (batch * config.thinning**place for place in range(config.unroll))
    return tuple(max(devices, int(size) // devices * devices) for size in sizes)


def losses(
    shadow: Shadow, batch: Batch, table: jax.Array, rows: jax.Array, sizes: tuple[int, ...], teacher: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss (summed over places, each a mean weighted by how many examples it has), and per place the cross-entropy
    and the share of right guesses. `table` `[V, D]` is the normalised embedding, `rows` `[Z, D]` the plain one."""
    head = shadow.head(rows)
    outputs = _outputs(shadow, batch, table, sizes)
    total, measures = jnp.float32(0), {}
    for place, (n, o) in enumerate(zip(sizes, outputs, strict=True)):
        logits = o @ head.T
        log_sum = jax.nn.logsumexp(logits, axis=1)
        label = batch.labels[:n, place]
        known = label >= 0
        chosen = jnp.take_along_axis(logits, jnp.maximum(label, 0)[:, None], axis=1)[:, 0]
        hard = jnp.where(known, log_sum - chosen, 0.0)
        weight = batch.weight[:n, place].astype(jnp.float32)
        soft = weight.sum(1) * log_sum - jnp.sum(
            weight * jnp.take_along_axis(logits, batch.teacher[:n, place], axis=1), axis=1
        )
        inside = jnp.maximum(jnp.sum(weight.sum(1) > 0.5), 1)
        total += (n / sizes[0]) * jnp.sum((1 - teacher) * hard + teacher * soft) / inside
        right = jnp.sum(known & (jnp.argmax(logits, axis=1) == label)) / inside
        measures[f"ce{place + 1}"] = jnp.sum(hard) / inside
        measures[f"right{place + 1}"] = right
    return total, measures


def _outputs(shadow: Shadow, batch: Batch, table: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The output vectors of each place for its examples, over the true tokens."""
    cell, epsilon = shadow.cell(), shadow.config.norm_eps
    read = (table[batch.tokens] * shadow["gain_embedding"]) @ shadow["project"] + cell.step[: len(sizes)]
    hidden = jnp.asarray(batch.hidden, jnp.float32)
    z = rms(hidden, epsilon) @ cell.context
    state = jnp.broadcast_to(cell.start, z.shape)
    outputs = []
    for place, n in enumerate(sizes):
        state, o = step(cell, state[:n], read[:n, place], z[:n], epsilon)
        outputs.append(o)
    return outputs


class FitState(NamedTuple):
    params: dict[str, jax.Array]
    optimiser: Any


@dataclasses.dataclass(frozen=True)
class Trained:
    values: dict[str, np.ndarray]
    """All parameters that are not calibrated."""
    history: list[dict[str, float]]
    """Every logged step's measures."""
    steps: int


Report = Callable[[int, int, int, dict[str, float]], None]
"""Steps done, steps in all, steps done before this run, the last measures."""


def fit(
    shadow: Shadow, batches: Batches, table: np.ndarray, config: TrainingConfig, folder: Path, *,
    mesh: Mesh | None = None, identity: str = "", report: Report,
) -> Trained:  # fmt: skip
    """Train `shadow`'s values from where the checkpoints in `folder` stand; the result does not depend on where that
    is. Checkpoints of another `identity` are removed. `table` `[V, D]` is the trunk's embedding."""
    loop = _Loop(shadow, batches, table, config, mesh)
    log = folder / "loss.jsonl"
    with _checkpoints(folder, identity) as manager:
        state, first = _restore(manager, loop.start())
        history = [row for row in _read_log(log) if row["step"] <= first]
        write_text(log, "".join(json.dumps(row) + "\n" for row in history))
        report(first, loop.steps, first, history[-1] if history else {})
        for number in range(first, loop.steps):
            state, measures = loop.step(state, number)
            if (number + 1) % 10 == 0 or number + 1 == loop.steps:
                row = {"step": number + 1, **{name: float(value) for name, value in measures.items()}}
                history.append(row)
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                report(number + 1, loop.steps, first, row)
            if (number + 1) % CHECKPOINT_STEPS == 0 or number + 1 == loop.steps:
                manager.save(number + 1, args=ocp.args.StandardSave(state), force=True)
                manager.wait_until_finished()
    return Trained({name: np.asarray(value) for name, value in state.params.items()}, history, loop.steps)


class _Loop:
    """The compiled step and its inputs."""

    def __init__(self, shadow: Shadow, batches: Batches, table: np.ndarray, config: TrainingConfig, mesh: Mesh | None):
        devices = mesh.size if mesh is not None else 1
        if batches.size % devices:
            raise ValueError(f"a batch of {batches.size} examples cannot be split over {devices} devices")
        self.steps, self._batches, self._config, self._mesh = batches.steps, batches, config, mesh
        self._optimiser = _optimiser(config, self.steps)
        trained = {name: shadow[name] for name in shadow.config.shapes if name not in CALIBRATED}
        calibrated = {name: np.asarray(shadow[name]) for name in CALIBRATED}
        self._start, vocab = trained, np.asarray(shadow.vocab.get_value())
        normal = table / np.sqrt(np.mean(table * table, axis=1, keepdims=True) + shadow.config.norm_eps)
        self._table, self._rows = self._everywhere(normal), self._everywhere(table[vocab])
        sizes = place_sizes(batches.size, config, devices)
        shape = shadow.config

        def loss(params: dict[str, jax.Array], batch: Batch, table: jax.Array, rows: jax.Array) -> Any:
            return losses(Shadow(shape, params | calibrated, vocab), batch, table, rows, sizes, config.teacher)

        def step(state: FitState, batch: Batch, table: jax.Array, rows: jax.Array) -> tuple[FitState, dict[str, Any]]:
            (total, measures), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, batch, table, rows)
            updates, optimiser = self._optimiser.update(gradient, state.optimiser, state.params)
            return FitState(optax.apply_updates(state.params, updates), optimiser), {"loss": total, **measures}

        self._step = jax.jit(step, donate_argnums=0)

    def start(self) -> FitState:
        params = {name: self._everywhere(np.asarray(value)) for name, value in self._start.items()}
        state = FitState(params, self._optimiser.init(params))
        return jax.tree.map(self._everywhere, state)

    def step(self, state: FitState, number: int) -> tuple[FitState, dict[str, jax.Array]]:
        batch = jax.tree.map(self._spread, self._batches.at(number))
        return self._step(state, batch, self._table, self._rows)

    def _everywhere(self, x: Any) -> jax.Array:
        place = NamedSharding(self._mesh, PartitionSpec()) if self._mesh is not None else None
        return jax.device_put(x, place)

    def _spread(self, x: np.ndarray) -> jax.Array:
        if self._mesh is None:
            return jax.device_put(x)
        return jax.device_put(x, NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names)))


def _optimiser(config: TrainingConfig, steps: int) -> optax.GradientTransformation:
    warmup = max(1, round(config.warmup * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, max(steps, warmup + 1))
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            rate, weight_decay=config.weight_decay, mask=lambda params: {k: v.ndim == 2 for k, v in params.items()}
        ),
    )


@contextlib.contextmanager
def _checkpoints(folder: Path, identity: str) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints of a run in `folder`, emptied if they are of another run."""
    mark = folder / "identity"
    if mark.exists() and mark.read_text(encoding="utf-8") != identity:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(mark, identity)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager((folder / "steps").resolve(), options=options) as manager:
        yield manager


def _restore(manager: ocp.CheckpointManager, start: FitState) -> tuple[FitState, int]:
    step = manager.latest_step()
    if step is None:
        return start, 0
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, start)
    return manager.restore(step, args=ocp.args.StandardRestore(abstract)), step


def _read_log(path: Path) -> list[dict[str, float]]:
    """The logged steps, without a last line that a crash cut short."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]
