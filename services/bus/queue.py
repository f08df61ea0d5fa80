"""Takes jobs from several lanes, one for each `next()`, in order of preference.

While nothing waits, one request is out on every lane, so that a new job comes at once (0.2 ms). Two lanes may answer
together: then the second job stays here, its claim renewed, for the next call; if none comes soon it is given back.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from nats.aio.msg import Msg

from schemas.errors import BusUnavailable, Settle
from schemas.subjects import Lane
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.facts import StreamFacts
from services.bus.jetstream import Refused
from services.bus.pull import Pull
from services.bus.streams import Source, ensure_consumer

log = logging.getLogger("kvrelay.bus")

LINGER_S = 0.005  # a worker with room asks again at once: its requests stay out that long
HOLD_S = 1.0  # a job that nobody asked for waits here that long before it is given back
CHECK_S = 5.0
RETRY_S = 0.2


def _any_lane(_: Lane) -> bool:
    return True


class WorkQueue:
    """One reader of several sources, the preferred ones first. Closed by its owner.

    `next` may be cancelled at any time without losing a job. Calls of it are served one after the other.
    """

    def __init__(self, bus: Bus, sources: Sequence[Source], wants: Callable[[Lane], bool] = _any_lane) -> None:
        """`wants`: whether a job of a lane may be given out now. One that was asked for before waits here, held."""
        self._bus = bus
        self._wants = wants
        self._pulls = [Pull(bus, source, self._on_message, self._on_change) for source in sources]
        self._buffer: deque[Delivery] = deque()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._waiters = 0
        self._withdrawal: asyncio.TimerHandle | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._forget = bus.on_connection(up=self._on_up)
        self._closed = False

    async def next(self) -> Delivery:
        """The next job, waiting for one as long as it takes. Goes on through reconnects and removed consumers."""
        self._waiters += 1
        self._keep_asking()
        try:
            async with self._turn:
                while True:
                    delivery = self._take()
                    if delivery is not None:
                        return delivery
                    await self._ask()
        finally:
            self._waiters -= 1
            if not self._waiters and not self._closed:
                self._withdrawal = asyncio.get_running_loop().call_later(LINGER_S, self._stop_asking)

    def look_again(self) -> None:
        """`wants` may answer otherwise than before."""
        self._changed.set()

    async def close(self) -> None:
        """Takes all requests back and gives back the jobs that nobody asked for."""
        self._closed = True
        self._keep_asking()
        self._forget()
        await asyncio.gather(*(pull.withdraw() for pull in self._pulls))
        await self._give_back()
        for chore in list(self._chores):
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)

    def _take(self) -> Delivery | None:
        """A job that arrived, unless its claim grew too old in here."""
        for delivery in list(self._buffer):
            if not delivery.held:
                self._buffer.remove(delivery)
                delivery.abandon()
            elif self._wants(delivery.lane):
                self._buffer.remove(delivery)
                return delivery
        return None

    @property
    def _has_some(self) -> bool:
        return any(self._wants(delivery.lane) for delivery in self._buffer)

    async def _ask(self) -> None:
        """Makes sure that every lane that is wanted is asked, and no other, then waits until something changes."""
        self._changed.clear()
        pulls = self._wanted()
        for pull in self._pulls:
            if pull.asked and pull not in pulls:
                self._start(pull.withdraw())  # what it brought would wait here, and not where it is wanted
        try:
            for pull in pulls:
                if pull.broken:
                    await self._repair(pull)
            if not any(pull.asked for pull in pulls) and await self._probe(pulls):
                return
            for pull in pulls:
                if not pull.asked or pull.silent:
                    await pull.ask(wait=True)
        except (BusUnavailable, Refused) as error:
            log.info("%s: %s", self._bus.name, error.message)
            await asyncio.sleep(RETRY_S)
            await self._bus.wait_connected()
            return
        if not self._has_some and pulls == self._wanted():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()

    def _wanted(self) -> list[Pull]:
        return [pull for pull in self._pulls if self._wants(pull.source.lane)]

    async def _probe(self, pulls: Sequence[Pull]) -> bool:
        """Asks lane after lane whether a job waits: asking all at once would bring one from each."""
        for pull in pulls:
            await pull.ask(wait=False)
            while pull.asked and not pull.silent and not self._has_some:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await self._changed.wait()
                self._changed.clear()
            if self._has_some or pull.broken:
                return True
        return False

    async def _repair(self, pull: Pull) -> None:
        pull.ack_wait_s = await ensure_consumer(self._bus, pull.source)
        facts = self._bus.part(StreamFacts)
        if pull.created_ms:
            facts.forget(pull.source.stream)
        pull.created_ms = await facts.created_ms(pull.source.stream)
        pull.broken = False

    def _on_message(self, pull: Pull, message: Msg) -> None:
        self._buffer.append(Delivery(self._bus, pull.source, message, pull.created_ms, pull.ack_wait_s))
        if not self._waiters:
            self._hold()

    def _on_change(self) -> None:
        self._changed.set()

    def _on_up(self) -> None:
        for pull in self._pulls:
            pull.asked = False
        self._changed.set()

    def _keep_asking(self) -> None:
        if self._withdrawal is not None:
            self._withdrawal.cancel()
            self._withdrawal = None

    def _stop_asking(self) -> None:
        self._withdrawal = None
        for pull in self._pulls:
            if pull.asked:
                self._start(pull.withdraw())
        if self._buffer:
            self._hold()

    def _hold(self) -> None:
        """Gives the jobs in here back later, unless somebody asks before."""

        async def later() -> None:
            await asyncio.sleep(HOLD_S)
            if not self._waiters:
                await self._give_back()

        self._start(later())

    async def _give_back(self) -> None:
        """A nak counts as a delivery, and so would letting the claim run out; this is the quicker one."""
        while self._buffer:
            await self._buffer.popleft().settle(Settle.REDELIVER)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore, name="work queue")
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
