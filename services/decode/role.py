"""The decode stage, as `services.worker.process` drives it."""

import asyncio

from schemas.beat import ProcessRole
from schemas.errors import InvalidRequest
from schemas.handoff import Handoff
from schemas.subjects import Stage
from services.bus.beats import BeatTable
from services.decode.job import DecodeJob
from services.worker.handoff import read_handoff
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime


class DecodeRole:
    name: ProcessRole = "decode"
    stages: tuple[Stage, ...] = (Stage.DECODE,)
    feeds: ProcessRole | None = None

    def __init__(self, runtime: Runtime, beats: BeatTable) -> None:
        # Known tokens that are missing here are run through at most a block a step, so that nobody waits for long.
        block_tokens = runtime.pool.block_tokens
        max_sequences = runtime.settings.scheduler.max_sequences
        self.batch = runtime.batch(chunk_tokens=block_tokens, token_budget=max_sequences + block_tokens)
        self._runtime = runtime
        self._handing_back = asyncio.Event()

    def has_budget(self, num_preparing: int) -> bool:
        """The room for sequences is the only bound here."""
        return True

    def expect(self, run: JobRun) -> None:
        self._read(run)

    async def work(self, run: JobRun, permit: Permit) -> None:
        handoff = self._read(run)
        if run.history.end is not None:
            return
        if handoff.sampling.n > self._runtime.settings.scheduler.max_sequences:
            raise InvalidRequest("n is larger than scheduler.max_sequences of the decode workers", param="n")
        job = DecodeJob(self._runtime, self.batch, run, permit, handoff, self._handing_back)
        passed_on = await job.perform()
        if passed_on is None:
            await run.settled()
        else:
            await run.publish(passed_on.handoff, passed_on.stage)

    def hand_back(self) -> None:
        """Running jobs store what they have and go to another worker of the build."""
        self._handing_back.set()

    def _read(self, run: JobRun) -> Handoff:
        """The hand-off, whose deadline and owner are watched from now on."""
        handoff = read_handoff(run.delivery.data, self._runtime.text)
        run.watch_owner(handoff.owner, handoff.on_disconnect)
        run.set_deadline(handoff.timeout_left_s)
        return handoff
