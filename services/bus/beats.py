"""Who is alive: every process says so once a second, and whoever needs to know keeps a table."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.beat import BEAT_INTERVAL_S, SILENT_AFTER_S, Beat, ProcessRole, beat_decoder
from schemas.errors import BusUnavailable, InvalidRequest
from schemas.subjects import ALL_BEATS, beat_subject
from schemas.wire import encode, translate
from services.bus.clock import elapsed_s, until_next_s
from services.bus.connection import Bus

log = logging.getLogger("kvrelay.bus")

MAX_TICK_S = 2 * BEAT_INTERVAL_S
FORGET_AFTER_S = 3600.0
MAX_REMEMBERED = 1000


class BeatPublisher:
    """Publishes `make_beat()` every second from `start` to `close`, and at once when asked to."""

    def __init__(self, bus: Bus, make_beat: Callable[[], Beat]) -> None:
        self._bus = bus
        self._make_beat = make_beat
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.beat()
        self._task = asyncio.create_task(self._run(), name="beats")

    async def beat(self) -> None:
        """For a change that others should know at once."""
        beat = self._make_beat()
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(beat_subject(beat.process), encode(beat))

    async def close(self) -> None:
        """Stops; `make_beat` is asked once more, so that it can say `stopped`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self.beat()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(until_next_s(BEAT_INTERVAL_S))
            await self.beat()


@dataclass
class _Seen:
    beat: Beat
    at_s: float  # by the table's clock


class BeatTable:
    """The last beat of each process. Its clock stands still while this process is paused or cut off.

    So nobody is declared dead for a silence in which we could not have heard them.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[str, _Seen] = {}
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._ticked_s = elapsed_s()
        self._deaf_s = 0.0
        self._started_s = self._now_s()

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(ALL_BEATS, self._on_message)
        self._ticked_s = elapsed_s()
        self._started_s = self._now_s()
        self._ticking = asyncio.create_task(self._tick(), name="beat table")

    async def close(self) -> None:
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    @property
    def listening_s(self) -> float:
        """Seconds since `start` in which beats could be heard."""
        return self._now_s() - self._started_s

    def alive(self, role: ProcessRole | None = None, model: str | None = None, build: str | None = None) -> list[Beat]:
        """The last beats of the processes that are alive: who do the work of `role`, of this model, of this build."""
        now = self._now_s()
        return [
            seen.beat
            for seen in self._seen.values()
            if now - seen.at_s <= SILENT_AFTER_S
            and seen.beat.state != "stopped"
            and (role is None or seen.beat.plays(role))
            and model in (None, seen.beat.model)
            and build in (None, seen.beat.build)
        ]

    def heard(self, model: str, build: str) -> list[Beat]:
        """The last beats of all workers of a build, gone or not, as far as they are remembered."""
        return [seen.beat for seen in self._seen.values() if (seen.beat.model, seen.beat.build) == (model, build)]

    def remembered(self) -> list[tuple[Beat, float]]:
        """The last beat of every process, gone or not, and the seconds since."""
        now = self._now_s()
        return [(seen.beat, now - seen.at_s) for seen in self._seen.values()]

    def get(self, process: str) -> Beat | None:
        """The last beat of a process, however old."""
        seen = self._seen.get(process)
        return seen.beat if seen else None

    def owner_silent(self, process: str, silent_s: float) -> bool:
        """True if `process` was not heard for `silent_s`, while it could have been; one that stopped says no more."""
        seen = self._seen.get(process)
        return self._now_s() - (seen.at_s if seen else self._started_s) > silent_s

    def build_silent_s(self, model: str, build: str) -> float:
        """Seconds in which no decode worker of this build was heard, though it could have been."""
        of_build = [
            seen.at_s
            for seen in self._seen.values()
            if seen.beat.plays("decode") and (seen.beat.model, seen.beat.build) == (model, build)
        ]
        return self._now_s() - max([self._started_s, *of_build])

    async def wait_for(self, condition: Callable[["BeatTable"], bool], timeout_s: float | None = None) -> bool:
        """Waits until `condition` holds, looking after each beat and each second. False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for_worker(self, role: ProcessRole, model: str, build: str | None = None) -> Beat:
        """The beat of a worker that takes work, once there is one."""
        await self.wait_for(lambda table: bool(table.working(role, model, build)))
        return self.working(role, model, build)[0]

    def working(self, role: ProcessRole, model: str, build: str | None = None) -> list[Beat]:
        """The workers that take work."""
        return [beat for beat in self.alive(role, model, build) if beat.state in ("ok", "degraded")]

    def _now_s(self) -> float:
        """Seconds in which beats could be heard. Ticks that did not come count as a pause of ours."""
        return min(elapsed_s(), self._ticked_s + MAX_TICK_S) - self._deaf_s

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(until_next_s(BEAT_INTERVAL_S))
            passed_s = elapsed_s() - self._ticked_s
            self._deaf_s += max(0.0, passed_s - MAX_TICK_S) if self._bus.connected else passed_s
            self._ticked_s += passed_s
            self._changed.set()

    async def _on_message(self, message: Msg) -> None:
        try:
            beat = translate(beat_decoder, message.data)
        except InvalidRequest as error:
            log.warning("a beat on %s cannot be read: %s", message.subject, error.message)
            return
        now = self._now_s()
        self._seen[beat.process] = _Seen(beat, now)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen = {name: seen for name, seen in self._seen.items() if now - seen.at_s < FORGET_AFTER_S}
        self._changed.set()
