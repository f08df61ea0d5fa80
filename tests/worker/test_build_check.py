"""Two builds of a model serve side by side only when that is meant."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.beat import Beat, ProcessState
from schemas.errors import SetupError
from schemas.subjects import beat_subject
from schemas.wire import encode
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.worker import build_check
from services.worker.build_check import wait_for_place

OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"  # OLD goes first of two that start together


def beat(process: str, build: str, state: ProcessState = "ok", model: str = "m") -> Beat:
    return Beat(process=process, role="decode", state=state, model=model, build=build, host="h")


class Newcomer:
    """A worker that starts: on the air as `warming`, then at the check."""

    def __init__(self, bus: Bus, build: str, process: str = "newcomer") -> None:
        self._own = beat(process, build, "warming")
        self._table = BeatTable(bus)
        self._publisher = BeatPublisher(bus, lambda: self._own)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> "Newcomer":
        await self._table.start()
        await self._publisher.start()
        return self

    async def check(self) -> None:
        """Raises as the check does; serves when it is over."""
        async with asyncio.timeout(20):
            await wait_for_place(self._table, self._own)
        await self.becomes("ok")

    async def becomes(self, state: ProcessState) -> None:
        self._own = beat(self._own.process, self._own.build, state)
        await self._publisher.beat()

    async def close(self) -> None:
        await self._publisher.close()
        await self._table.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_check, "LISTEN_S", 0.2)
    monkeypatch.setattr("services.bus.beats.BEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr("services.bus.beats.SILENT_AFTER_S", 0.5)
    monkeypatch.setattr(build_check, "CONFIRM_S", 1.0)


@pytest.fixture
async def newcomers(bus: Bus) -> AsyncIterator[list[Newcomer]]:
    made: list[Newcomer] = []
    yield made
    for one in made:
        await one.close()


async def test_nobody_else_or_the_same_build_is_no_obstacle(bus: Bus, newcomers: list[Newcomer]) -> None:
    for process in ("first", "second"):
        newcomers.append(await Newcomer(bus, NEW, process).start())
        await newcomers[-1].check()


async def test_another_build_that_serves_is_named(bus: Bus, newcomers: list[Newcomer]) -> None:
    newcomers.append(await Newcomer(bus, OLD, "server").start())
    await newcomers[0].check()
    newcomers.append(await Newcomer(bus, NEW).start())
    with pytest.raises(SetupError) as refused:
        await newcomers[1].check()
    for word in (OLD, NEW, "server on h", "newcomer", "--rolling"):
        assert word in refused.value.message


async def test_a_change_that_is_under_way_goes_on(bus: Bus, newcomers: list[Newcomer]) -> None:
    """Once a worker of each build serves (told `--rolling`), each may be started again."""
    for build in (OLD, NEW):
        newcomers.append(await Newcomer(bus, build, f"server-{build}").start())
        await newcomers[-1].becomes("ok")
    for build in (OLD, NEW):
        newcomers.append(await Newcomer(bus, build, f"again-{build}").start())
        await newcomers[-1].check()


@pytest.mark.parametrize("state", ["draining", "stopped"])
async def test_who_leaves_is_no_obstacle(bus: Bus, newcomers: list[Newcomer], state: ProcessState) -> None:
    newcomers.append(await Newcomer(bus, OLD, "server").start())
    await newcomers[0].becomes(state)
    newcomers.append(await Newcomer(bus, NEW).start())
    await newcomers[1].check()


async def test_the_beats_of_the_dead_and_of_other_models_count_for_nothing(bus: Bus, newcomers: list[Newcomer]) -> None:
    newcomers.append(await Newcomer(bus, NEW).start())
    for gone in (beat("died-just-now", OLD), beat("other", OLD, model="n")):
        await bus.publish(beat_subject(gone.process), encode(gone))
    other = BeatPublisher(bus, lambda: beat("other", OLD, model="n"))
    await other.start()
    await newcomers[0].check()
    await other.close()


async def test_of_two_that_start_together_one_goes_on(bus: Bus, newcomers: list[Newcomer]) -> None:
    newcomers += [await Newcomer(bus, OLD, "first").start(), await Newcomer(bus, NEW, "second").start()]
    results = await asyncio.gather(*(one.check() for one in newcomers), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], SetupError)


async def test_who_waited_for_one_that_never_came_goes_on(bus: Bus, newcomers: list[Newcomer]) -> None:
    newcomers += [await Newcomer(bus, OLD, "first").start(), await Newcomer(bus, NEW, "second").start()]
    checking = asyncio.create_task(newcomers[1].check())
    await newcomers[1]._table.wait_for(lambda table: len(table.alive()) == 2)
    await newcomers[0].becomes("stopped")
    await checking
