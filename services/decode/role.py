"""The decode stage, as `services.worker.process` drives it."""

import asyncio

from schemas.errors import InvalidRequest
from schemas.handoff import parse_handoff
from schemas.subjects import Stage
from services.bus.connection import Bus
from services.bus.publish import publish_handoff
from services.decode.job import DecodeJob
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime


class DecodeRole:
    name = "decode"
    stages = (Stage.DECODE,)
    feeds = None

    def __init__(self, runtime: Runtime, bus: Bus) -> None:
        # Known tokens that are missing here are run through at most a block a step, so that nobody waits for long.
        block_tokens = runtime.pool.block_tokens
        max_sequences = runtime.settings.scheduler.max_sequences
        self.batch = runtime.batch(chunk_tokens=block_tokens, token_budget=max_sequences + block_tokens)
        self._runtime = runtime
        self._bus = bus
        self._handing_back = asyncio.Event()
        self._idle = asyncio.Event()
        self._num_jobs = 0

    def has_budget(self, num_preparing: int) -> bool:
        """The room for sequences is the only bound here."""
        return True

    async def work(self, run: JobRun, permit: Permit) -> None:
        handoff = parse_handoff(run.delivery.data)
        if handoff.sampling.n > self._runtime.settings.scheduler.max_sequences:
            raise InvalidRequest("n is larger than scheduler.max_sequences of the decode workers", param="n")
        run.watch_owner(handoff.owner, handoff.on_disconnect)
        run.set_deadline(handoff.timeout_left_s)
        job = DecodeJob(self._runtime, self.batch, run, permit, handoff, self._handing_back)
        passed_on = await job.perform()
        if passed_on is None:
            await run.settled()
        else:
            await publish_handoff(self._bus, passed_on.handoff, run.delivery.lane, passed_on.stage)

    async def drain(self, has_peer: bool) -> None:
        """With another worker of the build alive, running jobs go to it at once."""
        if has_peer:
            self._handing_back.set()

    def hand_back(self) -> None:
        """The grace time is over."""
        self._handing_back.set()
