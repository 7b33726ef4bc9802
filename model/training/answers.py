"""The trunk's own answers: what it writes for the prompts, then the answers to the prompts, each kept on disk with the
hidden states that chose its tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...configs.files import write_text
from ...configs.prompt_sets import Prompt
from ...configs.shadow import TrainingConfig
from .jobs import Job, Speaker
from .prompts import Material, Seedling, build_prompts, interleave, seedlings, unique, without
from .store import CompletionStore, Row, read_rows

ASKING = 0.7
"""Temperature at which a trunk says what users ask: high enough for variety, low enough for sense."""

Report = Callable[[str, int, int, int], None]
"""What is being done, how much of it is done, how much there is, and how much was done before this run."""


@dataclasses.dataclass(frozen=True)
class Answered:
    """A prompt and what the trunk answered."""

    store: str
    """The folder of the completion, and its index there."""
    index: int
    category: str
    key: str
    """Names the prompt: the same for the same prompt, whatever else is in the set."""
    row: Row


@dataclasses.dataclass(frozen=True)
class Sources:
    """Prompts from outside: `extra` are trained on too, and so are prompts about `passages`; `tests` are measured on.
    Nothing is trained on that shares eight words in a row with `tests` or `excluded`."""

    extra: Sequence[Prompt] = ()
    tests: Sequence[Prompt] = ()
    excluded: Sequence[Prompt] = ()
    passages: Sequence[str] = ()


def gather(
    speaker: Speaker, folder: Path, config: TrainingConfig, identity: Mapping[str, object], sources: Sources,
    report: Report,
) -> tuple[list[Answered], list[Answered]]:  # fmt: skip
    """Answers to train on, and greedy answers to the prompts that are only measured on.

    The first are answers of at least `config.tokens` tokens (fewer, if the prompts do not give them), in a fixed order.

    `identity` says what answers depend on beside the prompts: the weights and how they are computed. What is already in
    `folder` is not generated again; which answers are used does not depend on where an earlier run was interrupted.
    """
    fixed = {**identity, "seed": config.seed, "prompts": config.prompts, "max_tokens": config.max_tokens}
    wanted = seedlings(config.prompts, config.seed) if speaker.decode is not None else []
    first = CompletionStore(folder / "material", {**fixed, "texts": _digest([s.text for s in wanted])})
    _run(speaker, first, [_seedling_job(speaker, s, i, config) for i, s in enumerate(wanted)], None, "material", report)
    material = _material(speaker, wanted, first)
    for passage in sources.passages:
        material.add_passage(passage)
    prompts = _prompts(material, config, sources)
    answers = CompletionStore(folder / "answers", {**fixed, "texts": _digest([p.turns[0] for p in prompts])})
    jobs = [_prompt_job(speaker, prompt, config) for prompt in prompts]
    used = _run(speaker, answers, jobs, config.tokens, "answers", report)
    written = [
        Answered("material", i, wanted[i].kind, _digest([wanted[i].text]), first.rows[i])
        for i in sorted(first.rows)
        if not wanted[i].open
    ]
    answered = [
        Answered("answers", i, prompts[i].category, _digest([prompts[i].turns[0]]), answers.rows[i])
        for i in range(used)
    ]
    return _usable([*written, *answered]), _usable(_measured(speaker, folder, config, fixed, sources.tests, report))


def _usable(answered: Sequence[Answered]) -> list[Answered]:
    """Those in which there is a token to be guessed after another."""
    return [a for a in answered if a.row.completion.features is not None and len(a.row.completion.token_ids) >= 2]


def _measured(
    speaker: Speaker, folder: Path, config: TrainingConfig, fixed: Mapping[str, object], tests: Sequence[Prompt],
    report: Report,
) -> list[Answered]:  # fmt: skip
    if not tests:
        return []
    store = CompletionStore(folder / "tests", {**fixed, "texts": _digest([p.turns[0] for p in tests])})
    jobs = [Job(tuple(speaker.encode([{"role": "user", "content": p.turns[0]}])), config.test_tokens) for p in tests]
    _run(speaker, store, jobs, None, "answers to measure on", report)
    return [Answered("tests", i, p.category, _digest([p.turns[0]]), store.rows[i]) for i, p in enumerate(tests)]


def _seedling_job(speaker: Speaker, seedling: Seedling, index: int, config: TrainingConfig) -> Job:
    seed = _number(config.seed, "seedling", index)
    if seedling.open:
        assert speaker.encode_open is not None
        return Job(tuple(speaker.encode_open(seedling.text)), seedling.max_tokens, ASKING, seed)
    return Job(tuple(speaker.encode([{"role": "user", "content": seedling.text}])), seedling.max_tokens)


def _material(speaker: Speaker, wanted: Sequence[Seedling], store: CompletionStore) -> Material:
    material = Material()
    for index in sorted(store.rows):
        assert speaker.decode is not None
        completion = store.rows[index].completion
        material.add(wanted[index], speaker.decode(completion.token_ids), ended=completion.ended)
    return material


def _prompts(material: Material, config: TrainingConfig, sources: Sources) -> list[Prompt]:
    """The prompts to be answered, those from outside spread evenly among ours."""
    own = build_prompts(config.prompts, config.seed, material)
    prompts = without(interleave([own, list(sources.extra)]), [*sources.excluded, *sources.tests])
    kept = set(unique(prompt.turns[0] for prompt in prompts))
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.turns[0] in kept:
            first.setdefault(prompt.turns[0], prompt)
    return list(first.values())


def _prompt_job(speaker: Speaker, prompt: Prompt, config: TrainingConfig) -> Job:
    """Most answers are greedy; for some prompts, chosen by their text, they are sampled."""
    text = prompt.turns[0]
    ids = tuple(speaker.encode([{"role": "user", "content": text}]))
    draw = _number(config.seed, "sampled", text) / 2**32
    if draw >= config.sampled:
        return Job(ids, config.max_tokens)
    temperature = config.temperatures[int(draw / config.sampled * len(config.temperatures))]
    return Job(ids, config.max_tokens, temperature, _number(config.seed, "noise", text))


def _run(
    speaker: Speaker, store: CompletionStore, jobs: Sequence[Job], tokens: int | None, what: str, report: Report
) -> int:
    """Run the jobs that are not in the store, until the first jobs together have `tokens` tokens (all jobs if it is
    None). Gives how many of the first jobs that takes; all of those are then in the store."""
    progress = _First(store, tokens, len(jobs))
    total = len(jobs) if tokens is None else tokens
    progress.advance()
    before = min(progress.measure(), total)  # more, if an earlier run was asked for more
    todo = [index for index in range(len(jobs)) if index not in store.rows]
    report(what, before, total, before)
    if not progress.done:
        running = speaker.generate([jobs[index] for index in todo])
        for i, completion in running:
            store.add(todo[i], jobs[todo[i]], completion)
            progress.advance()
            report(what, min(progress.measure(), total), total, before)
            if progress.done:
                break
    store.flush()
    reached = min(progress.measure(), total)  # less than asked for, if the prompts do not give more
    report(what, reached, reached, before)
    return progress.jobs


class _First:
    """How far the jobs are finished from the first one on, without a gap."""

    def __init__(self, store: CompletionStore, tokens: int | None, n_jobs: int) -> None:
        self._store, self._tokens, self._n_jobs = store, tokens, n_jobs
        self.jobs = self._sum = 0

    @property
    def done(self) -> bool:
        return self.jobs == self._n_jobs or (self._tokens is not None and self._sum >= self._tokens)

    def advance(self) -> None:
        while not self.done and self.jobs in self._store.rows:
            self._sum += len(self._store.rows[self.jobs].completion.token_ids)
            self.jobs += 1

    def measure(self) -> int:
        return len(self._store.rows) if self._tokens is None else self._sum


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _number(*names: object) -> int:
    """A number below 2^32 that depends on the names."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:4], "little")


def save_index(folder: Path, answered: Sequence[Answered], tests: Sequence[Answered], about: Mapping[str, Any]) -> None:
    """Write which answers are used, and what else is known about them, for `load_index`."""
    groups = {"answered": answered, "tests": tests}
    entries = {name: [[a.store, a.index, a.category, a.key] for a in group] for name, group in groups.items()}
    write_text(folder / "index.json", json.dumps({"about": dict(about), **entries}))


def load_index(folder: Path) -> tuple[list[Answered], list[Answered], dict[str, Any]]:
    """What `save_index` wrote, with the answers themselves."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    entries = [entry for name in ("answered", "tests") for entry in index[name]]
    rows = {store: read_rows(folder / store) for store in sorted({entry[0] for entry in entries})}
    found = [Answered(store, number, category, key, rows[store][number]) for store, number, category, key in entries]
    n = len(index["answered"])
    return found[:n], found[n:], index["about"]
