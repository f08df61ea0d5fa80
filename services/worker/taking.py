"""The task that takes jobs: it may be stopped, and started again on other queues."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from schemas.subjects import Lane
from services.bus.connection import Bus
from services.bus.queue import WorkQueue
from services.bus.streams import Source


class Taking:
    """`take` runs until it is cancelled. Between `start` and `stop` it has a queue that is closed behind it."""

    def __init__(
        self, bus: Bus, take: Callable[[WorkQueue], Coroutine[Any, Any, None]], wants: Callable[[Lane], bool]
    ) -> None:
        """`wants`: as the queue asks it; `look_again` when its answer may be another."""
        self._bus = bus
        self._wants = wants
        self._take = take
        self._running: tuple[WorkQueue, asyncio.Task[None]] | None = None

    def start(self, sources: Sequence[Source]) -> asyncio.Task[None]:
        """The task that runs `take`; it ends by itself only by an error."""
        assert self._running is None
        queue = WorkQueue(self._bus, sources, self._wants)
        task = asyncio.create_task(self._take(queue), name="take jobs")
        self._running = queue, task
        return task

    def look_again(self) -> None:
        if self._running is not None:
            self._running[0].look_again()

    async def stop(self) -> None:
        """Returns when no job comes any more. May be called twice."""
        if self._running is None:
            return
        queue, task = self._running
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await queue.close()
        self._running = None
