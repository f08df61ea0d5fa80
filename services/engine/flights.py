"""Blocks on their way from the store into pages: sequences that want the same block share one read.

Belongs to the event loop's thread, except for the reads that it is given.
"""

import asyncio
from collections.abc import Callable

from kvstore.keys import BlockRef
from services.engine.interest import Interest
from services.engine.pages import PagePool

Load = Callable[[Interest, BlockRef, int], "asyncio.Future[bool]"]


class Flight:
    """One read, into a page that it holds until the last who wanted it has left."""

    def __init__(self, ref: BlockRef, page: int, load: Load) -> None:
        self.ref = ref
        self.page: int | None = page
        self.interest = Interest()
        self.num_waiting = 0
        self.loaded = load(self.interest, ref, page)

    @property
    def is_good(self) -> bool:
        """It has arrived, and is what it should be."""
        future = self.loaded
        return future.done() and not future.cancelled() and future.exception() is None and future.result()


class Flights:
    def __init__(self, pool: PagePool, load: Load) -> None:
        """`load(interest, ref, page)` begins to read."""
        self._pool = pool
        self._load = load
        self._shared: dict[bytes, Flight] = {}

    def join(self, ref: BlockRef) -> Flight:
        """Begins to read the block, unless somebody has begun. Who joins leaves, once.

        A partial block is read for each: its page is written to by who has it.
        """
        flight = self._shared.get(ref.key)
        if flight is None or flight.ref != ref:
            flight = Flight(ref, self._pool.take(), self._load)
            if ref.num_tokens == self._pool.block_tokens:
                self._shared[ref.key] = flight
        flight.num_waiting += 1
        return flight

    def claim(self, flight: Flight) -> int | None:
        """The page with the block and a reference of one's own, if it has arrived."""
        if not flight.is_good or flight.page is None:
            return None
        if flight.ref.num_tokens == self._pool.block_tokens:
            self._pool.name(flight.page, flight.ref)
            if shared := self._pool.merge([flight.ref]):
                return shared[0]
        page, flight.page = flight.page, None  # a partial block, or other tokens are resident under its key
        return page

    def leave(self, flight: Flight) -> None:
        flight.num_waiting -= 1
        if flight.num_waiting:
            return
        if self._shared.get(flight.ref.key) is flight:
            del self._shared[flight.ref.key]
        flight.interest.lose()
        if flight.page is not None:
            self._pool.release([flight.page])
