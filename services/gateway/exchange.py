"""Jobs out, events in: what the gateway has on the bus for its requests, and how it ends what nobody waits for.

Order of an acceptance: `accepted` goes first on the job's reply subject, then the job into the queue. The other way
round a worker's `start` could race it for the first place. Should the gateway die between the two, no job was
promised: the client has no answer yet and nothing is queued. A refused publish is followed by the end of the chain.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, cast

from schemas.asked import Asked
from schemas.errors import BusUnavailable, Cancelled, IdConflict, Internal, KvrelayError, NoWorker, error_from_code
from schemas.events import Accepted, Error, Event
from schemas.job import Job
from schemas.subjects import MSG_ID_HEADER, Lane
from schemas.wire import encode
from services import telemetry
from services.bus.beats import BeatTable
from services.bus.cancels import cancel_job
from services.bus.chain import open_job
from services.bus.connection import Bus
from services.bus.history import last_message
from services.bus.publish import job_msg_id, submit_job
from services.bus.watch import watch
from services.bus.watchers import watcher_of
from services.gateway.inbox import ClientGone, Ended, Inbox
from services.gateway.open_job import OpenJob, Seat
from services.gateway.recall import Recalled, recall_job

LOCAL_END_S = 2.0
REPEAT_WITHIN_S = 3.0

_log = logging.getLogger("kvrelay.gateway")


class Order(NamedTuple):
    """A job to be published. `can_be_resumed`: its client knows how to come back for its answer."""

    tenant: str
    job: Job
    asked: Asked
    can_be_resumed: bool = False


class Exchange:
    """Owns every open job from its acceptance to its end; `close` ends what is left."""

    def __init__(self, bus: Bus, owner: str, resume_grace_s: float, beats: BeatTable) -> None:
        self._bus = bus
        self.owner = owner
        self._grace_s = resume_grace_s
        self._beats = beats
        self.jobs: dict[tuple[str, str], OpenJob] = {}  # by tenant and id
        self.job_opened = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self, orders: Sequence[Order], inbox: Inbox, *, again: bool = False) -> AsyncIterator[None]:
        """Publishes the jobs; their events arrive in `inbox`. What has not ended at the exit is ended by us.

        `again`: some may have been published before, by this request's client. Raises `QueueFull`, `ModelNotFound`,
        `TooLarge`, `IdConflict` or `BusUnavailable`; then none of them goes on.
        """
        async with self._following(inbox) as follow:
            for number, order in enumerate(orders):
                follow(number, await self._open(order, again))
            yield

    @contextlib.asynccontextmanager
    async def joined(self, found: Recalled, inbox: Inbox) -> AsyncIterator[None]:
        """The same for a request that was accepted before, here or elsewhere."""
        async with self._following(inbox, self._grace_s) as follow:
            for number, job in enumerate(found.job_ids):
                follow(number, self._join(job, found))
            yield

    def is_watched(self, tenant: str, job: str) -> bool:
        found = self.jobs.get((tenant, job))
        return found is not None and found.is_watched

    @contextlib.asynccontextmanager
    async def _following(self, inbox: Inbox, grace_s: float = 0.0) -> AsyncIterator[Callable[[int, OpenJob], None]]:
        """`grace_s`: how long a job outlives a reader who leaves it in good order."""
        followed: list[OpenJob] = []
        pumps: list[asyncio.Task[None]] = []

        def follow(number: int, job: OpenJob) -> None:
            job.inboxes.add(inbox)
            if job.leaving is not None:
                job.leaving.cancel()
                job.leaving, job.is_asking = None, False
            followed.append(job)
            pumps.append(asyncio.create_task(self._pump(job, number, inbox), name=f"events of {job.id}"))

        try:
            yield follow
        except ClientGone:
            grace_s = 0.0 if inbox.has_stalled else self._grace_s
            raise
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for job in followed:
                self._leave(job, inbox, grace_s)

    async def _open(self, order: Order, again: bool) -> OpenJob:
        tenant, job, asked = order.tenant, order.job, order.asked
        assert job.id is not None and job.model is not None
        trace = telemetry.inject()
        headers = {**trace, MSG_ID_HEADER: job_msg_id(tenant, job.id)}
        found = OpenJob.of(tenant, job.id, job.model, asked, asyncio.get_running_loop().time())
        found.can_be_resumed = order.can_be_resumed
        try:
            first = await open_job(self._bus, tenant, job.id, job.model, trace, asked)
            if first is not None:
                self._add(found)
                await self._submit(tenant, job, headers)
        except KvrelayError as error:  # also when `accepted` may have been stored: it must not stay for ever
            self._add(found)
            self.end(found, error)
            raise
        if first is not None:
            return found
        if not again:
            raise Internal("the id made for this request was in use: send it again")
        return await self._reopen(order, headers)

    async def _reopen(self, order: Order, headers: dict[str, str]) -> OpenJob:
        """A job that its client asked for before. Whoever accepted it may have died before it was queued."""
        tenant, job, asked = order.tenant, order.job, order.asked
        assert job.id is not None
        found = await recall_job(self._bus, tenant, job.id)
        if found is None or found.asked.digest != asked.digest:
            raise IdConflict("this Idempotency-Key was used for another request", param="Idempotency-Key")
        last = await last_message(self._bus, tenant, job.id)
        if last is not None and all(isinstance(event, Accepted) for event in last.events):
            await self._submit(tenant, job, headers)
        joined = self._join(job.id, found)
        joined.can_be_resumed = True
        return joined

    def _join(self, job: str, found: Recalled) -> OpenJob:
        here = self.jobs.get((found.tenant, job))
        if here is None:
            accepted_s = asyncio.get_running_loop().time() - found.age_s
            here = OpenJob.of(found.tenant, job, found.model, found.asked, accepted_s)
            here.is_ours, here.can_be_resumed = False, True
            self._add(here)
        return here

    def _add(self, job: OpenJob) -> None:
        self.jobs[job.tenant, job.id] = job
        self.job_opened.set()

    def _forget(self, job: OpenJob) -> None:
        self.jobs.pop((job.tenant, job.id), None)

    async def _submit(self, tenant: str, job: Job, headers: dict[str, str]) -> None:
        """A publish whose answer is lost is repeated once: the queue drops a second message with the same id."""
        assert job.model is not None
        payload = encode(job)
        try:
            await submit_job(self._bus, tenant, job.model, Lane.INTERACTIVE, payload, headers)
        except BusUnavailable:
            await self._bus.wait_connected(REPEAT_WITHIN_S)
            await submit_job(self._bus, tenant, job.model, Lane.INTERACTIVE, payload, headers)

    async def _pump(self, job: OpenJob, number: int, inbox: Inbox) -> None:
        """Carries the job's events to its request, until the end."""
        try:
            watched = cast(
                AsyncGenerator[Event, None], watch(self._bus, job.tenant, job.id, taker=Seat(job, number, inbox))
            )
            async with contextlib.aclosing(watched) as events:
                async for event in events:
                    job.note(event)
                    if isinstance(event, Error):
                        inbox.stop(Ended(error_from_code(event.code, event.message, event.param)))
                    else:
                        await inbox.put(number, event)
        except KvrelayError as error:
            inbox.stop(error)

    def _leave(self, job: OpenJob, inbox: Inbox, grace_s: float) -> None:
        """One waits for `job` no more; the last one may be back within the grace."""
        job.inboxes.discard(inbox)
        if job.inboxes:
            return
        if job.has_ended:
            if job.is_ours:
                telemetry.jobs.add(code=job.code, stage="gateway")
            self._forget(job)
        elif job.is_detached:
            self._forget(job)
        elif not job.is_ending:
            job.leaving = self._start(self._abandon(job, grace_s), f"grace of {job.id}")

    async def _abandon(self, job: OpenJob, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        job.is_asking = True
        if await self._is_watched_elsewhere(job):
            self._forget(job)
        else:
            self.end(job, Cancelled("nobody waits for this job any more"))

    async def _is_watched_elsewhere(self, job: OpenJob) -> bool:
        if all(beat.process == self.owner for beat in self._beats.alive("gateway")):
            return False
        while True:
            try:
                return await watcher_of(self._bus, job.tenant, job.id) is not None
            except BusUnavailable:
                await self._bus.wait_connected()

    def end(self, job: OpenJob, error: KvrelayError) -> None:
        """Ends `job` with `error`, whatever it does then. Goes on trying while the bus is away."""
        job.is_ending = True
        self._start(self._end(job, error), f"end of {job.id}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, job: OpenJob, error: KvrelayError) -> None:
        guard: asyncio.TimerHandle | None = None
        try:
            # The request hears of the end through the job's events, but must not depend on that.
            guard = asyncio.get_running_loop().call_later(LOCAL_END_S, job.stop, error)
            if await self._write_end(job, error):
                telemetry.jobs.add(code=error.code, stage="gateway")
                job.stop(Ended(error))
        except asyncio.CancelledError:
            job.stop(error)
            raise
        finally:
            self._forget(job)
            if guard is not None and job.has_ended:
                guard.cancel()

    async def _write_end(self, job: OpenJob, error: KvrelayError) -> bool:
        """Writes the end and tells the worker. False if the job had ended by itself."""
        while True:
            try:
                return await cancel_job(self._bus, job.tenant, job.id, error)
            except BusUnavailable as failure:
                _log.warning("job %s cannot be ended yet: %s", job.id, failure)
                await self._bus.wait_connected()

    async def close(self, timeout_s: float) -> None:
        """Ends every open job, but those whose readers may go on elsewhere. What the bus does not take in time is left
        to the workers, who miss our beat."""
        for job in list(self.jobs.values()):
            if job.can_be_resumed or job.is_detached:
                job.is_detached = True
                job.stop(NoWorker("the gateway is shutting down: the answer goes on, come back for the rest of it"))
            elif not job.is_ending:
                self.end(job, NoWorker("the gateway is shutting down: send the request again"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
