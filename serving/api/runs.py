"""Runs: answers that are made on their own account, for any number of readers, also none.

    run = await service.runs.start(plan, tenant)     # the engine works on it, and it is stored if `plan.stored`
    reader = run.reader()                            # from the beginning, or behind an event
    async for piece in reader.pieces(...): ...       # what has happened, then what happens
    await reader.end()                               # or just the end

The responses, interactions and sockets of all protocols are runs. A run's tokens are stored every half second, and its
end before any reader hears of it. A reader that is slow or goes away holds up nobody; a run that is not in the
background ends when nobody has read it for `plan.linger` seconds, and stays as it is then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Literal

from ...cache.database import NotFound, Unavailable
from ..engine.request import Emission
from .bridge import failure
from .conversations import Conversations, pack_events
from .errors import ApiError, internal, unavailable
from .eventlog import Event, EventLog
from .run import REPLAY_BYTES, Plan, Run

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger(__name__)

CHECKPOINT = 0.5
"""Seconds between two times that a run's new tokens are stored."""

LINGER_BYTES = 32 << 20
"""Events of all runs that have ended, are stored nowhere, and may be asked for again by a reader that lost them."""


class Runs:
    """All runs of a server. Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[tuple[str, str], Run] = {}
        self._lingering: dict[tuple[str, str], int] = {}  # ended and not stored, the oldest first: bytes of events
        self._tasks: set[asyncio.Task[None]] = set()
        self._saver: asyncio.Task[None] | None = None

    @property
    def _conversations(self) -> Conversations:
        return self._service.conversations

    async def start(self, plan: Plan, tenant: str) -> Run:
        """Give a request to the engine, and store it if it is to be. Raises an `ApiError` if either refuses it."""
        service = self._service
        reply = service.new_reply(timed=not plan.background)
        keep: Literal["conversation", "nothing"] = "conversation" if plan.stored else "nothing"
        (prepared,) = await service.submit(reply, lambda: [plan.prepare()], 1, plan.param, keep=keep)
        writer = plan.writer(prepared)
        run = Run(plan, tenant, prepared, writer, reply)
        if plan.stored:
            try:
                await service.in_storage(lambda: self._begin(run))
            except BaseException:
                reply.close()
                raise
        self._running[tenant, run.id] = run
        run.publish(writer.begin())
        self._spawn(self._pump(run))
        if plan.stored and (self._saver is None or self._saver.done()):
            self._saver = self._spawn(self._save_regularly())
        return run

    def find(self, tenant: str, id: str, api: str) -> Run | None:
        """A run of `api` that is in progress, or has ended and somebody may come back to."""
        run = self._running.get((tenant, id))
        return run if run is not None and run.plan.api == api else None

    async def delete(self, tenant: str, id: str) -> None:
        """Forget a stored run, which ends if it is in progress. Raises `NotFound`."""
        run = self._running.get((tenant, id))
        if run is not None:
            run.stop("cancelled")
            await run.done()
            self._running.pop((tenant, id), None)
        await self._service.in_storage(lambda: self._conversations.delete(tenant, id))

    @property
    def running(self) -> list[Run]:
        """The runs that have not ended."""
        return [run for run in self._running.values() if not run.ended]

    async def drain(self) -> None:
        """Wait until all runs have ended and are stored."""
        while waiting := self.running:
            await asyncio.gather(*(run.done() for run in waiting))

    def stop_all(self) -> None:
        """End all runs, which can be gone on with later."""
        for run in self.running:
            run.stop("incomplete")

    # ---- a run's task

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pump(self, run: Run) -> None:
        try:
            await self._answer(run)
        except ApiError as error:
            await self._failed(run, error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("run %s failed", run.id)
            await self._failed(run, internal(run.id))
        finally:
            run.reply.close()
            run.end()
            self._forget_later(run)

    async def _answer(self, run: Run) -> None:
        while True:
            for _, emission in await run.reply.take():
                run.tokens += emission.token_ids
                run.unsaved += emission.token_ids
                if emission.finish_reason == "error":
                    run.publish(run.writer.push(dataclasses.replace(emission, finish_reason=None)))
                    error = failure(emission)
                    assert error is not None
                    raise error
                events = run.writer.push(emission)
                if emission.finish_reason is None:
                    run.publish(events)
                    continue
                if emission.finish_reason == "cancelled":
                    run.ending = "stopped" if run.ending == "finished" else run.ending  # nobody had asked for an end
                else:
                    run.ending = "finished"
                run.last = emission
                await self._finish(run, events, emission)
                return

    async def _finish(self, run: Run, events: list[Event], emission: Emission) -> None:
        """The last events become visible when the end is stored."""
        run.publish(events)
        run.finishing = True
        ended = run.writer.end(emission, run.ending)
        if run.plan.stored:
            cut = run.ending in ("incomplete", "stopped") or emission.finish_reason in ("max_tokens", "context_length")
            status: Any = "cancelled" if run.ending == "cancelled" else "incomplete" if cut else "completed"
            if (error := await self._store_end(run, ended, status)) is not None:
                run.writer.not_stored(ended, error)
        run.publish(ended)

    async def _failed(self, run: Run, error: ApiError) -> None:
        run.error, run.finishing = error, True
        events = run.writer.fail(error)
        if run.plan.stored:
            await self._store_end(run, events, "failed")
        run.publish(events)

    # ---- storing

    def _begin(self, run: Run) -> None:
        """In a worker."""
        plan = run.plan
        request = {**plan.request(run.prepared), "resource": run.resource}
        try:
            self._conversations.begin(
                run.tenant,
                run.id,
                run.prepared.prompt,
                model=plan.model,
                parent=plan.parent,
                request=request,
                ttl=plan.ttl,
            )
        except NotFound as error:
            raise ApiError(404, f"The conversation to go on with is gone: {error}", code="not_found") from None
        except Unavailable as error:
            log.error("a conversation cannot be stored: %s", error)
            message = "Conversations cannot be stored now; send the request with store=false"
            raise unavailable(message, "storage_unavailable", 10.0) from None

    async def _store_end(self, run: Run, last: list[Event], status: Any) -> ApiError | None:
        """Store the answer as it ends with the events `last`, which nobody has seen yet; what went wrong."""
        complete = EventLog(run.writer.encode, run.writer.merge, REPLAY_BYTES)
        complete.restore(*run.log.entries)
        complete.add(last)
        messages, names = run.writer.told()
        rest, run.unsaved = run.unsaved, []
        resource = {**run.resource}

        def store() -> None:
            numbers, events = complete.entries
            output = {
                "resource": resource, "messages": messages, "names": names, "numbers": numbers,
                "events": pack_events(events),
            }  # fmt: skip
            self._conversations.finish(run.id, rest, status=status, output=output, usage=resource.get("usage"))

        if run.saving is not None:
            await run.saving
        try:
            await self._service.in_storage(store)
        except Exception as error:
            log.error("the answer of %s could not be stored: %s", run.id, error)
            return unavailable("The answer could not be stored", "storage_unavailable", 10.0)
        return None

    async def _save_regularly(self) -> None:
        """Store the new tokens of all runs, all in one commit."""
        while self.running:
            await asyncio.sleep(CHECKPOINT)
            growing = [run for run in self.running if run.plan.stored and run.unsaved]
            if not growing:
                continue
            answers = {run.id: run.unsaved for run in growing}
            saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for run in growing:
                run.unsaved, run.saving = [], saved
            try:
                await self._service.in_storage(lambda answers=answers: self._conversations.append(answers))  # type: ignore[misc]
            except Exception as error:
                log.error("the tokens of running answers could not be stored: %s", error)
                for run in growing:
                    run.unsaved = [*answers[run.id], *run.unsaved]
            finally:
                saved.set_result(None)
                for run in growing:
                    run.saving = None

    def _forget_later(self, run: Run) -> None:
        """What is stored can be asked for there. Of what is not, the end is kept for a while for a reader that lost
        its connection, as far as there is room."""
        key = (run.tenant, run.id)
        if run.plan.stored or not run.plan.linger:
            self._running.pop(key, None)
            return
        self._lingering[key] = run.log.size
        while sum(self._lingering.values()) > LINGER_BYTES:
            self._forget(next(iter(self._lingering)))
        asyncio.get_running_loop().call_later(run.plan.linger, self._forget, key)

    def _forget(self, key: tuple[str, str]) -> None:
        if self._lingering.pop(key, None) is not None:
            self._running.pop(key, None)
