"""One worker on a real broker: who runs alone, who is given up, who may end what, and who waits for room."""

import asyncio
from functools import partial

import pytest

from schemas.errors import BusUnavailable, Cancelled, InvalidRequest
from schemas.events import Done, Error, Event, Retry, Start
from schemas.subjects import DEAD_STREAM, Stage, stream_name
from services.bus.chain import fail_job
from services.bus.connection import Bus
from services.bus.delivery import run as run_delivery
from services.bus.history import read_all
from services.bus.jetstream import call
from services.bus.reader import follow
from services.worker import process as process_module
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.bus.polling import until
from tests.worker.conftest import MAX_SEQUENCES, Worker, done, start_of


async def events_of(bus: Bus, job: str) -> list[Event]:
    return [event async for event in follow(bus, "default", job, 30.0)]


async def num_stored(bus: Bus, stream: str) -> int:
    return int((await call(bus, f"STREAM.INFO.{stream}"))["state"]["messages"])


async def queue_is_empty(worker: Worker) -> bool:
    return await num_stored(worker.bus, stream_name(Stage.PREFILL, worker.model)) == 0


async def finish(run: JobRun, permit: Permit) -> None:
    run.put(start_of(run), done())


async def test_a_job_that_always_fails_is_poisoned_and_its_mate_is_not(worker: Worker, bus: Bus):
    together = asyncio.Event()
    running = 0
    mates: list[int] = []  # how many ran beside the bad one, run by run

    async def fail(run: JobRun, permit: Permit) -> None:
        mates.append(running)
        if not mates[1:]:
            await together.wait()
        raise RuntimeError("a bug that this job finds")

    async def mate(run: JobRun, permit: Permit) -> None:
        nonlocal running
        running += 1
        run.put(start_of(run))
        together.set()
        await run.settled()
        run.put(done())
        running -= 1

    dead = await num_stored(bus, DEAD_STREAM)
    await worker.submit("bad", fail)
    await worker.submit("mate", mate)
    assert isinstance((await events_of(bus, "mate"))[-1], Done)
    *retries, end = await events_of(bus, "bad")
    assert [event.attempt for event in retries if isinstance(event, Retry)] == [1, 2, 3] and len(retries) == 3
    assert isinstance(end, Error) and end.code == "poisoned"
    assert len(mates) == 4 and mates[1:] == [0, 0, 0], "once with others, three times alone"
    await until(lambda: queue_is_empty(worker))
    assert await num_stored(bus, DEAD_STREAM) == dead + 1


async def test_nothing_follows_the_end_that_somebody_else_wrote(worker: Worker, bus: Bus):
    """The job was cancelled, its worker died before it knew: the next delivery finds an end and only settles."""

    async def die(run: JobRun, permit: Permit) -> None:
        await fail_job(bus, "default", run.job, Cancelled("the client left"))
        raise RuntimeError("the worker dies")

    await worker.submit("ended", die)
    await until(lambda: queue_is_empty(worker))
    stored = await read_all(bus, "default", "ended")
    assert [type(event) for message in stored for event in message.events] == [Error]


async def test_a_bad_message_does_not_end_the_job_whose_id_it_has(worker: Worker, bus: Bus):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def first(run: JobRun, permit: Permit) -> None:
        run.put(start_of(run))
        await run.settled()
        begun.set()
        await go_on.wait()
        run.put(done())

    async def second(run: JobRun, permit: Permit) -> None:
        raise InvalidRequest("this one is broken")

    dead = await num_stored(bus, DEAD_STREAM)
    await worker.submit("shared", first)
    await asyncio.wait_for(begun.wait(), 10)
    await worker.submit("shared", second)

    async def is_buried() -> bool:
        return await num_stored(bus, DEAD_STREAM) == dead + 1

    await until(is_buried)
    go_on.set()
    assert [type(event) for event in await events_of(bus, "shared")] == [Start, Done]


async def test_of_two_messages_with_one_id_the_first_to_write_has_it_and_the_other_is_kept(worker: Worker, bus: Bus):
    """The second is broken, and its error came before the first had its `start`: that one is not lost with it."""
    taken, go_on = asyncio.Event(), asyncio.Event()

    async def first(run: JobRun, permit: Permit) -> None:
        taken.set()
        await go_on.wait()
        run.put(start_of(run), done())

    async def second(run: JobRun, permit: Permit) -> None:
        raise InvalidRequest("this one is broken")

    dead = await num_stored(bus, DEAD_STREAM)
    await worker.submit("first-come", first)
    await asyncio.wait_for(taken.wait(), 10)
    origin = await worker.submit("first-come", second)
    (end,) = await events_of(bus, "first-come")
    assert isinstance(end, Error) and (end.code, end.origin) == ("invalid_request", origin)
    go_on.set()

    async def is_buried() -> bool:
        return await num_stored(bus, DEAD_STREAM) == dead + 1

    await until(is_buried)
    await until(lambda: queue_is_empty(worker))
    assert await events_of(bus, "first-come") == [end]


