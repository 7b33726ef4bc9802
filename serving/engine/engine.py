"""The engine: a queue of requests, one thread that runs steps, and the way results go back.

    model = load_model("smollm2")
    engine = Engine(model)
    engine.start()
    for emission in engine.stream(model.tokenizer.encode("Hello"), SamplingParams(max_tokens=20)):
        print(emission.text, end="")

The step thread owns JAX and everything in this package but the queue. It runs one step ahead: while the device works
on a step, the host reads the results of the one before, so a sequence may be found to have ended one step late; what
that step chose for it is dropped.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import jax
import numpy as np
from isal.isal_zlib import crc32
from jax.sharding import Mesh

from ...cache.keys import Namespaces
from ...configs.engine import EngineConfig
from ...kernels.draft import Drafts, lookup_only
from ...kernels.sample import choice_seed
from . import blocking, guiding
from .blocking import Completion
from .device import Device, Progress
from .grammar import Grammar
from .grammars import Compiled, Guides
from .identity import CompilationCounter, Identities, numerics_class, system_fingerprint
from .intake import Intake
from .programs import Program, make_mesh, step_sizes
from .request import (
    LOCAL,
    Emission,
    EngineStopped,
    FinishReason,
    Keep,
    QueueFull,
    SamplingParams,
    Sink,
    TokenLogprob,
)
from .scheduler import MAKE_WAY_AFTER, Layers, Plan, Shard, Turns
from .sequence import Grown, Phase, Sequence, blocks_for
from .state import StepResult, fill_row
from .tiers import Tiers

if TYPE_CHECKING:
    from ...cache.store import Store
    from ...model.load import Model
    from ..metrics import EngineMetrics

log = logging.getLogger(__name__)

QUIET = 0.25
"""Seconds without work before blocks and slots are counted over: the next request may come at once."""

PATIENCE = 0.002
"""Seconds that a step is put off for the masks of answers that follow a grammar. Others lose nothing: the device still
works on the step before."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot, for metrics, tests and the leak check."""

    running: int
    waiting: int
    paused: int
    free_slots: int
    total_slots: int
    used_blocks: int  # held by sequences
    cached_blocks: int  # not held, but findable
    free_blocks: int
    total_blocks: int
    steps: int
    preemptions: int
    compilations_after_ready: int


@dataclasses.dataclass
class _Pending:
    """A dispatched step that was not read yet."""

    result: StepResult
    logits: jax.Array | None
    hidden: jax.Array | None
    drafts: Drafts | None  # for the pass behind it
    choosing: list[tuple[Sequence, int]]  # sequence, its column in the result
    embedded: list[tuple[Sequence, int]]  # those whose prompts' hidden states are in `summed`
    summed: jax.Array
    passes: int
    prefill_tokens: int
    started: float
    compiled: int  # programs compiled when it started


