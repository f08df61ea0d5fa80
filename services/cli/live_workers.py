"""The workers that beat on a NATS now."""

import contextlib
from collections.abc import AsyncIterator

from schemas.beat import BEAT_INTERVAL_S, WORKER_ROLES, Beat
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.config import Bus as BusSettings

LISTEN_S = 1.5 * BEAT_INTERVAL_S


@contextlib.asynccontextmanager
async def listening(url: str, settings: BusSettings) -> AsyncIterator[tuple[Bus, BeatTable]]:
    """A connection, and a table that has heard everybody. Raises `SetupError` if no NATS answers."""
    async with await Bus.connect(url, "kvrelay-cli", settings) as bus:
        beats = BeatTable(bus)
        await beats.start()
        try:
            await beats.wait_for(lambda table: table.listening_s >= LISTEN_S)
            yield bus, beats
        finally:
            await beats.close()


def workers(beats: BeatTable) -> list[Beat]:
    """All workers, by model, role and name."""
    live = [beat for beat in beats.alive() if beat.role in WORKER_ROLES]
    return sorted(live, key=lambda beat: (beat.model, beat.role, beat.process))
