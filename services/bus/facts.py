"""What a connection knows of its streams, and how it keeps the broker's time."""

import asyncio
import contextlib

from schemas.errors import BusUnavailable
from schemas.subjects import REPLIES_STREAM
from services.bus.clock import parse_timestamp
from services.bus.connection import Bus
from services.bus.jetstream import Refused, call

CLOCK_REFRESH_S = 60.0


class StreamFacts:
    """What a connection remembers about streams: when they were created, and whether replies are replicated.

    Keeps the bus's clock in step as well, because STREAM.INFO is what shows the broker's time.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._created_ms: dict[str, int] = {}
        self._replicated: bool | None = None
        self._refresh = asyncio.create_task(self._keep_clock(), name="broker clock")

    async def close(self) -> None:
        self._refresh.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._refresh

    async def created_ms(self, stream: str) -> int:
        """Creation time of a stream, unix milliseconds. Raises `Refused` if it does not exist."""
        if stream not in self._created_ms:
            info = await call(self._bus, f"STREAM.INFO.{stream}")
            self._created_ms[stream] = int(parse_timestamp(info["created"]) * 1000)
        return self._created_ms[stream]

    def forget(self, stream: str) -> None:
        """For a stream that was removed: one of the same name is another one."""
        self._created_ms.pop(stream, None)

    async def replies_replicated(self) -> bool:
        """True if a direct get may be answered by a replica that lags behind."""
        if self._replicated is None:
            info = await call(self._bus, f"STREAM.INFO.{REPLIES_STREAM}")
            self._replicated = info["config"]["num_replicas"] > 1
        return self._replicated

    async def _keep_clock(self) -> None:
        while True:
            with contextlib.suppress(BusUnavailable, Refused):
                await call(self._bus, f"STREAM.INFO.{REPLIES_STREAM}")
            await asyncio.sleep(CLOCK_REFRESH_S)
