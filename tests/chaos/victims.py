"""Finds the worker that holds a job and stops it at a token, as exactly as signals go."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from schemas.events import Event, Token
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.watch import watch
from tests.chaos.up import Up

STORED_TIMEOUT_S = 10.0


class Seen(NamedTuple):
    """An event, and when its reader had it."""

    event: Event
    at_s: float


async def seen(bus: Bus, job: str) -> AsyncIterator[Seen]:
    async for event in watch(bus, "default", job):
        yield Seen(event, elapsed_s())


def is_token(event: Event, index: int) -> bool:
    """Of the first choice."""
    return isinstance(event, Token) and (event.choice, event.index) == (0, index)


class Suspects:
    """Workers of which one will hold the next job: whoever computes most from now on."""

    def __init__(self, up: Up, names: Sequence[str]) -> None:
        self.pids = {name: up.pid(name) for name in names}
        self._before = {name: _computed_ns(pid) for name, pid in self.pids.items()}

    def stop(self) -> str:
        """SIGSTOP to all; the name of the one that holds the job. All others go on."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGSTOP)
        holder = max(self.pids, key=lambda name: _computed_ns(self.pids[name]) - self._before[name])
        for name, pid in self.pids.items():
            if name != holder:
                os.kill(pid, signal.SIGCONT)
        return holder


def _computed_ns(pid: int) -> int:
    """Time on a core of all threads."""
    return sum(
        int(path.read_text(encoding="ascii").split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


async def last_index(bus: Bus, job: str, heard: int) -> int:
    """Of the first choice's last token in the stream, once that which was `heard` lies there: a moment later."""
    async with asyncio.timeout(STORED_TIMEOUT_S):
        while True:
            stored = [event for message in await read_all(bus, "default", job) for event in message.events]
            indices = [event.index for event in stored if isinstance(event, Token) and event.choice == 0]
            last = max(indices, default=-1)
            if last >= heard:
                return last
            await asyncio.sleep(0)
