"""The prefill stage, as `services.worker.process` drives it."""

import asyncio
from collections.abc import Awaitable
from functools import partial

from schemas.beat import ProcessRole
from schemas.errors import InvalidRequest
from schemas.handoff import Handoff
from schemas.job import MAX_TIMEOUT_S, Job, parse_job
from schemas.subjects import Lane, Stage, tenant_and_lane
from services import telemetry
from services.bus.beats import BeatTable
from services.bus.delivery import Delivery
from services.engine.batch import Batch
from services.prefill.draft import Draft
from services.prefill.home import Home
from services.prefill.job import PrefillJob
from services.prefill.request import draft_handoff, is_repeat
from services.worker.address import Address
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

    def __init__(self, runtime: Runtime, beats: BeatTable, batch: Batch | None = None) -> None:
        """`batch`: one that is shared with another stage."""
        scheduler = runtime.settings.scheduler
        if batch is None:
            batch = runtime.batch(chunk_tokens=scheduler.chunk_tokens, token_budget=scheduler.token_budget)
        self.batch = batch
        self._scheduler = scheduler
        self._runtime = runtime
        self._home = Home(beats, runtime.text.slug, runtime.text_id)
        self._jobs: set[PrefillJob] = set()
        self._is_handing_back = False

    def has_budget(self, lane: Lane, num_preparing: int) -> bool:
        """Of batch jobs there is enough once they fill a chunk; others need not wait for them."""
        chunk = min(self._scheduler.chunk_tokens, self._scheduler.token_budget)
        if lane is Lane.BATCH:
            return self.batch.num_giving_way + num_preparing * chunk < chunk
        return self.batch.num_missing + (num_preparing + 1) * chunk <= self._scheduler.token_budget

    async def prepare(self, delivery: Delivery, address: Address) -> Draft:
        """Reads and resolves the message, and begins to look its blocks up."""
        await asyncio.sleep(0)  # the request for the history goes out before
        message = self._read(delivery)
        handoff = message if isinstance(message, Handoff) else await self._resolve(message, delivery, address)
        blocks = self._runtime.blocks
        return Draft(
            message, handoff, blocks.look_up(blocks.refs(handoff.tenant, handoff.salt, handoff.prompt_token_ids))
        )

    def expect(self, run: JobRun) -> None:
        self._watch(run, self._read(run.delivery))

    async def work(self, run: JobRun, permit: Permit, prepared: Awaitable[Draft]) -> None:
        with telemetry.span("prefill.resolve"):
            draft = await prepared
        message, handoff = draft.message, draft.handoff
        self._watch(run, message)
        is_again = isinstance(message, Job) and is_repeat(run.history, message, run.job, run.delivery.origin)
        if is_again or run.history.end is not None:
            return
        if run.begun_by not in (None, self._runtime.build):
            await self._home.send(run, handoff)
            return
        job = PrefillJob(self._runtime, self.batch, run, permit, draft)
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

    def _read(self, delivery: Delivery) -> Job | Handoff:
        if delivery.stage is Stage.REWORK:
            return read_handoff(delivery.data, self._runtime.text)
        tenant_and_lane(delivery.subject)  # a tenant that is no slug is refused, not mapped to another
        job = parse_job(delivery.data)
        if job.n > self._scheduler.max_sequences:
            raise InvalidRequest(f"n is limited to {self._scheduler.max_sequences} here, got {job.n}", param="n")
        return job

    def _watch(self, run: JobRun, message: Job | Handoff) -> None:
        """Its deadlines and its owner count from now on."""
        run.watch_owner(message.owner, message.on_disconnect)
        if isinstance(message, Handoff):
            timeout_s, ttft_timeout_s = message.timeout_left_s, message.ttft_left_s
        else:
            timeout_s, ttft_timeout_s = message.timeout_s or MAX_TIMEOUT_S, message.ttft_timeout_s
        run.set_deadline(timeout_s, None if run.history.tokens else ttft_timeout_s)

    async def _resolve(self, job: Job, delivery: Delivery, address: Address) -> Handoff:
        """A long text is tokenised on another thread: a megabyte takes a while. A hop there and back takes 0.7 ms."""
        resolve = partial(
            draft_handoff,
            job,
            tenant=address.tenant,
            job_id=address.job,
            origin=delivery.origin,
            published_at=delivery.published_at,
            build=self._runtime.build,
            text=self._runtime.text,
        )
        return resolve() if len(delivery.data) <= INLINE_BYTES else await asyncio.to_thread(resolve)
