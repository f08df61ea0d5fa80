import asyncio

import pytest

from schemas.beat import OWNER_SILENT_AFTER_S, SILENT_AFTER_S, Beat, ProcessRole, ProcessState
from schemas.errors import Cancelled
from schemas.events import Error
from services.bus import beats as beats_module
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.cancels import CancelListener, cancel_job
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from tests.bus.conftest import MakeBus


class Clock:
    def __init__(self) -> None:
        self._real = beats_module.elapsed_s
        self.jump = 0.0

    def __call__(self) -> float:
        return self._real() + self.jump


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(beats_module, "elapsed_s", fake)
    return fake


@pytest.fixture
async def table(bus: Bus):
    table = BeatTable(bus)
    await table.start()
    yield table
    await table.close()


class Worker:
    """A process that beats when the test says so."""

    def __init__(
        self, bus: Bus, process: str, model: str = "m", build: str = "b", role: ProcessRole = "decode"
    ) -> None:
        self.process = process
        self.state: ProcessState = "warming"
        self._model, self._build, self._role = model, build, role
        self.publisher = BeatPublisher(bus, self._beat)

    def _beat(self) -> Beat:
        return Beat(process=self.process, role=self._role, state=self.state, model=self._model, build=self._build)


async def heard(table: BeatTable, *workers: Worker) -> None:
    for worker in workers:
        await worker.publisher.beat()
    assert await table.wait_for(
        lambda t: all((b := t.get(w.process)) and b.state == w.state for w in workers), timeout_s=10
    )


async def test_who_is_alive_by_role_model_and_build(bus: Bus, table: BeatTable) -> None:
    a, b = Worker(bus, "a"), Worker(bus, "b", build="other")
    await heard(table, a, b)
    assert {beat.process for beat in table.alive(role="decode", model="m")} == {"a", "b"}
    assert [beat.process for beat in table.alive(build="other")] == ["b"]
    assert table.alive(role="prefill") == []
    assert table.alive(model="n") == []


async def test_a_worker_for_both_stages_does_the_work_of_either(bus: Bus, table: BeatTable) -> None:
    both = Worker(bus, "both", role="both")
    await heard(table, both)
    for role in ("prefill", "decode", "both"):
        alive = [beat.process for beat in table.alive(role=role)]  # type: ignore[arg-type]
        assert alive == ([] if role == "both" else ["both"])
    assert table.alive(role="gateway") == []
    assert table.build_silent_s("m", "b") < SILENT_AFTER_S


async def test_waiting_for_a_worker_that_takes_work(bus: Bus, table: BeatTable) -> None:
    worker = Worker(bus, "w")
    waiting = asyncio.create_task(table.wait_for_worker("decode", "m"))
    await heard(table, worker)
    assert not waiting.done()
    worker.state = "ok"
    await worker.publisher.start()
    async with asyncio.timeout(10):
        assert (await waiting).process == "w"
    worker.state = "stopped"
    await worker.publisher.close()
    assert await table.wait_for(lambda t: not t.alive(), timeout_s=10)
    assert not table.owner_silent("w", OWNER_SILENT_AFTER_S), "its readers may still come back elsewhere"


async def test_our_own_pause_is_nobodys_silence(bus: Bus, table: BeatTable, clock: Clock) -> None:
    worker = Worker(bus, "w")
    await heard(table, worker)
    clock.jump += 10 * OWNER_SILENT_AFTER_S  # this process was stopped meanwhile
    assert table.alive()
    assert not table.owner_silent("w", OWNER_SILENT_AFTER_S)
    assert not table.owner_silent("never-heard", OWNER_SILENT_AFTER_S)
    assert table.build_silent_s("m", "b") < SILENT_AFTER_S


async def test_who_falls_silent_is_dead(bus: Bus, table: BeatTable, clock: Clock) -> None:
    dead, living = Worker(bus, "dead"), Worker(bus, "living", build="other")
    await heard(table, dead, living)
    for _ in range(8):
        clock.jump += 1.5
        table._ticked_s += 1.5  # time in which this process ran
        living.state = "degraded" if living.state == "ok" else "ok"
        await heard(table, living)
    assert [beat.process for beat in table.alive()] == ["living"]
    assert table.owner_silent("dead", OWNER_SILENT_AFTER_S)
    assert table.owner_silent("never-heard", OWNER_SILENT_AFTER_S)
    assert not table.owner_silent("living", OWNER_SILENT_AFTER_S)
    assert table.build_silent_s("m", "b") > 10
    assert table.build_silent_s("m", "other") < 3


async def test_time_without_a_connection_is_nobodys_silence(own_server: NatsServer, make_bus: MakeBus) -> None:
    bus = await make_bus(own_server.url)
    table = BeatTable(bus)
    await table.start()
    before = table._now_s()
    await heard(table, Worker(bus, "w"))
    down = asyncio.Event()
    bus.on_connection(down=down.set)
    own_server.kill()
    async with asyncio.timeout(10):
        await down.wait()
    table._ticked_s -= 100  # as if a tick were due after long
    deaf = table._deaf_s
    assert await table.wait_for(lambda t: t._deaf_s > deaf, timeout_s=10)
    assert table._now_s() - before < 50
    assert table.alive()
    await table.close()


async def test_a_beat_that_cannot_be_read_is_skipped(bus: Bus, table: BeatTable) -> None:
    await bus.publish("kvrelay.beat.odd", b"not json")
    await heard(table, Worker(bus, "a"))
    assert table.get("odd") is None


async def test_cancel_writes_the_end_and_tells_the_worker(bus: Bus, job: str) -> None:
    await ensure_streams(bus, "cancels")
    cancelled: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = CancelListener(bus, lambda *who: cancelled.put_nowait(who))
    await listener.start()
    error = Cancelled("by the caller")
    assert await cancel_job(bus, "acme", job, error)
    assert not await cancel_job(bus, "acme", job, error)
    async with asyncio.timeout(10):
        assert [await cancelled.get() for _ in range(2)] == [("acme", job)] * 2
    messages = await read_all(bus, "acme", job)
    assert [message.events for message in messages] == [[Error.of(error)]]
    await listener.close()