async def test_an_unreadable_message_on_the_reply_subject_does_not_lose_the_job(worker: Worker, bus: Bus):
    await bus.request("kvrelay.replies.default.scribbled", b"no event at all")
    await worker.submit("scribbled", finish)

    async def has_ended() -> bool:
        return any(message.ended for message in await read_all(bus, "default", "scribbled"))

    await until(has_ended)


async def test_a_job_may_grow_to_all_of_an_idle_worker(worker: Worker, bus: Bus):
    """The loop that waits for the next job must not sit on a place that a running one waits for."""

    async def grow(run: JobRun, permit: Permit) -> None:
        await permit.resize(MAX_SEQUENCES, MAX_SEQUENCES)
        run.put(start_of(run), done())

    await worker.submit("wide", grow)
    assert isinstance((await events_of(bus, "wide"))[-1], Done)
    await worker.submit("next", finish)
    assert isinstance((await events_of(bus, "next"))[-1], Done), "and the worker takes jobs again"


async def test_a_suspect_that_waits_keeps_nobody_from_growing(worker: Worker, bus: Bus):
    failed = asyncio.Event()

    async def fail_once(run: JobRun, permit: Permit) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")
        await finish(run, permit)

    async def grow(run: JobRun, permit: Permit) -> None:
        async with asyncio.timeout(10):
            while not worker.process._admission._suspects:
                await asyncio.sleep(0.01)
        await permit.resize(MAX_SEQUENCES, MAX_SEQUENCES)
        run.put(start_of(run), done())

    await worker.submit("suspect", fail_once)
    await asyncio.wait_for(failed.wait(), 10)
    await worker.submit("grows", grow)
    assert isinstance((await events_of(bus, "grows"))[-1], Done)
    assert [type(event) for event in await events_of(bus, "suspect")] == [Retry, Start, Done]


@pytest.mark.parametrize("ack_wait_s", [60.0])
@pytest.mark.parametrize("suspect", [False, True])
async def test_a_cancelled_job_stops_where_it_waits(
    worker: Worker, bus: Bus, monkeypatch: pytest.MonkeyPatch, suspect: bool
):
    """While it computes, and while it waits to run alone."""
    monkeypatch.setattr(process_module, "run_delivery", partial(run_delivery, redeliver_delay_s=0.01))
    begun, failed = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(run: JobRun, permit: Permit) -> None:
        if suspect and not failed.is_set():
            failed.set()
            raise BusUnavailable("once")
        begun.set()
        await asyncio.Event().wait()

    async def hold_up(run: JobRun, permit: Permit) -> None:
        run.put(start_of(run))
        await run.settled()
        await asyncio.Event().wait()

    job = f"cancelled-{suspect}"
    await worker.submit(job, wait_for_ever)
    if suspect:
        await asyncio.wait_for(failed.wait(), 10)
        await worker.submit("holds-up", hold_up)
        async with asyncio.timeout(10):
            while not worker.process._admission._suspects:
                await asyncio.sleep(0.01)
    else:
        await asyncio.wait_for(begun.wait(), 10)
    worker.process._runs.cancel("default", job)
    (end,) = await events_of(bus, job)
    assert isinstance(end, Error) and end.code == "cancelled"
    worker.process._runs.cancel("default", "holds-up")
    await until(lambda: queue_is_empty(worker))


async def test_a_deadline_ends_a_job_that_waits_to_run_alone(worker: Worker, bus: Bus):
    failed, begun = asyncio.Event(), asyncio.Event()

    async def fail(run: JobRun, permit: Permit) -> None:
        failed.set()
        raise RuntimeError("once")

    async def hold_up(run: JobRun, permit: Permit) -> None:
        run.put(start_of(run))
        await run.settled()
        begun.set()
        await asyncio.Event().wait()

    worker.role.timeout_s = 1.0
    await worker.submit("holds-up-a-suspect", hold_up)
    await asyncio.wait_for(begun.wait(), 10)
    await worker.submit("in-a-hurry", fail)
    await asyncio.wait_for(failed.wait(), 10)
    (end,) = await events_of(bus, "in-a-hurry")
    assert isinstance(end, Error) and end.code == "deadline_exceeded"
    worker.process._runs.cancel("default", "holds-up-a-suspect")
    await until(lambda: queue_is_empty(worker))
