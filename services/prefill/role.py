"""The prefill stage, as `services.worker.process` drives it."""

import asyncio
from functools import partial

from schemas.beat import ProcessRole
from schemas.errors import InvalidRequest
from schemas.handoff import Handoff
from schemas.job import MAX_TIMEOUT_S, Job, parse_job
from schemas.subjects import Stage, tenant_and_lane
from services import telemetry
from services.bus.beats import BeatTable
from services.prefill.home import Home
from services.prefill.job import PrefillJob
from services.prefill.request import draft_handoff, is_repeat
from services.worker.handoff import read_handoff
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime

INLINE_BYTES = 8192


class PrefillRole:
    """Takes jobs while the next pass has budget for one more chunk: a short prompt never waits for a long one."""

    name: ProcessRole = "prefill"
    stages: tuple[Stage, ...] = (Stage.REWORK, Stage.PREFILL)
    feeds: ProcessRole | None = "decode"

    def __init__(self, runtime: Runtime, beats: BeatTable) -> None:
        scheduler = runtime.settings.scheduler
        self.batch = runtime.batch(chunk_tokens=scheduler.chunk_tokens, token_budget=scheduler.token_budget)
        self._scheduler = scheduler
        self._runtime = runtime
        self._home = Home(beats, runtime.text.slug, runtime.text_id)
        self._jobs: set[PrefillJob] = set()
        self._is_handing_back = False

    def has_budget(self, num_preparing: int) -> bool:
        chunk = min(self._scheduler.chunk_tokens, self._scheduler.token_budget)
        return self.batch.num_missing + (num_preparing + 1) * chunk <= self._scheduler.token_budget

    def expect(self, run: JobRun) -> None:
        self._read(run)

    async def work(self, run: JobRun, permit: Permit) -> None:
        with telemetry.span("prefill.resolve"):
            handoff = await self._resolve(run)
        if handoff is None:
            return
        if run.begun_by not in (None, self._runtime.build):
            await self._home.send(run, handoff)
            return
        job = PrefillJob(self._runtime, self.batch, run, permit, handoff)
        if self._is_handing_back:
            job.hand_back()
        self._jobs.add(job)
        try:
            passed_on = await job.perform()
        finally:
            self._jobs.discard(job)
        if passed_on is None:
            await run.settled()
        else:
            await run.publish(*passed_on)

    def hand_back(self) -> None:
        """Prompts that are not done go to another prefill worker of the build."""
        self._is_handing_back = True
        for job in self._jobs:
            job.hand_back()

    def _read(self, run: JobRun) -> Job | Handoff:
        """The message, whose deadlines and owner are watched from now on."""
        if run.stage is Stage.REWORK:
            handoff = read_handoff(run.delivery.data, self._runtime.text)
            run.watch_owner(handoff.owner, handoff.on_disconnect)
            run.set_deadline(handoff.timeout_left_s)
            return handoff
        tenant_and_lane(run.delivery.subject)  # a tenant that is no slug is refused, not mapped to another
        job = parse_job(run.delivery.data)
        if job.n > self._scheduler.max_sequences:
            raise InvalidRequest(f"n is limited to {self._scheduler.max_sequences} here, got {job.n}", param="n")
        run.watch_owner(job.owner, job.on_disconnect)
        run.set_deadline(job.timeout_s or MAX_TIMEOUT_S, None if run.history.tokens else job.ttft_timeout_s)
        return job

    async def _resolve(self, run: JobRun) -> Handoff | None:
        """The job as a draft of its hand-off; None if there is nothing to do."""
        message = self._read(run)
        if isinstance(message, Handoff):
            return message if run.history.end is None else None
        if is_repeat(run.history, message, run.job, run.delivery.origin) or run.history.end is not None:
            return None
        return await self._draft(run, message)

    async def _draft(self, run: JobRun, job: Job) -> Handoff:
        """A long text is tokenised on another thread: a megabyte takes a while. A hop there and back takes 0.7 ms."""
        draft = partial(
            draft_handoff,
            job,
            tenant=run.tenant,
            job_id=run.job,
            origin=run.delivery.origin,
            published_at=run.delivery.published_at,
            build=self._runtime.build,
            text=self._runtime.text,
        )
        return draft() if len(run.delivery.data) <= INLINE_BYTES else await asyncio.to_thread(draft)
