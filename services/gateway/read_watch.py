"""How long a client may take to say what it wants: else a few that send a byte now and then could hold a gateway up."""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

Owed = Literal["", "head", "body"]


class Clock(Protocol):
    """What an event loop is to us."""

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


class ReadWatch:
    """Of one connection. `owed` says what of a request is still to come, `is_paused` whether we do not read now;
    `on_late` is told once it is late.

    A head must be whole in time. A body may take as long as it likes, without a pause; one that nobody reads here is
    not late.
    """

    def __init__(
        self,
        timeout_s: float,
        owed: Callable[[], Owed],
        is_paused: Callable[[], bool],
        on_late: Callable[[Owed], None],
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._owed = owed
        self._is_paused = is_paused
        self._on_late = on_late
        self._since_s = 0.0  # the head that is waited for began, or the last part of the body came
        self._waits_for: Owed = ""
        self._handle: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """Bytes came."""
        owed = self._owed()
        if owed != self._waits_for or owed == "body":
            self._waits_for, self._since_s = owed, self._clock.time()
        if owed and self._handle is None:
            self._handle = self._clock.call_later(self._timeout_s, self._look)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        self._handle = None
        owed = self._owed()
        if not owed:
            self._waits_for = ""
            return
        if self._is_paused() or owed != self._waits_for:
            self._waits_for, self._since_s = owed, self._clock.time()
        left_s = self._since_s + self._timeout_s - self._clock.time()
        if left_s > 0:
            self._handle = self._clock.call_later(left_s, self._look)
        else:
            self._on_late(owed)
