"""How many jobs wait at the broker, asked for those who look, and at most once a second for all of them."""

import asyncio
from collections.abc import Callable, Collection

from schemas.errors import BusUnavailable
from schemas.stats import LaneStats, QueueStats
from schemas.subjects import Lane, Stage
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.depth import depth, num_dead
from services.bus.jetstream import Refused
from services.bus.streams import Source

FRESH_S = 0.9  # less than a second: who looks once a second is told something new each time


class Queues:
    """`builds()`: (model, build) of the workers that are known, "" for models that have none."""

    def __init__(self, bus: Bus, builds: Callable[[], Collection[tuple[str, str]]]) -> None:
        self._bus = bus
        self._builds = builds
        self._lock = asyncio.Lock()
        self._asked_s: float | None = None
        self._lanes: list[LaneStats] = []
        self._dead_letters = 0

    async def look(self) -> QueueStats:
        """The last that is known, with its age, where the broker does not answer."""
        async with self._lock:
            if self._asked_s is None or elapsed_s() - self._asked_s > FRESH_S:
                await self._ask()
        age_s = None if self._asked_s is None else round(elapsed_s() - self._asked_s, 3)
        return QueueStats(age_s=age_s, lanes=self._lanes, dead_letters=self._dead_letters)

    async def _ask(self) -> None:
        asked_s = elapsed_s()
        try:
            found = await asyncio.gather(*(self._lane(source) for source in self._sources()))
            self._dead_letters = await num_dead(self._bus)
        except (BusUnavailable, Refused):
            return
        self._lanes = [lane for lane in found if lane is not None]
        self._asked_s = asked_s

    def _sources(self) -> list[Source]:
        builds = sorted(self._builds())
        prefill = [Source(Stage.PREFILL, lane, model, "") for model in sorted({m for m, _ in builds}) for lane in Lane]
        begun = [
            Source(stage, lane, model, build)
            for model, build in builds
            if build
            for stage in (Stage.REWORK, Stage.DECODE)
            for lane in Lane
        ]
        return prefill + begun

    async def _lane(self, source: Source) -> LaneStats | None:
        """None where no worker has made the queue's consumer yet: nothing can wait there."""
        try:
            waiting, taken = await depth(self._bus, source)
        except Refused:
            return None
        return LaneStats(
            stage=source.stage,
            lane=source.lane,
            model=source.model,
            build=source.build,
            waiting=waiting,
            taken=taken,
        )