class Engine:
    """Continuous batching over one model. `submit`, `cancel`, `stats`, `choice_params` and `compile_grammar` may be
    called from any thread; `forget`, `stream` and `generate`, which wait for the engine, from any but the engine's own
    (not from a sink). Everything else belongs to the thread that made the engine."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        *,
        mesh: Mesh | None = None,
        metrics: EngineMetrics | None = None,
        store: Store | None = None,
    ) -> None:
        """`store` (`serving.storage.open_store`) keeps blocks beyond the device's pool; the engine closes it."""
        CompilationCounter.install()
        self.model, self.config, self.metrics, self.store = model, config, metrics, store
        self.mesh = mesh if mesh is not None else make_mesh(jax.devices()[:1], model.config)
        self.context_length = config.context(model.config)
        self.device = Device(
            model.config,
            config,
            self.mesh,
            model.params,
            model.kernels,
            model.shadow or lookup_only(model.config.d_model),
        )
        self.numerics_class = numerics_class(self.mesh, self.device.kernels, model.quant, self.device.kv)
        self.system_fingerprint = system_fingerprint(model.weights_id, self.numerics_class)
        namespaces = store.namespaces if store is not None else Namespaces(secrets.token_bytes(32))
        self._identities = Identities(model, self.numerics_class, self.device.kv, namespaces)
        if store is not None and store.cache.model != self._identities.fingerprint(None):
            raise ValueError("the store was opened for another model, or for other settings of the engine")
        self._last_layers: Layers = None
        self._new_shards()
        self._tiers = Tiers(store.cache, self.device, self._notice) if store is not None else None
        if store is not None and metrics is not None:
            metrics.watch(store.cache.stats, self._held_blocks, lambda: self.l1_mode)

        self._guides = Guides()
        self._intake = Intake(model, config, self._identities, drafts=self.device.drafts)

        self._wake = threading.Condition()
        self._arrived = False  # a load has something new
        self._incoming: deque[Sequence] = deque()
        self._turns = Turns()
        self._cancelled: set[str] = set()
        self._forgetting: list[threading.Event] = []
        self._by_id: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._pending: _Pending | None = None
        self._outbox: dict[int, tuple[Sink, list[tuple[str, Emission]]]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failed: str | None = None
        self._ready = False
        self._compiled_at_ready = 0
        self._reported_compilations = 0
        self._steps = self._preemptions = 0
        self._last_read = self._last_admitted = 0.0
        self._service_time = 1.0  # seconds a request holds a slot, moving average

    def _new_shards(self) -> None:
        self.shards = [Shard(i, self.config.slots, self.device.blocks) for i in range(self.device.data)]

    # ---- life

    @property
    def programs(self) -> list[Program]:
        """Every program this engine runs."""
        return self.device.programs

    @property
    def l1_mode(self) -> str | None:
        """Where decoding reads its most recent KV from: "vmem_resident", "hbm" or "cpu_pool"; None: not known yet."""
        return self.device.l1_mode

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._ready and self._failed is None and not self._stopping

    @property
    def failed(self) -> str | None:
        """Why the engine has ended for good, in one sentence; None while it has not."""
        return self._failed

    def start(self, *, warm: bool = True, progress: Progress | None = None) -> None:
        """Compile all programs and start serving. `warm=False` compiles each when it is first needed,
        and runs prompts in smaller tiles."""
        if self._thread is not None:
            raise RuntimeError("the engine was already started")
        if warm:
            self._guides.run(self._intake.prepare)
            self.device.compile(progress)
        else:
            self.device.use_one_tile()  # exact without the check that a warm start makes
        self._compiled_at_ready = CompilationCounter.count
        self._thread = threading.Thread(target=self._loop, name="umbra-engine", daemon=True)
        self._thread.start()
        self._ready = True

    def close(self) -> None:
        """Cancel everything, stop the thread, and close the store."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._guides.close()
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def submit(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        sink: Sink,
        request_id: str | None = None,
        principal: str = LOCAL,
        keep: Keep = "blocks",
        priority: int = 0,
    ) -> str:
        """Queue a request; its emissions go to `sink` on the engine's thread. Returns the request's id.

        `principal` is whom the server has authenticated: KV is shared among the requests of one. `keep` says what of
        the request's KV may outlive it. Principals that wait are admitted in turn, as if they had waited some seconds
        more (or less) for each step of `priority`; among those of one, short answers wait less than long ones.

        Raises `QueueFull`, `PromptTooLong`, `EngineStopped`, or `ValueError` for token ids outside the vocabulary.
        """
        seq = self._intake.sequence(prompt_ids, params, sink, request_id, principal, keep)
        with self._wake:
            if self._stopping or self._failed is not None or self._thread is None:
                raise EngineStopped(self._failed or "the engine is not running")
            if seq.id in self._by_id:
                raise ValueError(f"request id {seq.id!r} is in use")
            waiting = len(self._incoming) + len(self._waiting)
            if waiting >= self.config.max_queue:
                if self.metrics:
                    self.metrics.refused("queue_full")
                slots = self.config.slots * len(self.shards)
                raise QueueFull(waiting, max(1.0, waiting * self._service_time / slots))
            served = self._service_time / (self.config.slots * len(self.shards))
            seq.flow = (principal, priority)
            seq.turn = self._turns.turn(principal, priority, seq.submitted, served)
            self._by_id[seq.id] = seq
            self._incoming.append(seq)
            self._wake.notify()
        return seq.id

    def compile_grammar(self, grammar: Grammar) -> Compiled:
        """The grammar ready to be followed; made once. Takes time: not for an event loop. Raises `BadGrammar`."""
        return self._intake.compile_grammar(grammar)

    def cancel(self, request_id: str) -> None:
        """End a request; its last emission says `cancelled`. Unknown or ended ids are ignored."""
        with self._wake:
            if request_id in self._by_id:
                self._cancelled.add(request_id)
                self._wake.notify()

    def forget(self) -> None:
        """Let go of the device's KV that no running request uses, so that later prompts find none of it. Returns once
        that is done. Raises `EngineStopped`."""
        done = threading.Event()
        with self._wake:
            if self._stopping or self._failed is not None or self._thread is None:
                raise EngineStopped(self._failed or "the engine is not running")
            self._forgetting.append(done)
            self._wake.notify()
        done.wait()

    def stream(
        self, prompt_ids: Seq[int], params: SamplingParams, *, principal: str = LOCAL, keep: Keep = "blocks"
    ) -> Iterator[Emission]:
        """The emissions of one request, which is submitted when the first is asked for. Leaving the loop early
        cancels it."""
        return blocking.stream(self, prompt_ids, params, principal, keep)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams],
        *,
        principal: str = LOCAL,
        keep: Keep = "blocks",
    ) -> list[Completion]:
        """Whole answers to several prompts, in their order. Waits for room in the queue; `RuntimeError` when one of
        them ends in an error."""
        return blocking.generate(self, prompts, params, principal, keep)

    def choice_params(self, params: SamplingParams, n: int) -> list[SamplingParams]:
        """The parameters of `n` choices of one request: choice i folds i into the seed."""
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        return [dataclasses.replace(params, seed=choice_seed(seed, i)) for i in range(n)]

    def stats(self) -> EngineStats:
        """A snapshot. Counts may be one step old."""
        pools = [shard.pool for shard in self.shards]
        return EngineStats(
            running=sum(len(shard.running) for shard in self.shards),
            waiting=len(self._incoming) + len(self._waiting),
            paused=sum(len(shard.paused) for shard in self.shards),
            free_slots=sum(len(shard.free_slots) for shard in self.shards),
            total_slots=self.config.slots * len(self.shards),
            used_blocks=sum(pool.used for pool in pools),
            cached_blocks=sum(pool.cached for pool in pools),
            free_blocks=sum(pool.free for pool in pools),
            total_blocks=sum(pool.total for pool in pools),
            steps=self._steps,
            preemptions=self._preemptions,
            compilations_after_ready=CompilationCounter.count - self._compiled_at_ready,
        )

    def _held_blocks(self) -> int:
        """Blocks of the pools that have content."""
        return sum(shard.pool.total - shard.pool.free for shard in self.shards)

    def check(self) -> None:
        """Raise `AssertionError` when blocks or slots have leaked. To be called while no step is being planned."""
        for shard in self.shards:
            held = [block for seq in shard.running for block in seq.blocks]
            shard.pool.check(held=held + (self._tiers.held(shard) if self._tiers is not None else []))
            assert len(shard.free_slots) + len(shard.running) == shard.slots, f"slots lost: {shard.free_slots}"

    # ---- the loop (engine thread only from here on)

    def _loop(self) -> None:
        try:
            while not self._stopping:
                try:
                    worked = self._step()
                except Exception as error:
                    log.exception("a step failed")
                    self._recover(error)
                    worked = True
                self._deliver()
                if not worked:
                    self._idle()
        except Exception as error:
            log.exception("the engine cannot go on")
            self._failed = f"the engine failed: {_summary(error)}"
        self._end_all()

    def _end_all(self) -> None:
        """Nothing runs any more: tell everybody who still waits."""
        with self._wake:
            self._stopping = True
        self._take_commands()
        for seq in list(self._by_id.values()):
            self._end(seq, "error" if self._failed else "cancelled", error=self._failed)
        if self._tiers is not None and not self._failed:
            self._tiers.copy_down(now=True)
        self._deliver()

    def _step(self) -> bool:
        """Dispatch the next step and read the one before; False when there was nothing to do."""
        self._take_commands()
        if self._guides.busy:  # an answer that follows a grammar should not miss the step for a moment
            self._guides.wait(PATIENCE, everything=True)
        self._bring_up()
        plans, passes, layers = self._plan()
        if any(plans):
            ahead = self._dispatch(plans, passes, layers)
            self._copy_down()
            self._read()
            self._pending = ahead
            return True
        if self._pending is not None:
            self._read()
            return True
        if self._tiers is not None and self._tiers.copy_down(now=True):
            return True  # it gave blocks back, which somebody may wait for
        if any(seq.guide is not None and seq.phase is Phase.DECODE for shard in self.shards for seq in shard.running):
            if self._guides.busy:
                self._guides.wait(10 * PATIENCE, everything=False)
            return True  # also if what it waited for was found just now
        return bool(self._waiting or self._outbox) and not self._loading

    def _bring_up(self) -> None:
        """Put the blocks into the pool that have arrived from the tiers."""
        if self._tiers is not None:
            for arrived in self._tiers.poll(self.shards):
                if self.metrics:
                    self.metrics.brought_up(arrived.seconds, arrived.hot_seconds, arrived.hot_bytes)

    def _copy_down(self) -> None:
        """Hand the blocks that were sealed to the tiers."""
        if self._tiers is not None:
            for shard in self.shards:
                for seq in shard.running:
                    self._tiers.keep(shard, seq)
            self._tiers.copy_down()

    @property
    def _loading(self) -> bool:
        """Whether some of those that hold a slot wait for the tiers."""
        return any(seq.phase is Phase.LOADING for shard in self.shards for seq in shard.running)

    def _notice(self) -> None:
        """On any thread: a load has something new."""
        with self._wake:
            self._arrived = True
            self._wake.notify()

    def _idle(self) -> None:
        if not self._loading:
            self._measure(0.0, 0, 0)
        if self._called(QUIET):
            return
        if not self._loading:
            try:
                self.check()
            except AssertionError:
                log.exception("the leak check failed")
        self._called(None)

    def _called(self, seconds: float | None) -> bool:
        """Wait until there may be something to do; False: there was not within `seconds`."""

        def called() -> bool:
            return bool(self._incoming or self._cancelled or self._forgetting or self._arrived or self._stopping)

        with self._wake:
            return self._wake.wait_for(called, seconds)

    def _take_commands(self) -> None:
        with self._wake:
            incoming, self._incoming = self._incoming, deque()
            cancelled, self._cancelled = self._cancelled, set()
            forgetting, self._forgetting = self._forgetting, []
            self._arrived = False
            self._waiting.extend(incoming)
        if forgetting:
            try:
                for shard in self.shards:
                    shard.pool.clear()
            finally:
                for done in forgetting:
                    done.set()
        for request in cancelled:
            seq = self._by_id.get(request)
            if seq is not None:
                self._end(seq, "cancelled")

    # ---- planning

    def _plan(self) -> tuple[list[Plan], int, Layers]:
        """What every shard does in the next step, in how many passes, and over which layers."""
        for shard in self.shards:
            self._end_lost(shard)
            self._resume(shard)
        self._admit_waiting()
        passes, layers = self._passes(), self._next_layers()
        for shard in self.shards:
            for seq in list(shard.running):
                if seq.can_decode and seq.params.layers == layers:
                    self._make_room(shard, seq, passes)
        # Making room may have paused or ended sequences: the plan is made from who is left.
        plans = []
        for shard in self.shards:
            decode = [seq for seq in shard.running if seq.can_decode and seq.params.layers == layers]
            plans.append(Plan(decode, shard.plan_chunks(self.config.prefill_chunk, layers)))
        return plans, passes, layers

    def _next_layers(self) -> Layers:
        """Sequences that run different layers take turns, a step each."""
        running = [seq for shard in self.shards for seq in shard.running]
        asked = list(
            dict.fromkeys(seq.params.layers for seq in running if seq.phase is Phase.PREFILL or seq.can_decode)
        )
        if self._last_layers in asked:
            asked = asked[asked.index(self._last_layers) + 1 :] + asked
        self._last_layers = asked[0] if asked else None
        return self._last_layers

    def _passes(self) -> int:
        """Passes of the next step: several in one device loop, if no prompt waits and only tokens are wanted."""
        if self.device.passes == 1 or self._waiting or self.config.features:
            return 1
        running = [seq for shard in self.shards for seq in shard.running]
        alone = all(seq.phase is Phase.DECODE and not seq.params.digest and seq.guide is None for seq in running)
        return self.device.passes if alone else 1

    def _end_lost(self, shard: Shard) -> None:
        """End answers whose grammar turned out to be impossible to follow."""
        for seq in list(shard.running):
            if seq.guide is not None and seq.guide.error is not None:
                self._end(seq, "error", error=seq.guide.error)

    def _make_room(self, shard: Shard, seq: Sequence, passes: int) -> None:
        """Blocks for what `passes` passes add to `seq`: a token each, pausing others, or `seq` itself, if need be; and
        drafted ones, if there is room."""
        while seq.phase is Phase.DECODE and not shard.reserve(seq, min(seq.furthest + passes, seq.limit)):
            if self._pending is not None:
                self._read()  # may end sequences; and a sequence in flight cannot be paused
            else:
                self._pause(shard, shard.victim())
        if seq.phase is Phase.DECODE and shard.pool.available > len(shard.running):
            shard.reserve(seq, min(seq.furthest + passes * seq.width, seq.limit))

    def _pause(self, shard: Shard, seq: Sequence) -> None:
        Tiers.stop(seq)
        kept = blocks_for(seq.kv_length)
        seq.saved = self.device.save([(shard.index, block) for block in seq.blocks[:kept]])
        seq.resume_as = seq.phase
        if seq.thinking:
            seq.conclude_at = self.device.conclude_at(shard.index, seq.slot)
        shard.leave(seq)
        seq.phase = Phase.PAUSED
        shard.paused.append(seq)
        self._preemptions += 1
        if self.metrics:
            self.metrics.preempted()

    def _resume(self, shard: Shard) -> None:
        """Bring paused sequences back, the longest paused first, while there is room for the next block as well."""
        while shard.paused and shard.free_slots:
            seq = shard.paused[0]
            if not shard.restore(seq):
                return
            shard.paused.popleft()
            kept = len(seq.keys)
            fresh = zip(seq.blocks[kept:], seq.saved[kept:], strict=False)
            self.device.load([(shard.index, block, content) for block, content in fresh])
            seq.saved = []
            shard.publish(seq)
            self._set_slot(seq)

    def _admit_waiting(self) -> None:
        while self._waiting:
            seq = Turns.first(self._waiting, time.monotonic())
            # Paused sequences were here first; their shard takes nobody new before they are back.
            open_shards = [s for s in self.shards if s.free_slots and not s.paused]
            best = sorted(open_shards, key=lambda s: (-s.known_tokens(seq), -len(s.free_slots), s.index))
            if not (self._admit(seq, best) or self._make_way(seq)):
                break
        if self._tiers is not None:
            for seq in heapq.nsmallest(self.config.slots, self._waiting, key=lambda waiting: waiting.turn):
                if not seq.expected:
                    self._tiers.expect(seq, max(shard.known_tokens(seq) for shard in self.shards))

    def _admit(self, seq: Sequence, shards: list[Shard]) -> bool:
        """Start a sequence that waits in the first of `shards` that has room for it; False: none has."""
        if not any(shard.admit(seq) for shard in shards):
            return False
        self._waiting.remove(seq)
        seq.admitted = self._last_admitted = time.monotonic()
        self._set_slot(seq)
        if self._tiers is not None and not seq.params.embed:
            self._tiers.look_up(seq)
        self._copy_part(seq)
        return True

    def _copy_part(self, seq: Sequence) -> None:
        """Take over what a block of others has in common with the next one of the prompt, if nothing better is on its
        way. The copy runs behind the steps that filled that block."""
        if seq.part is None:
            return
        (block, tokens), seq.part = seq.part, None
        if seq.phase is Phase.PREFILL:
            self.device.copy(seq.shard, block, seq.blocks[len(seq.keys)])
            self.shards[seq.shard].pool.use([block])
            seq.prefilled += tokens
            seq.found["device"] += tokens
        self.shards[seq.shard].pool.release([block])

    def _make_way(self, seq: Sequence) -> bool:
        """Pause a longer answer for a sequence that waits, if no slot has become free for a while."""
        if time.monotonic() < self._last_admitted + MAKE_WAY_AFTER or all(s.longer(seq) is None for s in self.shards):
            return False
        self._last_admitted = time.monotonic()  # also when nothing comes of it: not again at once
        self._read()  # may end sequences; and a sequence in flight cannot be paused
        for shard in self.shards:
            if (longest := shard.longer(seq)) is not None:
                self._pause(shard, longest)
                return self._admit(seq, [shard])
        return False

    def _set_slot(self, seq: Sequence) -> None:
        """Send the sequence's row to its slot."""
        rows = self.device.empty_rows(self.device.data)
        fill_row(
            rows, seq.shard, seq.params, seed=seq.seed, stop_ids=seq.stop_ids, limit=seq.limit, prompt=seq.prompt,
            generated=np.asarray(seq.generated, np.int64), position=seq.position,
            active=seq.phase is Phase.DECODE, sources=seq.sources, thinking=seq.thinking,
            conclude_at=seq.conclude_at,
        )  # fmt: skip
        slots = np.full(self.device.data, -1, np.int32)
        slots[seq.shard] = seq.slot
        self.device.admit(slots, rows)

    # ---- running

    def _dispatch(self, plans: list[Plan], passes: int, layers: Layers) -> _Pending:
        started, compiled = time.monotonic(), CompilationCounter.count
        prefill = any(plan.chunks for plan in plans)
        kind = "prefill" if prefill else "decode" if passes == 1 else "decode_n"
        inputs = self.device.new_input(prefill)
        tokens, groups = step_sizes(self.device.engine, prefill)
        for shard, plan in zip(self.shards, plans, strict=True):
            shard.fill(plan, inputs, tokens, groups)
        under_masks = [guiding.guided_of(plan) for plan in plans]
        if any(under_masks):
            inputs = inputs._replace(guided=self.device.new_guided())
            for shard, sequences in zip(self.shards, under_masks, strict=True):
                guiding.fill(inputs.guided, shard, sequences, self.device.rows)
        result, kept = self.device.run(kind, inputs, layers)
        choosing = [
            (seq, shard.index * shard.slots + seq.slot)
            for shard, plan in zip(self.shards, plans, strict=True)
            for seq in shard.dispatched(plan, passes)
        ]
        self._steps += 1
        return _Pending(
            result=result,
            logits=kept.logits if any(seq.params.digest for seq, _ in choosing) else None,
            hidden=kept.hidden if self.config.features else None,
            embedded=[
                (seq, shard.index * shard.slots + seq.slot)
                for shard, plan in zip(self.shards, plans, strict=True)
                for seq, _, _ in plan.chunks
                if seq.params.embed
            ],
            summed=kept.summed,
            drafts=kept.drafts if any(seq.guide is not None for seq, _ in choosing) else None,
            choosing=choosing,
            passes=passes,
            prefill_tokens=sum(count for plan in plans for _, _, count in plan.chunks),
            started=started,
            compiled=compiled,
        )

    def _read(self) -> None:
        """Wait for the pending step and hand its tokens to their sequences."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        result = StepResult(*(np.asarray(part) for part in pending.result))
        listed = {name: getattr(result, name).tolist() for name in ("tokens", "sources", "drafted", "first")}
        result = result._replace(**listed)  # they are gone through for every slot, which takes NumPy longer
        logits = np.asarray(pending.logits) if pending.logits is not None else None
        hidden = np.asarray(pending.hidden) if pending.hidden is not None else None
        drafts = Drafts(*map(np.asarray, pending.drafts)) if pending.drafts is not None else None  # type: ignore[arg-type]
        now = time.monotonic()
        seconds, self._last_read = now - max(pending.started, self._last_read), now
        if pending.embedded:
            summed = np.asarray(pending.summed)
            for seq, column in pending.embedded:
                seq.summed = seq.summed + summed[column]
        emitted = 0
        for seq, column in pending.choosing:
            seq.in_flight -= pending.passes
            if seq.phase is Phase.DONE:
                continue
            emitted += self._take(seq, column, result, logits, hidden, drafts, now)
        self._measure(seconds, pending.prefill_tokens, emitted)
        # Small chunks tell nothing of what a long prompt takes, nor do steps that had to be compiled.
        telling = 2 * pending.prefill_tokens >= self.config.prefill_chunk
        if self.store is not None and telling and pending.compiled == CompilationCounter.count:
            self.store.cache.prefilled(pending.prefill_tokens, seconds)

    def _take(
        self, seq: Sequence, column: int, result: StepResult, logits: np.ndarray | None, hidden: np.ndarray | None,
        drafts: Drafts | None, now: float,
    ) -> int:  # fmt: skip
        """Commit what a step chose for `seq`; the number of its new tokens."""
        first, since, thought = not seq.generated, seq.last_token, seq.thinking
        row = seq.shard * self.device.rows + result.first[0][column]
        wanted = logits if seq.params.digest else None
        grown = _grown(result, column, row, wanted, hidden, seq.params.logprobs)
        emission = seq.commit(grown, now)
        if emission is None:
            return 0
        n = len(emission.token_ids)
        if self.metrics:
            if first:
                self.metrics.first_token(now - seq.submitted, resumed=seq.cached > seq.found["device"])
            else:
                self.metrics.tokens(n, (now - since) / n)
            self.metrics.drafts(grown.drafted, emission.sources)
        if emission.finish_reason is not None:
            self._end(seq, emission.finish_reason, emission)
        else:
            self.shards[seq.shard].publish(seq)
            self._emit(seq, emission)
            if seq.guide is not None and not seq.thinking:
                assert drafts is not None
                tokens, alone = () if thought else emission.token_ids, len(self._by_id) == 1
                guiding.advance(self._guides, seq, tokens, drafts, column, alone=alone)
        return n

    # ---- ends

    def _end(
        self, seq: Sequence, reason: FinishReason, emission: Emission | None = None, error: str | None = None
    ) -> None:
        shard = self.shards[seq.shard]
        Tiers.stop(seq)
        if seq.phase in (Phase.PREFILL, Phase.DECODE):
            shard.publish(seq)
            if self._tiers is not None:
                self._tiers.keep(shard, seq, ended=True)
            shard.leave(seq)
        elif seq.phase is Phase.PAUSED:
            shard.paused.remove(seq)
            seq.saved = []
        elif seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        with self._wake:
            self._by_id.pop(seq.id, None)
            self._cancelled.discard(seq.id)
        last = seq.close(reason, emission or Emission(""), error)
        self._emit(seq, last)
        if seq.admitted:
            self._service_time += 0.1 * (time.monotonic() - seq.admitted - self._service_time)
        if self.metrics:
            self.metrics.finished(reason, len(seq.prompt), len(seq.generated), seq.cached)
        if self.store is not None:
            arrived = time.time() - (time.monotonic() - seq.submitted)
            self.store.cache.record_access(seq.identity, seq.prompt, len(seq.generated), arrived)

    def _emit(self, seq: Sequence, emission: Emission) -> None:
        self._outbox.setdefault(id(seq.sink), (seq.sink, []))[1].append((seq.id, emission))

    def _deliver(self) -> None:
        """One call per sink for everything the step brought."""
        outbox, self._outbox = self._outbox, {}
        for sink, pairs in outbox.values():
            try:
                sink(pairs)
            except Exception:
                log.exception("a sink failed; its requests are cancelled")
                for request, _ in pairs:
                    self.cancel(request)

    def _recover(self, error: Exception) -> None:
        """After a failed step: its requests end with an error, everything starts empty."""
        self._pending = None
        message = f"the step failed: {_summary(error)}"
        for seq in list(self._by_id.values()):
            if seq.phase is not Phase.WAITING:
                Tiers.stop(seq)
                seq.phase = Phase.DONE  # it holds nothing any more: the shards are made anew
                self._end(seq, "error", error=message)
        self.device.reset()
        self._new_shards()
        if self._tiers is not None:
            self._tiers.reset()

    def _measure(self, seconds: float, prefilled: int, emitted: int) -> None:
        if self.metrics is None:
            return
        stats = self.stats()
        self.metrics.step(
            seconds=seconds,
            running=stats.running,
            waiting=stats.waiting,
            prefill_tokens=prefilled,
            decode_tokens=emitted,
            used_blocks=stats.used_blocks,
            total_blocks=stats.total_blocks,
        )
        for _ in range(stats.compilations_after_ready - self._reported_compilations):
            self.metrics.compiled()
        self._reported_compilations = stats.compilations_after_ready


def _summary(error: Exception) -> str:
    """The first line of an exception, with its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _grown(
    result: StepResult, column: int, row: int, logits: np.ndarray | None, hidden: np.ndarray | None,
    n_logprobs: int | None,
) -> Grown:  # fmt: skip
    """What a step brought for the slot in `column`. `logits` and `hidden` are those of its one pass, the slot's from
    `row` on."""
    at = [(n, w) for n, slots in enumerate(result.tokens) for w, token in enumerate(slots[column]) if token >= 0]
    rows = slice(row, row + len(at))
    return Grown(
        tokens=[result.tokens[n][column][w] for n, w in at],
        sources=[result.sources[n][column][w] for n, w in at],
        logprobs=[] if n_logprobs is None else [_logprob(result, n, column, w, n_logprobs) for n, w in at],
        digests=[] if logits is None else [crc32(row.tobytes()) for row in logits[rows]],
        features=None if hidden is None else hidden[rows].astype(np.float16),
        passes=len({n for n, _ in at}),
        drafted=sum(slots[column] for slots in result.drafted),
    )


def _logprob(result: StepResult, n: int, column: int, w: int, wanted: int) -> TokenLogprob:
    top = zip(result.top_ids[n, column, w, :wanted], result.top_logprobs[n, column, w, :wanted], strict=True)
    return TokenLogprob(
        result.tokens[n][column][w],
        float(result.logprobs[n, column, w]),
        tuple((int(token), float(logprob)) for token, logprob in top),
    )
