"""What a worker's metrics show beside its events: jobs that wait for it, room in use, damage that the store found."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.store import KVStore
from kvstore.tier import Tier
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
    stores = [StoreGauges(store) for store in (runtime.store, *runtime.other_stores)]
    while True:
        for store in stores:
            store.tell()
        with contextlib.suppress(BusUnavailable, Refused):
            for source in sources:
                depths[source] = await num_waiting(bus, source)
        await asyncio.sleep(LOOK_S)


def _is_open(tier: Tier, way: str) -> float:
    return 0.0 if getattr(tier, way, True) else 1.0


class StoreGauges:
    """Which tiers are left alone, and what the store's counters have grown by since `tell` was called last."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._before: dict[str, int] = {}
        for tier in store.tiers:
            for way, attribute in (("read", "is_read"), ("write", "is_written")):
                telemetry.tier_open.watch(partial(_is_open, tier, attribute), tier=tier.name, way=way)

    def tell(self) -> None:
        now = self._store.snapshot()
        grown = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        telemetry.damage.add(grown["damaged"])
        for tier in self._store.tiers:
            telemetry.skipped_reads.add(grown[f"{tier.name}_skipped_reads"], tier=tier.name)
            telemetry.skipped_writes.add(grown[f"{tier.name}_skipped_writes"], tier=tier.name)
