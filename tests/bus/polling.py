"""Waiting for the state of the broker, which sends no event when it changes."""

import asyncio
from collections.abc import Awaitable, Callable

from services.bus.connection import Bus
from services.bus.server import NatsServer

TIMEOUT_S = 10.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once `condition` holds; fails after `TIMEOUT_S`."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def restart(server: NatsServer, *buses: Bus) -> None:
    """Kills the broker, starts it again, and returns once each of `buses` has noticed and is connected."""
    back = [asyncio.Event() for _ in buses]
    forgets = [bus.on_connection(up=event.set) for bus, event in zip(buses, back, strict=True)]
    server.kill()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(TIMEOUT_S):
        for event in back:
            await event.wait()
    for forget in forgets:
        forget()
