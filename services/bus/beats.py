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
from services.bus.clock import elapsed_s
from services.bus.connection import Bus

log = logging.getLogger("kvrelay.bus")

FORGET_AFTER_S = 3600.0


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
            await asyncio.sleep(BEAT_INTERVAL_S)
            await self.beat()


@dataclass
class _Seen:
    beat: Beat
    at_s: float


class BeatTable:
    """The last beat of each process. Judges only while it hears beats at all: a deaf table declares nobody dead."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[str, _Seen] = {}
        self._listening_since_s = elapsed_s()
        self._heard_s = elapsed_s()
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._forget = bus.on_connection(up=self._on_up)

    async def start(self) -> None:
        self._listening_since_s = elapsed_s()
        self._subscription = await self._bus.subscribe(ALL_BEATS, self._on_message)

    async def close(self) -> None:
        self._forget()
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    def alive(self, role: ProcessRole | None = None, model: str | None = None, build: str | None = None) -> list[Beat]:
        """The last beats of the processes that are alive, of this role, model and build where given."""
        now = elapsed_s()
        return [
            seen.beat
            for seen in self._seen.values()
            if now - seen.at_s <= SILENT_AFTER_S
            and seen.beat.state != "stopped"
            and role in (None, seen.beat.role)
            and model in (None, seen.beat.model)
            and build in (None, seen.beat.build)
        ]

    def get(self, process: str) -> Beat | None:
        """The last beat of a process, however old."""
        seen = self._seen.get(process)
        return seen.beat if seen else None

    def owner_silent(self, process: str, silent_s: float) -> bool:
        """True if `process` has stopped, or has not beaten for `silent_s` in which others were heard."""
        seen = self._seen.get(process)
        if seen is not None and seen.beat.state == "stopped":
            return True
        if self.deaf:
            return False
        last_s = max(seen.at_s if seen else 0.0, self._listening_since_s)
        return elapsed_s() - last_s > silent_s

    def build_silent_s(self, model: str, build: str) -> float:
        """Seconds since a decode worker of this build was last heard, or since this table listens."""
        times = [
            s.at_s for s in self._seen.values() if (s.beat.role, s.beat.model, s.beat.build) == ("decode", model, build)
        ]
        return 0.0 if self.deaf else elapsed_s() - max([self._listening_since_s, *times])

    @property
    def deaf(self) -> bool:
        """True if nobody at all was heard lately: we were paused or cut off, or are alone and do not beat."""
        return not self._bus.connected or elapsed_s() - self._heard_s > SILENT_AFTER_S

    async def wait_for(self, condition: Callable[["BeatTable"], bool], timeout_s: float | None = None) -> bool:
        """Waits until `condition` holds, looking after each beat and each second. False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(BEAT_INTERVAL_S):
                            await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for_worker(self, role: ProcessRole, model: str, build: str | None = None) -> Beat:
        """The beat of a worker that takes work, once there is one."""

        def ready(table: BeatTable) -> bool:
            return bool(table._working(role, model, build))

        await self.wait_for(ready)
        return self._working(role, model, build)[0]

    def _working(self, role: ProcessRole, model: str, build: str | None) -> list[Beat]:
        return [beat for beat in self.alive(role, model, build) if beat.state in ("ok", "degraded")]

    async def _on_message(self, message: Msg) -> None:
        try:
            beat = translate(beat_decoder, message.data)
        except InvalidRequest as error:
            log.warning("a beat on %s cannot be read: %s", message.subject, error.message)
            return
        now = elapsed_s()
        if now - self._heard_s > SILENT_AFTER_S:  # we were deaf: nobody's silence before now counts
            self._listening_since_s = now
        self._heard_s = now
        self._seen[beat.process] = _Seen(beat, now)
        if len(self._seen) > 1000:
            self._seen = {name: seen for name, seen in self._seen.items() if now - seen.at_s < FORGET_AFTER_S}
        self._changed.set()

    def _on_up(self) -> None:
        self._listening_since_s = elapsed_s()
        self._changed.set()
