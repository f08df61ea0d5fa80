"""What a worker's metrics show beside its events: jobs that wait for it, room in use, damage that the store found."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from schemas.errors import BusUnavailable
from services import telemetry
from services.bus.connection import Bus
from services.bus.depth import num_waiting
from services.bus.jetstream import Refused
from services.bus.streams import Source
from services.worker.runtime import Runtime

LOOK_S = 15.0  # as often as metrics are usually scraped


async def keep_fresh(bus: Bus, sources: Sequence[Source], runtime: Runtime, num_running: Callable[[], int]) -> None:
    """Until cancelled."""
    depths = dict.fromkeys(sources, 0)
    for source in sources:
        telemetry.queue_depth.watch(partial(depths.__getitem__, source), stage=source.stage, lane=source.lane)
    telemetry.running.watch(num_running)
    telemetry.pages_used.watch(lambda: runtime.pool.num_held)
    num_damaged = 0
    while True:
        before, num_damaged = num_damaged, runtime.store.counters.damaged
        telemetry.damage.add(num_damaged - before)
        with contextlib.suppress(BusUnavailable, Refused):
            for source in sources:
                depths[source] = await num_waiting(bus, source)
        await asyncio.sleep(LOOK_S)
