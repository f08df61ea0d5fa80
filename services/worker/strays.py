"""Jobs that were handed to workers which are gone: somebody must still answer for them.

Every worker of a model looks for them, also in the queues of other builds. Rework that no prefill worker of its build
will do goes on to decode, which computes what is missing; jobs of a build that is silent for too long end.
"""

import asyncio
import contextlib
import logging

from schemas.beat import BUILD_SILENT_AFTER_S
from schemas.errors import BuildGone, BusUnavailable, KvrelayError
from schemas.handoff import handed_on, parse_handoff
from schemas.subjects import Stage
from services import telemetry
from services.bus.beats import BeatTable
from services.bus.chain import fail_job
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.delivery import Delivery, Handler
from services.bus.delivery import run as run_delivery
from services.bus.depth import queued_sources
from services.bus.jetstream import Refused
from services.bus.publish import publish_handoff
from services.bus.queue import WorkQueue
from services.bus.streams import Source
from services.worker.address import address_of

LOOK_S = 5.0
REWORK_WAIT_S = 10.0  # a prefill worker that was started again takes its rework itself
NOTHING_LEFT_S = 1.0

log = logging.getLogger(__name__)


class Strays:
    def __init__(self, bus: Bus, beats: BeatTable, model: str) -> None:
        self._bus = bus
        self._beats = beats
        self._model = model
        self._unread_since_s: dict[Source, float] = {}  # rework that no prefill worker of its build will take

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(BusUnavailable, Refused):
                await self.look()

    async def look(self) -> None:
        """Once: finds what nobody will take, and takes it."""
        for stage in (Stage.REWORK, Stage.DECODE):
            for source in await queued_sources(self._bus, stage, self._model):
                if self._beats.build_silent_s(self._model, source.build) > BUILD_SILENT_AFTER_S:
                    await self._take(source, self._end)
                elif stage is Stage.REWORK and self._is_unread(source):
                    await self._take(source, self._pass_on)

    def _is_unread(self, source: Source) -> bool:
        """Whether no prefill worker has been there for a while that takes rework, while decode is."""
        takers = self._beats.working("prefill", self._model, source.build)
        if takers or not self._beats.alive("decode", self._model, source.build):
            self._unread_since_s.pop(source, None)
            return False
        return elapsed_s() - self._unread_since_s.setdefault(source, elapsed_s()) > REWORK_WAIT_S

    async def _take(self, source: Source, handle: Handler) -> None:
        """All jobs of a lane, until none comes any more. Others may be at it too: the queue gives each out once."""
        queue = WorkQueue(self._bus, [source])
        try:
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(NOTHING_LEFT_S):
                        delivery = await queue.next()
                    await run_delivery(delivery, handle)
        finally:
            await queue.close()

    async def _end(self, delivery: Delivery) -> None:
        address = address_of(delivery)
        build = delivery.source.build
        log.warning("job %s ends: build %s is gone", address.job, build)
        error = BuildGone(f"the workers of build {build}, which began this job, are gone: send it again")
        await fail_job(self._bus, address.tenant, address.job, error)

    async def _pass_on(self, delivery: Delivery) -> None:
        address = address_of(delivery)
        delivery.job = (address.tenant, address.job)
        try:
            handoff = parse_handoff(delivery.data)
        except KvrelayError as error:
            await fail_job(self._bus, address.tenant, address.job, error)
            raise
        log.info("job %s goes on to decode: no prefill worker of build %s is left", address.job, handoff.build)
        age_s = delivery.age_s()
        ttft_left_s = None if handoff.ttft_left_s is None else handoff.ttft_left_s - age_s
        left = {"timeout_left_s": handoff.timeout_left_s - age_s, "ttft_left_s": ttft_left_s}
        with telemetry.span("strays", telemetry.extract(delivery.headers)):
            await publish_handoff(
                self._bus,
                handed_on(handoff, reworked=True, stored_blocks=0, **left),
                self._model,
                delivery.lane,
                headers=telemetry.inject(),
                held=lambda: delivery.held,
            )
