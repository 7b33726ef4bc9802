"""The engine as the protocols see it: model and engine once they are there, workers, submission, stopping.

A protocol module turns its request into token ids and `SamplingParams`, calls `Service.submit`, and turns the
emissions of the `Reply` into its own events. Nothing here knows a protocol.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from ...configs.engine import EngineConfig
from ...configs.models import served_name
from ...configs.server import ServerConfig
from ...model.thinking import Thinker
from ..effort import EXACT, Policy, Prepared, lossy_policies
from ..engine.request import LOCAL, Emission, Keep, SamplingParams, Sink
from ..metrics import EngineMetrics, HttpMetrics
from .bridge import Bridge, Reply, failure, merge
from .context import RequestInfo, current
from .conversations import Conversations
from .errors import ClientGone, context_exceeded, from_engine, stopping, unavailable
from .runs import Runs
from .wishes import check_cap, too_late

if TYPE_CHECKING:
    from ...cache.store import Store
    from ...model.load import Model

log = logging.getLogger(__name__)

T = TypeVar("T")


class EnginePort(Protocol):
    """What the server needs of the engine."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failed(self) -> str | None:
        """Why the engine has died for good, in one sentence."""
        ...

    @property
    def store(self) -> Store | None:
        """What outlives requests: tiers of the context cache, stored conversations; None: nothing does."""
        ...

    @property
    def context_length(self) -> int: ...
    @property
    def system_fingerprint(self) -> str: ...
    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        sink: Sink,
        request_id: str | None = None,
        principal: str = LOCAL,
        keep: Keep = "blocks",
        priority: int = 0,
    ) -> str: ...
    def choice_params(self, params: SamplingParams, n: int) -> list[SamplingParams]: ...
    def cancel(self, request_id: str) -> None: ...


