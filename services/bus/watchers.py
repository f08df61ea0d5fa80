"""Who waits for a job: asked before a job ends for want of a reader, since its reader may have come back elsewhere.

A gateway answers for the jobs that its clients follow. One that does not, or is gone, says nothing.
"""

import time
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import BusUnavailable
from schemas.subjects import ALL_WATCHED, job_of_subject, watched_subject
from services.bus.connection import Bus
from services.bus.micro import Tally

ANSWER_S = 0.5


async def watcher_of(bus: Bus, tenant: str, job: str) -> str | None:
    """The name of a process that waits for the job, None if there is none. Raises `BusUnavailable`."""
    try:
        return (await bus.request(watched_subject(tenant, job), timeout_s=ANSWER_S)).data.decode()
    except BusUnavailable:
        if not bus.connected:
            raise
        return None  # nobody listens, or nobody has the job


class WatchAnswers:
    """Answers for this process: `is_watched(tenant, job)`."""

    def __init__(self, bus: Bus, is_watched: Callable[[str, str], bool]) -> None:
        self._bus = bus
        self._is_watched = is_watched
        self._subscription: Subscription | None = None
        self.tally = Tally()

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(ALL_WATCHED, self._on_message)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    async def _on_message(self, message: Msg) -> None:
        began_ns = time.perf_counter_ns()
        if self._is_watched(*job_of_subject(message.subject)):
            await self._bus.publish(message.reply, self._bus.name.encode())
            self.tally.note("watched", began_ns)
