"""Where the events of one request's jobs arrive, in order, beside what ends the waiting for them."""

import asyncio
from collections.abc import Callable

from schemas.errors import Cancelled, KvrelayError
from schemas.events import Event

AtOnce = Callable[[int, list[Event]], bool]
"""Takes the events of a job that just came, or says that it cannot."""

MAX_WAITING = 256  # events; a job whose client reads slowly then waits, and its events stay on the bus


class ClientGone(Cancelled):
    """The client closed its connection, or stopped reading."""


class Ended(KvrelayError):
    """The job itself has ended with `error`: no reader will ever get more of it."""

    def __init__(self, error: KvrelayError) -> None:
        super().__init__(error.message, param=error.param)
        self.error = error


class Inbox:
    """Filled by one task a job, emptied by the request's handler."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Event]] = []
        self._stop: KvrelayError | None = None
        self.has_stalled = False  # the client is there, but has stopped reading
        self.at_once: AtOnce | None = None  # of a handler that can do without being woken; asked while it waits
        self._is_nudged = False
        self._reading: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, prompt: int, event: Event) -> None:
        """An event of job number `prompt`. Waits for room."""
        await self._room.wait()
        self._add(prompt, event)

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    def take(self, prompt: int, events: list[Event]) -> None:
        """As `put`, for who has seen that there is room."""
        is_idle = self._reading is not None and not self._reading.done()
        if is_idle and self.at_once is not None and self.at_once(prompt, events):
            return
        for event in events:
            self._add(prompt, event)

    def _add(self, prompt: int, event: Event) -> None:
        self._waiting.append((prompt, event))
        self._wake()
        if len(self._waiting) >= MAX_WAITING:
            self._room.clear()

    def nudge(self) -> None:
        """Lets `get` return without anything once nothing waits."""
        self._is_nudged = True
        self._wake()

    def stop(self, error: KvrelayError) -> None:
        """Nothing more will come: `get` raises `error` after what has arrived. The first call counts."""
        self._stop = self._stop or error
        self._wake()
        self._room.set()

    def leave(self, has_stalled: bool) -> None:
        """The client is gone: what has arrived for it does not matter any more."""
        self.has_stalled = has_stalled
        self._waiting.clear()
        self.stop(ClientGone("the client went away"))

    async def get(self) -> list[tuple[int, Event]]:
        """All that waits: the events of a step arrive together; none after a nudge. Raises what `stop` was given."""
        while not self._waiting:
            if self._stop is not None:
                raise self._stop
            if self._is_nudged:
                self._is_nudged = False
                return []
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        self._room.set()
        arrived, self._waiting = self._waiting, []
        return arrived

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