class ModelPort(Protocol):
    """What the server needs of the loaded model."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and the engine that runs it."""

    engine: EnginePort
    model: ModelPort
    policies: Mapping[str, Policy] = dataclasses.field(default_factory=lambda: EXACT)
    """What the levels mean to the engine."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return served_name(self.model.name)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token; 0 without a tokenizer."""
        tokenizer = self.model.tokenizer
        return max(len(tokenizer.token_bytes(i)) for i in range(self.vocab_size)) if tokenizer is not None else 0

    @functools.cached_property
    def thinker(self) -> Thinker | None:
        """How the model's conversations are encoded and thoughts are had; None for a model without conversations."""
        tokenizer, template = self.model.tokenizer, self.model.chat_template
        return None if tokenizer is None or template is None else Thinker(tokenizer, template)

    def max_choices(self, config: ServerConfig) -> int:
        """Choices that one request may have: they enter the queue together, so more than it holds never get in."""
        return min(config.max_choices, self.engine.config.max_queue)

    def check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuse text that cannot fit the context whatever its tokens, before time is spent on finding them.

        Counted in characters against bytes of the longest token, which leaves room for text that a tokenizer
        normalises to something shorter.
        """
        characters = sum(len(text) for text in texts)
        if characters > self.engine.context_length * self.longest_token:
            raise context_exceeded(param, f"more than {characters // self.longest_token}", self.engine.context_length)


class Service:
    """State of the server. Created before the model is there, so that health can be asked for while it loads."""

    def __init__(self, config: ServerConfig | None = None, metrics: EngineMetrics | None = None) -> None:
        self.config = config if config is not None else ServerConfig()
        self.engine_metrics = metrics if metrics is not None else EngineMetrics()
        self.http_metrics = HttpMetrics(self.engine_metrics.registry)
        self.progress = "starting"
        self.stopping = False
        self.inflight = 0
        self.runs = Runs(self)
        self._conversations: Conversations | None = None
        self.on_stop: list[Callable[[], Awaitable[None]]] = []
        """What is to be done when a stop signal has come, all at once, within the grace of running answers."""
        self._loaded: Loaded | None = None
        self._bridge: Bridge | None = None
        self._workers = ThreadPoolExecutor(self.config.workers, thread_name_prefix="api-worker")
        self._storage = ThreadPoolExecutor(1, thread_name_prefix="api-storage")

    def attach(self, engine: EnginePort, model: ModelPort) -> None:
        """The model is loaded and its engine started. Called from any thread."""
        loaded = Loaded(engine, model, lossy_policies(cast("Model", model)) if self.config.lossy else EXACT)
        for name, policy in loaded.policies.items():
            if policy.cost:
                log.warning("level %s: %s", name, policy.cost)
        _ = loaded.longest_token, loaded.thinker  # found here, not during the first request
        self._conversations = Conversations(engine.store, loaded.name, self.config.max_stored)
        if not self._conversations.durable:
            log.warning("no state folder: stored conversations are kept in memory and end with this process")
        self._loaded = loaded

    @property
    def conversations(self) -> Conversations:
        """Where conversations are kept; there once the model is."""
        assert self._conversations is not None
        return self._conversations

    @property
    def status(self) -> Literal["starting", "ready", "stopping", "failed"]:
        """`failed`: the engine was started and no longer takes requests, and nobody asked the server to stop."""
        if self.stopping:
            return "stopping"
        if self._loaded is None:
            return "starting"
        return "ready" if self._loaded.engine.ready else "failed"

    @property
    def loaded(self) -> Loaded:
        """The model and its engine; an `ApiError` (503) when they cannot take requests."""
        if self.stopping:
            raise stopping()
        if self._loaded is None:
            raise unavailable(f"The model is not ready yet ({self.progress})", "model_not_ready", 5.0)
        if not self._loaded.engine.ready:
            raise unavailable("The engine is not running", "engine_not_ready", 5.0)
        return self._loaded

    @property
    def model_name(self) -> str | None:
        """Name of the model; None while it loads."""
        return None if self._loaded is None else self._loaded.name

    async def offload(self, work: Callable[[], T]) -> T:
        """Run `work` in a worker thread, so that templates, tokenizing and large JSON never hold up the event loop."""
        inherited = contextvars.copy_context()  # log lines of the worker carry the request's id
        return await asyncio.get_running_loop().run_in_executor(self._workers, inherited.run, work)

    async def in_storage(self, work: Callable[[], T]) -> T:
        """Run `work`, which uses the conversations, in the thread that waits for the disk: one, since the database does
        one thing at a time, and not a worker's, which others wait for."""
        inherited = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._storage, inherited.run, work)

    def new_reply(self, *, timed: bool = True) -> Reply:
        """A reply to the request that is being handled. `timed`: it must be complete within the request's time; what
        runs in the background need not be."""
        return Reply(self._cancel, current(), timed=timed)

    async def submit(
        self, reply: Reply, prepare: Callable[[], Sequence[Prepared]], n: int, param: str, keep: Keep = "blocks"
    ) -> Sequence[Prepared]:
        """Prepare the prompts in a worker and submit `n` choices of each; gives what was prepared.

        Choice i of prompt p has index `p * n + i` in `reply`. All are taken or none: when one is refused,
        the others are cancelled and an `ApiError` is raised. `param` names the field that held the prompts, `keep`
        says what of their KV may outlive them.
        """
        engine = self.loaded.engine
        bridge = self._bridge_of_loop()
        info = current() or RequestInfo("", time.perf_counter())
        info.stages.setdefault("read", time.perf_counter() - info.started)

        def work() -> Sequence[Prepared]:
            if reply.closed:
                raise ClientGone
            prepared = prepare()
            for one in prepared:
                check_cap(info, len(one.prompt), param)
            for one in prepared:
                for params in engine.choice_params(one.params, n):
                    _submit(engine, bridge, reply, one.prompt, params, param, keep, info)
            return prepared

        try:
            with info.stage("template"):
                async with asyncio.timeout(reply.time_left):
                    prepared = await self.offload(work)
        except TimeoutError:
            reply.close()
            raise too_late(info) from None
        except BaseException:
            reply.close()
            raise
        if info.principal is not None:
            info.principal.used(sum(len(one.prompt) for one in prepared))
        return prepared

    @property
    def busy(self) -> bool:
        """Whether anything is still being answered, or runs in the background."""
        return self.inflight > 0 or (self._bridge is not None and bool(self._bridge.running()))

    def cancel_running(self) -> None:
        """Cancel every request; each client is told. Called on the event loop."""
        for request_id in self._bridge.running() if self._bridge is not None else ():
            self._cancel(request_id)

    def close(self) -> None:
        self.stopping = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._storage.shutdown(wait=False, cancel_futures=True)

    def _cancel(self, request_id: str) -> None:
        if self._loaded is not None:
            self._loaded.engine.cancel(request_id)

    def _bridge_of_loop(self) -> Bridge:
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        return self._bridge


def _submit(
    engine: EnginePort, bridge: Bridge, reply: Reply, prompt: Sequence[int], params: SamplingParams, param: str,
    keep: Keep, info: RequestInfo,
) -> None:  # fmt: skip
    if reply.closed:
        raise ClientGone
    request_id = uuid.uuid4().hex
    bridge.expect(request_id, reply)
    try:
        engine.submit(
            prompt,
            params,
            sink=bridge.sink,
            request_id=request_id,
            principal=info.tenant or LOCAL,
            keep=keep,
            priority=info.priority,
        )
    except Exception as error:
        bridge.forget(request_id)
        raise from_engine(error, param) from error
    if reply.closed:  # the client left meanwhile: `Reply.close` may have come too early for the engine
        engine.cancel(request_id)


async def gather(reply: Reply, choices: int) -> list[Emission]:
    """Wait for all choices; each as one emission. Raises the error of the first that failed."""
    parts: dict[int, list[Emission]] = {index: [] for index in range(choices)}
    open_choices = choices
    while open_choices:
        for index, emission in await reply.take():
            parts[index].append(emission)
            if emission.finish_reason is not None:
                open_choices -= 1
                if (error := failure(emission)) is not None:
                    raise error
    return [merge(parts[index]) for index in range(choices)]
