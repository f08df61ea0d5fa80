"""The prefill stage, as `services.worker.process` drives it."""

import asyncio

from schemas.handoff import Handoff, parse_handoff
from schemas.job import Job, parse_job
from schemas.subjects import Stage
from services.bus.connection import Bus
from services.bus.publish import publish_handoff
from services.prefill.job import PrefillJob
from services.prefill.request import draft_handoff, is_repeat
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime


class PrefillRole:
    """Takes jobs while the next pass has budget for one more chunk: a short prompt never waits for a long one."""

    name = "prefill"
    stages = (Stage.REWORK, Stage.PREFILL)
    feeds = "decode"

    def __init__(self, runtime: Runtime, bus: Bus) -> None:
        scheduler = runtime.settings.scheduler
        self.batch = runtime.batch(chunk_tokens=scheduler.chunk_tokens, token_budget=scheduler.token_budget)
        self._scheduler = scheduler
        self._runtime = runtime
        self._bus = bus

    def has_budget(self, num_preparing: int) -> bool:
        chunk = self._scheduler.chunk_tokens
        return self.batch.num_missing + (num_preparing + 1) * chunk <= self._scheduler.token_budget

    async def work(self, run: JobRun, permit: Permit) -> None:
        ttft_timeout_s = None
        if run.delivery.stage is Stage.REWORK:
            handoff = parse_handoff(run.delivery.data)
        else:
            job = parse_job(run.delivery.data)
            handoff = await self._draft(run, job)
            ttft_timeout_s = None if run.history.tokens else job.ttft_timeout_s
        if is_repeat(run.history, handoff):
            return
        run.watch_owner(handoff.owner, handoff.on_disconnect)
        run.set_deadline(handoff.timeout_left_s, ttft_timeout_s)
        passed_on = await PrefillJob(self._runtime, self.batch, run, permit, handoff).perform()
        if passed_on is None:
            await run.settled()
        else:
            await publish_handoff(self._bus, passed_on, run.delivery.lane, Stage.DECODE)

    async def drain(self, has_peer: bool) -> None:
        """Prompts are short work: those under way finish; what does not in time is redelivered elsewhere."""

    async def _draft(self, run: JobRun, job: Job) -> Handoff:
        """On another thread: tokenising a megabyte takes a while."""
        return await asyncio.to_thread(
            draft_handoff,
            job,
            tenant=run.tenant,
            job_id=run.job,
            origin=run.delivery.origin,
            build=self._runtime.build,
            text=self._runtime.text,
        )
