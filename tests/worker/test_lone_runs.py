"""Who is condemned: a job whose runs alone bring workers down. And who never is, however often it is delivered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from schemas.beat import Beat
from schemas.errors import BusUnavailable
from schemas.events import Done, Error, Event, Retry, Start
from schemas.subjects import Lane, Stage
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.delivery import run as run_delivery
from services.bus.history import read_all
from services.bus.queue import WorkQueue
from services.bus.server import NatsServer
from services.bus.streams import Source, ensure_consumers, ensure_streams
from services.worker import alibi as alibi_module
from services.worker import process as process_module
from services.worker.alibi import MAX_TOLD, Alibis, alibi
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.bus.polling import until
from tests.bus.throwaway import throwaway_server
from tests.worker.conftest import BUILD, SETTINGS, Work, Worker, done, start_of

NUM_DISTURBANCES = 5  # one makes a suspect, three runs alone would condemn it


class Disturbed:
    """A job that is disturbed some times before it makes an event, and ends well if it is let."""

    def __init__(self, disturb: Callable[[], None] | None = None) -> None:
        self.begun = asyncio.Event()
        self.num_runs = 0
        self._disturb = disturb

    async def __call__(self, run: JobRun, permit: Permit) -> None:
        self.num_runs += 1
        self.begun.set()
        if self.num_runs <= NUM_DISTURBANCES:
            if self._disturb is not None:
                self._disturb()
            await asyncio.Event().wait()
        run.put(start_of(run), done())


async def ended(bus: Bus, job: str) -> list[Event]:
    """All events of a job, once it has ended."""

    async def stored() -> list[Event]:
        return [event for message in await read_all(bus, "default", job) for event in message.events]

    async def has_ended() -> bool:
        return any(isinstance(event, Done | Error) for event in await stored())

    await until(has_ended)
    return await stored()


def attempts(events: list[Event]) -> list[int]:
    return [event.attempt for event in events if isinstance(event, Retry)]


@contextlib.asynccontextmanager
async def serving(server: NatsServer, name: str, model: str, work: Work) -> AsyncIterator[tuple[Worker, asyncio.Event]]:
    """One life of a worker, to whom every job is `work`. It leaves in order if the event was set, else it dies."""
    async with await Bus.connect(server.url, name, SETTINGS.bus) as bus:
        await ensure_streams(bus, model)
        await ensure_consumers(bus, model, BUILD)
        worker = Worker(bus, model)
        worker.role.works[model] = work
        await worker.beats.start()
        stop = asyncio.Event()
        publisher = BeatPublisher(bus, worker.process.beat)
        await publisher.start()
        life = asyncio.create_task(worker.process.serve(stop, publisher.beat))
        try:
            yield worker, stop
        finally:
            if stop.is_set():
                await life
                await publisher.close()
            elif publisher._task is not None:
                publisher._task.cancel()
            tasks = [life, *worker.process._jobs]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.beats.close()


async def test_a_job_that_was_given_back_often_runs_alone_once(server: NatsServer, bus: Bus) -> None:
    """A nak counts as a delivery: that makes a suspect of it, innocently, and no more."""
    source = Source(Stage.PREFILL, Lane.INTERACTIVE, "given-back", BUILD)
    await ensure_streams(bus, source.model)
    await ensure_consumers(bus, source.model, BUILD)
    await Worker(bus, source.model).submit(source.model)
    for _ in range(NUM_DISTURBANCES):
        queue = WorkQueue(bus, [source])
        queue._buffer.append(await queue.next())  # came too late for whoever asked
        await queue.close()
    work = Disturbed()
    work.num_runs = NUM_DISTURBANCES
    async with serving(server, "patient", source.model, work) as (_, stop):
        events = await ended(bus, source.model)
        stop.set()
    assert [type(event) for event in events] == [Retry, Start, Done]


def unavailable() -> None:
    raise BusUnavailable("NATS did not answer in time")


async def test_a_bus_that_does_not_answer_condemns_nobody(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "run_delivery", partial(run_delivery, redeliver_delay_s=0.01))
    work = Disturbed(unavailable)
    await worker.submit("unanswered", work)
    events = await ended(worker.bus, "unanswered")
    assert isinstance(events[-1], Done) and work.num_runs == NUM_DISTURBANCES + 1
    assert attempts(events) == [1] * NUM_DISTURBANCES


async def test_a_job_that_stops_the_steps_of_its_worker_is_condemned(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim lapses then, as if the bus had been away."""
    monkeypatch.setattr(process_module, "run_delivery", partial(run_delivery, redeliver_delay_s=0.01))
    monkeypatch.setattr(worker.role.batch.progress, "stands_still", lambda: True)
    await worker.submit("hangs", Disturbed(unavailable))
    events = await ended(worker.bus, "hangs")
    assert isinstance(events[-1], Error) and events[-1].code == "poisoned"


