"""Both stages in one process, as `services.worker.process` drives it.

A job goes through the queues as it does between two workers, so its tokens, its events and who may take it over are
the same; the hand-off finds its full blocks resident. What the two stages share is the engine: rows of prompts and of
running answers are computed in the same passes, so that a long prompt holds up the answers beside it.
"""

from collections.abc import Awaitable
from typing import Any

from schemas.beat import ProcessRole
from schemas.subjects import Lane, Stage
from services.bus.beats import BeatTable
from services.bus.delivery import Delivery
from services.decode.role import DecodeRole, max_draft
from services.prefill.role import PrefillRole
from services.worker.address import Address
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime


class BothRole:
    name: ProcessRole = "both"
    stages: tuple[Stage, ...] = (Stage.DECODE, Stage.REWORK, Stage.PREFILL)
    feeds: ProcessRole | None = None  # itself

    def __init__(self, runtime: Runtime, beats: BeatTable) -> None:
        scheduler = runtime.settings.scheduler
        self._chunk_tokens = scheduler.chunk_tokens
        self._token_budget = scheduler.token_budget + scheduler.max_sequences  # a row for each answer beside prompts
        self.batch = runtime.batch(
            chunk_tokens=self._chunk_tokens, token_budget=self._token_budget, max_draft=max_draft(scheduler)
        )
        self._prefill = PrefillRole(runtime, beats, self.batch)
        self._decode = DecodeRole(runtime, beats, self.batch)

    def has_budget(self, lane: Lane, num_preparing: int) -> bool:
        if lane is Lane.BATCH:
            return self._prefill.has_budget(lane, num_preparing)
        return self.batch.num_missing + (num_preparing + 1) * self._chunk_tokens <= self._token_budget

    async def prepare(self, delivery: Delivery, address: Address) -> Any:
        return await self._of(delivery).prepare(delivery, address)

    def expect(self, run: JobRun) -> None:
        self._of(run.delivery).expect(run)

    async def work(self, run: JobRun, permit: Permit, prepared: Awaitable[Any]) -> None:
        await self._of(run.delivery).work(run, permit, prepared)

    def hand_back(self) -> None:
        self._prefill.hand_back()
        self._decode.hand_back()

    def _of(self, delivery: Delivery) -> PrefillRole | DecodeRole:
        return self._decode if delivery.stage is Stage.DECODE else self._prefill
