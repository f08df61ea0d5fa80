"""Keeps what is pinned: renews the blocks' leases, and has missing ones computed when nothing better is to do.

What is missing goes as a hand-off to this build's own rework queue in the batch lane: behind every interactive job,
once for all workers, and with all that protects a worker from a job that brings it down.
"""

import asyncio
import logging
import time
from functools import partial

from schemas.errors import KvrelayError
from schemas.handoff import Handoff
from schemas.job import Sampling
from schemas.subjects import DEFAULT_TENANT, Lane, Stage
from services.bus.connection import Bus
from services.bus.jetstream import Refused
from services.bus.publish import publish_handoff
from services.worker.pinned import PinnedPrefix
from services.worker.runtime import Runtime

log = logging.getLogger(__name__)

LOOK_S = 1.0
RENEW_S = 60.0
RETRY_S = 60.0  # a pin that stays cold is computed so often at most
WARM_TIMEOUT_S = 600.0


class PinKeeper:
    def __init__(self, runtime: Runtime, bus: Bus, *, warms: bool) -> None:
        """`warms`: has missing blocks computed; one kind of worker is enough."""
        self._runtime = runtime
        self._bus = bus
        self._warms = warms
        self._next_s = 0.0
        self._cold: list[PinnedPrefix] = []
        self._asked: dict[str, str] = {}  # pin -> job

    async def run(self) -> None:
        """Until cancelled. A store that hangs holds nothing up but this."""
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        pinned = self._runtime.pinned
        if await self._runtime.on_store_thread(pinned.refresh):
            self._runtime.prompt_blocks.shared = pinned.shared
            self._next_s = 0.0
        due = self._cold
        if time.monotonic() >= self._next_s:
            due = pinned.prefixes
            self._next_s = time.monotonic() + RENEW_S
        self._cold = await self._runtime.on_store_thread(partial(pinned.keep, due)) if due else []
        for prefix in self._cold if self._warms else []:
            await self._warm(prefix)

    async def _warm(self, prefix: PinnedPrefix) -> None:
        blocks = prefix.refs[-1].key.hex()[:12]  # other ones for every identity
        job = f"pin-{prefix.pin.id}-{blocks}-{int(time.time() // RETRY_S)}"
        if self._asked.get(prefix.pin.id) == job:
            return
        try:
            await publish_handoff(self._bus, self._handoff(prefix, job), prefix.pin.model, Lane.BATCH, Stage.REWORK)
        except (KvrelayError, Refused) as error:
            log.warning("pin %s cannot be computed now: %s", prefix.pin.id, error)
            return
        self._asked[prefix.pin.id] = job
        log.info("pin %s lacks blocks: job %s computes them", prefix.pin.id, job)

    def _handoff(self, prefix: PinnedPrefix, job: str) -> Handoff:
        """A prompt of the full blocks, for one token that nobody reads. What is shared any tenant's prompt fills."""
        return Handoff(
            tenant=DEFAULT_TENANT if prefix.pin.is_shared else prefix.pin.tenant,
            job=job,
            origin=job,
            digest=prefix.pin.text_hash[:32],
            build=self._runtime.build,
            hop=0,
            last=0,
            timeout_left_s=WARM_TIMEOUT_S,
            prompt_token_ids=prefix.token_ids[: prefix.refs[-1].end],
            sampling=Sampling(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            first=[],
            stored_blocks=0,
            cached_tokens=0,
            salt=prefix.pin.salt,
        )
