"""A worker without a model: takes jobs from the real queue and streams through the real chain, a token a step each."""

import asyncio
import os
import time

from schemas.beat import Beat
from schemas.errors import Settle
from schemas.events import Done, Finish, Start, Token, Usage
from schemas.job import parse_job
from schemas.subjects import Lane, Stage, tenant_and_lane
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.history import last_message
from services.bus.queue import WorkQueue
from services.bus.replies import ReplyWriter
from services.bus.streams import Source, ensure_consumers, ensure_streams

BUILD = "0" * 12
TOKEN_ID = 1000


class Speaker:
    """Its jobs are divided into `num_groups`, as if each were another decode worker's."""

    def __init__(self, bus: Bus, model: str, num_groups: int) -> None:
        self._bus = bus
        self._model = model
        self._num_groups = num_groups
        self._beats = BeatPublisher(bus, self._beat)
        self._queue = WorkQueue(bus, [Source(Stage.PREFILL, Lane.INTERACTIVE, model, BUILD)])

    async def start(self) -> None:
        await ensure_streams(self._bus, self._model)
        await ensure_consumers(self._bus, self._model, BUILD)
        await self._beats.start()

    async def close(self) -> None:
        await self._beats.close()
        await self._queue.close()

    async def begin(self, num_jobs: int) -> list[ReplyWriter]:
        """Takes so many jobs and starts them."""
        return list(await asyncio.gather(*[self._begin(await self._queue.next()) for _ in range(num_jobs)]))

    async def say(self, writers: list[ReplyWriter], num_tokens: int, step_s: float) -> None:
        """So many tokens each, a step after the other; the groups take their steps one after the other too."""
        next_s = time.monotonic()
        for index in range(num_tokens):
            for group in range(self._num_groups):
                next_s += step_s / self._num_groups
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                text = f" {time.monotonic_ns()}"
                for writer in writers[group :: self._num_groups]:
                    writer.put(Token(choice=0, index=index, id=TOKEN_ID, text=text))

    async def end(self, writers: list[ReplyWriter], num_tokens: int) -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=num_tokens, cached_tokens=0)
        for writer in writers:
            writer.put(Finish(choice=0, reason="length", text="", tokens=num_tokens), Done(usage=usage))

    async def _begin(self, delivery: Delivery) -> ReplyWriter:
        job = parse_job(delivery.data)
        tenant, _ = tenant_and_lane(delivery.subject)
        assert job.id is not None
        last = await last_message(self._bus, tenant, job.id)
        writer = ReplyWriter(self._bus, tenant, job.id, last.sequence if last else 0, delivery.claim())
        start = Start(
            job=job.id, origin=delivery.origin, digest="", build=BUILD, seed=1, prompt_tokens=1, cached_tokens=0
        )
        writer.put(start)
        await writer.drained()
        await delivery.settle(Settle.ACK)
        return writer

    def _beat(self) -> Beat:
        return Beat(process=self._bus.name, role="both", state="ok", model=self._model, build=BUILD, pid=os.getpid())
