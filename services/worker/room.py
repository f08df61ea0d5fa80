"""Sequences and KV pages that a worker can still promise, handed out first come, first served.

Knows nothing of jobs. Nobody waits while holding a part of what he needs, so two waiters cannot block each other.
"""

import asyncio
from collections import deque

from services.engine.pages import PagePool


class Room:
    def __init__(self, pool: PagePool, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self._pool = pool
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    def fits(self, num_sequences: int, num_pages: int) -> bool:
        """Whether so much could be had if nothing else ran."""
        return num_sequences <= self.max_sequences and num_pages <= self._pool.num_pages

    async def enter(self, num_sequences: int, num_pages: int) -> "Permit":
        """Waits for its turn and for room. The caller closes the permit. Ask only for what `fits`."""
        assert self.fits(num_sequences, num_pages)
        if self._waiting or not self._take(num_sequences, num_pages):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_sequences, num_pages, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._give_back(num_sequences, num_pages)  # its turn had just come
                self._admit()
                raise
        return Permit(self, num_sequences, num_pages)

    def _take(self, num_sequences: int, num_pages: int) -> bool:
        if self.num_sequences + num_sequences > self.max_sequences or not self._pool.reserve(num_pages):
            return False
        self.num_sequences += num_sequences
        return True

    def _give_back(self, num_sequences: int, num_pages: int) -> None:
        self.num_sequences -= num_sequences
        self._pool.unreserve(num_pages)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_sequences, num_pages, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._take(num_sequences, num_pages):
                    return
                turn.set_result(None)
            self._waiting.popleft()


class Permit:
    def __init__(self, room: Room, num_sequences: int, num_pages: int) -> None:
        self._room = room
        self._held = (num_sequences, num_pages)

    async def resize(self, num_sequences: int, num_pages: int) -> None:
        """Changes what is promised. To get more, all is given back first and the caller queues again."""
        old_sequences, old_pages = self._held
        if num_sequences <= old_sequences and num_pages <= old_pages:
            self._held = (num_sequences, num_pages)
            self._room._give_back(old_sequences - num_sequences, old_pages - num_pages)
            return
        self.close()
        await self._room.enter(num_sequences, num_pages)
        self._held = (num_sequences, num_pages)

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        held, self._held = self._held, (0, 0)
        if held != (0, 0):
            self._room._give_back(*held)
