"""Sequences and KV pages that a worker can still promise, handed out first come, first served.

Knows nothing of jobs. Nobody waits while holding a part of what he needs, so two waiters cannot block each other.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.engine.pages import PagePool

T = TypeVar("T")


class Room:
    def __init__(self, pool: PagePool, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self._pool = pool
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()
        self._on_wanted: Callable[[], None] | None = None
        # Pages may also come free by themselves, when a write to the store ends.
        pool.on_unreserved = self._admit

    def fits(self, num_sequences: int, num_pages: int) -> bool:
        """Whether so much could be had if nothing else ran."""
        return num_sequences <= self.max_sequences and num_pages <= self._pool.num_pages

    @property
    def is_overdrawn(self) -> bool:
        return self._pool.num_unreserved < 0

    async def enter(self, num_sequences: int, num_pages: int) -> "Permit":
        """Waits for its turn and for room. The caller closes the permit. Ask only for what `fits`."""
        assert self.fits(num_sequences, num_pages)
        if self._waiting or not self._take(num_sequences, num_pages):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_sequences, num_pages, turn))
            self._ask_for_room()
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._give_back(num_sequences, num_pages)  # its turn had just come
                self._admit()
                raise
        return Permit(self, num_sequences, num_pages)

    async def unless_wanted(self, work: Awaitable[T]) -> T | None:
        """What `work` gives; None, and `work` cancelled, once somebody waits for room.

        For whoever holds a permit only to wait for work: a running job that grows must not wait for him, who may
        wait for ever. One at a time.
        """
        try:
            async with asyncio.timeout(None) as patience:
                self._on_wanted = lambda: patience.reschedule(0.0)
                if self._waiting:
                    self._ask_for_room()
                return await work
        except TimeoutError:
            return None
        finally:
            self._on_wanted = None

    def call_off(self) -> None:
        """Ends the work under way in `unless_wanted`, as if somebody waited for room."""
        self._ask_for_room()

    def _ask_for_room(self) -> None:
        on_wanted, self._on_wanted = self._on_wanted, None
        if on_wanted is not None:
            on_wanted()

    def _take(self, num_sequences: int, num_pages: int) -> bool:
        if self.num_sequences + num_sequences > self.max_sequences or not self._pool.reserve(num_pages):
            return False
        self.num_sequences += num_sequences
        return True

    def _give_back(self, num_sequences: int, num_pages: int) -> None:
        self.num_sequences -= num_sequences
        self._pool.unreserve(num_pages)  # admits whoever waits

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
        """Changes what is promised. To get more, all is given back first and the caller queues again.

        So it is for less while pages are promised twice (some that the caller released are still being stored):
        otherwise he could take more than there is.
        """
        old_sequences, old_pages = self._held
        if num_sequences <= old_sequences and num_pages <= old_pages and not self._room.is_overdrawn:
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