async def test_broker_restarts_condemn_nobody(tmp_path: Path) -> None:
    work = Disturbed()
    with throwaway_server(tmp_path, settings=SETTINGS.bus) as server:
        async with serving(server, "w", "m", work) as (worker, stop):
            await worker.submit("m")
            for _ in range(NUM_DISTURBANCES):
                async with asyncio.timeout(20):
                    await work.begun.wait()
                work.begun.clear()
                down, claim_s = asyncio.Event(), SETTINGS.bus.ack_wait_s
                forget = worker.bus.on_connection(down=down.set)
                server.kill()
                await asyncio.wait_for(down.wait(), 20)
                forget()
                await asyncio.sleep(1.2 * claim_s)  # the claim does not live so long
                await asyncio.to_thread(server.start)
                await worker.bus.wait_connected(20)
            events = await ended(worker.bus, "m")
            stop.set()
    assert isinstance(events[-1], Done), events
    assert set(attempts(events)) == {1}


@pytest.mark.parametrize("leaves", [True, False], ids=["leave", "die"])
async def test_workers_that_die_condemn_and_those_that_leave_do_not(
    server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Each life of a worker gets the job, and ends before the job makes an event. None has heard of the one before."""
    monkeypatch.setattr(alibi_module, "PATIENCE_S", 0.05)
    job = model = f"lives-{leaves}".lower()
    await ensure_streams(bus, model)
    await Worker(bus, model).submit(job)
    work = Disturbed()
    ending = asyncio.create_task(ended(bus, job))
    for life in range(20):
        async with serving(server, f"{model}-{life}", model, work) as (_, stop):
            begun = asyncio.create_task(work.begun.wait())
            await asyncio.wait([begun, ending], return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            work.begun.clear()
            if leaves or ending.done():
                stop.set()
        if ending.done():
            break
    events = await ending
    if leaves:
        assert isinstance(events[-1], Done) and work.num_runs == NUM_DISTURBANCES + 1
        assert attempts(events)[:4] == [1, 0, 1, 0]
    else:
        assert isinstance(events[-1], Error) and events[-1].code == "poisoned"
        assert attempts(events) == [1, 2, 3] and work.num_runs == 4


async def test_what_a_worker_says_is_heard_by_the_others(
    server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alibi_module, "PATIENCE_S", 20.0)
    async with await Bus.connect(server.url, "them", SETTINGS.bus) as theirs:
        beats = BeatTable(bus)
        await beats.start()
        us, them = Alibis("us", beats), Alibis("them", BeatTable(theirs))
        innocent, guilty = alibi("t", "j", "prefill.0.3"), alibi("t", "j", "prefill.0.4")
        them.give(innocent)
        publisher = BeatPublisher(theirs, lambda: Beat(process="them", role="prefill", state="ok", alibis=them.told))
        await publisher.start()
        assert await us.has(innocent, "them")
        assert not await us.has(guilty, "them"), "it lives, and says nothing of that one"
        them.give(guilty)
        assert await us.has(guilty, "them"), "its next beat was waited for"
        await publisher.close()
        assert await us.has(innocent, "them"), "what it said before it left stays said"
        monkeypatch.setattr(alibi_module, "PATIENCE_S", 0.05)
        assert not await us.has(innocent, "nobody")
        assert not await us.has(innocent, "us")
        us.give(innocent)
        assert await us.has(innocent, "us")
        await beats.close()


def test_the_latest_alibis_are_told() -> None:
    alibis = Alibis("us", None)  # type: ignore[arg-type]
    for number in range(MAX_TOLD + 1):
        alibis.give(str(number))
    assert alibis.told == [str(number) for number in range(1, MAX_TOLD + 1)]
