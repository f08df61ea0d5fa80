"""Jobs out, events in: what the gateway has on the bus for its requests, and how it ends what nobody waits for.

Order of an acceptance: `accepted` goes first on the job's reply subject, then the job into the queue. The other way
round a worker's `start` could race it for the first place. Should the gateway die between the two, no job was
promised: the client has no answer yet and nothing is queued. A refused publish is followed by the end of the chain.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import cast

from schemas.errors import BusUnavailable, Cancelled, Internal, KvrelayError, NoWorker, error_from_code
from schemas.events import Error, Event
from schemas.job import Job
from schemas.subjects import MSG_ID_HEADER, Lane
from schemas.wire import encode
from services import telemetry
from services.bus.cancels import cancel_job
from services.bus.chain import open_job
from services.bus.connection import Bus
from services.bus.publish import job_msg_id, submit_job
from services.bus.watch import watch
from services.gateway.inbox import ClientGone, Inbox
from services.gateway.open_job import OpenJob

LOCAL_END_S = 2.0
REPEAT_WITHIN_S = 3.0

_log = logging.getLogger("kvrelay.gateway")


class Exchange:
    """Owns every open job from its acceptance to its end; `close` ends what is left."""

    def __init__(self, bus: Bus, tenant: str, owner: str, resume_grace_s: float) -> None:
        self._bus = bus
        self._tenant = tenant
        self.owner = owner
        self._grace_s = resume_grace_s
        self.jobs: dict[str, OpenJob] = {}
        self.job_opened = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self, jobs: Sequence[Job], inbox: Inbox) -> AsyncIterator[None]:
        """Publishes `jobs`; their events arrive in `inbox`. What has not ended at the exit is ended by us.

        Raises `QueueFull`, `ModelNotFound`, `TooLarge` or `BusUnavailable`; then none of them goes on.
        """
        opened: list[OpenJob] = []
        pumps: list[asyncio.Task[None]] = []
        grace_s = 0.0
        try:
            for number, job in enumerate(jobs):
                opened.append(await self._open(job, number, inbox))
                pumps.append(asyncio.create_task(self._pump(opened[-1]), name=f"events of {job.id}"))
            yield
        except ClientGone:
            grace_s = 0.0 if inbox.has_stalled else self._grace_s
            raise
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for entry in opened:
                self._leave(entry, grace_s)

    async def _open(self, job: Job, number: int, inbox: Inbox) -> OpenJob:
        assert job.id is not None
        trace = telemetry.inject()
        found = OpenJob.of(job, number, inbox, asyncio.get_running_loop().time())
        try:
            first = await open_job(self._bus, self._tenant, job.id, job.model, trace)
            if first is not None:
                self._add(found)
                await self._submit(job, {**trace, MSG_ID_HEADER: job_msg_id(self._tenant, found.id)})
        except KvrelayError as error:  # also when `accepted` may have been stored: it must not stay for ever
            self._add(found)
            self.end(found, error)
            raise
        if first is None:
            raise Internal("the id made for this request was in use: send it again")
        return found

    def _add(self, job: OpenJob) -> None:
        self.jobs[job.id] = job
        self.job_opened.set()

    async def _submit(self, job: Job, headers: dict[str, str]) -> None:
        """A publish whose answer is lost is repeated once: the queue drops a second message with the same id."""
        assert job.model is not None
        payload = encode(job)
        try:
            await submit_job(self._bus, self._tenant, job.model, Lane.INTERACTIVE, payload, headers)
        except BusUnavailable:
            await self._bus.wait_connected(REPEAT_WITHIN_S)
            await submit_job(self._bus, self._tenant, job.model, Lane.INTERACTIVE, payload, headers)

    async def _pump(self, job: OpenJob) -> None:
        """Carries the job's events to its request, until the end."""
        try:
            watched = cast(AsyncGenerator[Event, None], watch(self._bus, self._tenant, job.id))
            async with contextlib.aclosing(watched) as events:
                async for event in events:
                    job.note(event)
                    if isinstance(event, Error):
                        job.inbox.stop(error_from_code(event.code, event.message, event.param))
                    else:
                        await job.inbox.put(job.number, event)
        except KvrelayError as error:
            job.inbox.stop(error)

    def _leave(self, job: OpenJob, grace_s: float) -> None:
        """Nobody waits for `job` any more."""
        if job.has_ended:
            telemetry.jobs.add(code=job.code, stage="gateway")
            self.jobs.pop(job.id, None)
        elif not job.is_ending:
            self.end(job, Cancelled("nobody waits for this job any more"), grace_s)

    def end(self, job: OpenJob, error: KvrelayError, after_s: float = 0.0) -> None:
        """Ends `job` with `error` after a while, whatever it does then. Goes on trying while the bus is away."""
        job.is_ending = True
        task = asyncio.create_task(self._end(job, error, after_s), name=f"end of {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, job: OpenJob, error: KvrelayError, after_s: float) -> None:
        guard: asyncio.TimerHandle | None = None
        try:
            await asyncio.sleep(after_s)
            # The request hears of the end through the job's events, but must not depend on that.
            guard = asyncio.get_running_loop().call_later(LOCAL_END_S, job.inbox.stop, error)
            if await self._write_end(job, error):
                telemetry.jobs.add(code=error.code, stage="gateway")
                job.inbox.stop(error)
        except asyncio.CancelledError:
            job.inbox.stop(error)
            raise
        finally:
            self.jobs.pop(job.id, None)
            if guard is not None and job.has_ended:
                guard.cancel()

    async def _write_end(self, job: OpenJob, error: KvrelayError) -> bool:
        """Writes the end and tells the worker. False if the job had ended by itself."""
        while True:
            try:
                return await cancel_job(self._bus, self._tenant, job.id, error)
            except BusUnavailable as failure:
                _log.warning("job %s cannot be ended yet: %s", job.id, failure)
                await self._bus.wait_connected()

    async def close(self, timeout_s: float) -> None:
        """Ends every open job. What the bus does not take in time is left to the workers, who miss our beat."""
        for job in list(self.jobs.values()):
            if not job.is_ending:
                self.end(job, NoWorker("the gateway is shutting down: send the request again"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
