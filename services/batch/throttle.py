"""How many jobs of batches may be at work at once: what the decode workers have left beside everybody else."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from schemas.beat import BEAT_INTERVAL_S, Beat, ProcessRole, left_to_batches
from services.bus.beats import BeatTable


class Throttle:
    """Shared by the batches of a process. A beat is up to a second old: what ran of ours then is remembered."""

    def __init__(self, beats: BeatTable, models: set[str]) -> None:
        self._beats = beats
        self._models = models
        self._num_ours = 0
        self._were_ours: deque[int] = deque([0, 0], maxlen=3)
        self._num_others = 0
        self._freed = asyncio.Event()
        self._num_in_prefill = 0
        self._turned = asyncio.Event()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for room; without workers, for workers."""
        while self._num_ours >= self.allowed:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await self._freed.wait()
                    continue
            self._look()
        self._num_ours += 1
        try:
            yield
        finally:
            self._num_ours -= 1
            self._freed.set()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Held until a job's first token: a prefill worker has one of ours at a time, and others wait for that only."""
        while self._num_in_prefill >= max(1, len(self._workers("prefill"))):
            self._turned.clear()
            await self._turned.wait()
        self._num_in_prefill += 1
        try:
            yield
        finally:
            self._num_in_prefill -= 1
            self._turned.set()

    @property
    def allowed(self) -> int:
        capacity = sum(beat.capacity for beat in self._workers("decode"))
        return max(1, left_to_batches(capacity) - self._num_others) if capacity else 0

    def _look(self) -> None:
        """Once a beat."""
        running = sum(beat.running for beat in self._workers("decode"))
        self._were_ours.append(self._num_ours)
        self._num_others = max(0, running - max(self._were_ours))

    def _workers(self, role: ProcessRole) -> list[Beat]:
        return [
            beat for beat in self._beats.alive(role) if beat.model in self._models and beat.state in ("ok", "degraded")
        ]
