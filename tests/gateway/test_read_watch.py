"""When a request counts as late, by a clock that the test moves."""

import asyncio
from collections.abc import Callable

from services.gateway.read_watch import Owed, ReadWatch


class Hands:
    """A clock whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle:
        self._due.append((self.now_s + delay, callback))
        return asyncio.TimerHandle(self.now_s + delay, callback, (), asyncio.get_event_loop())

    def turn(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._due and min(self._due)[0] <= until_s:
            self._due.sort(key=lambda due: due[0])
            self.now_s, callback = self._due.pop(0)
            callback()
        self.now_s = until_s


class Client:
    def __init__(self) -> None:
        self.clock = Hands()
        self.owed: Owed = ""
        self.is_paused = False
        self.late: list[Owed] = []
        self.watch = ReadWatch(10.0, lambda: self.owed, lambda: self.is_paused, self.late.append, self.clock)

    def says(self, owed: Owed) -> None:
        """Bytes come, after which this is owed."""
        self.owed = owed
        self.watch.heard()


async def test_a_head_has_a_time_for_all_of_it() -> None:
    client = Client()
    for _ in range(9):
        client.says("head")
        client.clock.turn(1.0)
    assert client.late == []
    client.says("head")
    client.clock.turn(1.0)
    assert client.late == ["head"]


async def test_a_body_has_that_time_for_each_pause() -> None:
    client = Client()
    for _ in range(9):
        client.says("body")
        client.clock.turn(9.0)
    assert client.late == []
    client.clock.turn(1.0)
    assert client.late == ["body"]


async def test_a_body_does_not_inherit_what_its_head_took() -> None:
    client = Client()
    client.says("head")
    client.clock.turn(9.0)
    client.says("body")
    client.clock.turn(9.0)
    assert client.late == []


async def test_a_whole_request_is_never_late_and_the_next_begins_anew() -> None:
    client = Client()
    client.says("head")
    client.clock.turn(9.0)
    client.says("")
    client.clock.turn(100.0)
    client.says("head")
    client.clock.turn(9.0)
    assert client.late == []


async def test_what_we_do_not_read_is_not_late() -> None:
    client = Client()
    client.says("body")
    client.is_paused = True
    client.clock.turn(95.0)
    client.is_paused = False
    client.clock.turn(4.0)
    assert client.late == []
    client.clock.turn(10.0)
    assert client.late == ["body"]
