"""The decode stage, as `services.worker.process` drives it."""

import asyncio
from collections.abc import Awaitable

from schemas.beat import ProcessRole
from schemas.errors import InvalidRequest
from schemas.handoff import Handoff
from schemas.subjects import Lane, Stage
from services.bus.beats import BeatTable
from services.bus.delivery import Delivery
from services.decode.job import DecodeJob, Prepared
from services.engine.batch import Batch
from services.settings import Scheduler
from services.worker.address import Address
from services.worker.handoff import read_handoff
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime

SLICE_S = 0.001  # by which a sequence that joins may hold up those that run, a step


class DecodeRole:
    name: ProcessRole = "decode"
    stages: tuple[Stage, ...] = (Stage.DECODE,)
    feeds: ProcessRole | None = None

    def __init__(self, runtime: Runtime, beats: BeatTable, batch: Batch | None = None) -> None:
        """`batch`: one that is shared with another stage."""
        # Known tokens that are missing here are run through at most a block a step, and beside others less.
        block_tokens, scheduler = runtime.pool.block_tokens, runtime.settings.scheduler
        if batch is None:
            batch = runtime.batch(
                chunk_tokens=block_tokens,
                token_budget=scheduler.max_sequences + block_tokens,
                slice_s=SLICE_S,
                max_draft=max_draft(scheduler),
            )
        self.batch = batch
        self._runtime = runtime
        self._handing_back = asyncio.Event()

    def has_budget(self, lane: Lane, num_preparing: int) -> bool:
        """The room for sequences is the only bound here."""
        return True

    async def prepare(self, delivery: Delivery, address: Address) -> Prepared:
        """Reads the hand-off, and begins to look its prompt's blocks up."""
        await asyncio.sleep(0)  # the request for the history goes out before
        handoff = self._read(delivery)
        blocks = self._runtime.prompt_blocks
        return Prepared(handoff, blocks.look_up(blocks.refs(handoff.tenant, handoff.salt, handoff.prompt_token_ids)))

    def expect(self, run: JobRun) -> None:
        self._watch(run, self._read(run.delivery))

    async def work(self, run: JobRun, permit: Permit, prepared: Awaitable[Prepared]) -> None:
        taken = await prepared
        handoff = taken.handoff
        self._watch(run, handoff)
        if run.history.end is not None:
            return
        if handoff.sampling.n > self._runtime.settings.scheduler.max_sequences:
            raise InvalidRequest("n is larger than scheduler.max_sequences of the decode workers", param="n")
        job = DecodeJob(self._runtime, self.batch, run, permit, taken, self._handing_back)
        passed_on = await job.perform()
        if passed_on is None:
            await run.settled()
        else:
            await run.publish(passed_on.handoff, passed_on.stage)

    def hand_back(self) -> None:
        """Running jobs store what they have and go to another worker of the build."""
        self._handing_back.set()

    def _read(self, delivery: Delivery) -> Handoff:
        return read_handoff(delivery.data, self._runtime.text)

    def _watch(self, run: JobRun, handoff: Handoff) -> None:
        """Its deadlines and its owner count from now on."""
        run.watch_owner(handoff.owner, handoff.on_disconnect)
        run.set_deadline(handoff.timeout_left_s, None if run.history.tokens else handoff.ttft_left_s)


def max_draft(scheduler: Scheduler) -> int:
    """Guesses of a sequence that a step may try."""
    return scheduler.max_proposals if scheduler.speculate == "lookup" else 0
