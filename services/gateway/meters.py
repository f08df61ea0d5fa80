"""What workers counted within the last minutes, from the meters in their beats.

Knows nothing from before its own start: what a worker had counted when it was first heard is not counted here.
"""

import asyncio
from collections import deque
from functools import reduce
from typing import NamedTuple

from schemas.meter import Meter
from services.bus.beats import BeatTable
from services.bus.clock import elapsed_s, until_next_s

WINDOW_S = 300.0
RATE_WINDOW_S = 10.0
MARK_S = 1.0


class _Mark(NamedTuple):
    """`meters` by process, whose name no later process has: a meter never runs backwards."""

    at_s: float
    meters: dict[str, Meter]


class Meters:
    def __init__(self, beats: BeatTable) -> None:
        self._beats = beats
        self._marks: deque[_Mark] = deque()

    async def run(self) -> None:
        """Marks where the meters stand, once a second, until cancelled."""
        while True:
            self.mark()
            await asyncio.sleep(until_next_s(MARK_S))

    def mark(self) -> None:
        mark = self._now()
        self._marks.append(mark)
        while mark.at_s - self._marks[0].at_s > WINDOW_S:
            self._marks.popleft()

    def grown(self, window_s: float) -> tuple[Meter, float]:
        """What was counted within the last `window_s`, and how long that is where less is known."""
        now = self._now()
        within = [mark for mark in self._marks if now.at_s - mark.at_s <= window_s]
        if not within:
            return Meter(), 0.0
        first: dict[str, Meter] = {}
        for mark in within:
            for process, meter in mark.meters.items():
                first.setdefault(process, meter)
        grown = [meter.since(first[process]) for process, meter in now.meters.items() if process in first]
        return reduce(Meter.plus, grown, Meter()), now.at_s - within[0].at_s

    def _now(self) -> _Mark:
        return _Mark(elapsed_s(), {beat.process: beat.meter for beat, _ in self._beats.remembered()})
