"""A job is stopped wherever it waits, for the reason that came first."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.errors import Cancelled, ClaimLost, DeadlineExceeded, Settle
from schemas.events import Done, Error
from schemas.subjects import Lane, Stage
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.publish import submit_job
from services.bus.queue import WorkQueue
from services.bus.streams import Source, ensure_consumers, ensure_streams
from services.worker.address import Address
from services.worker.history import History
from services.worker.run import JobRun
from tests.worker.conftest import BUILD, done, start_of

MODEL = "runs"
NUM_AWAITS = 4


@pytest.fixture
async def run(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[JobRun]:
    await ensure_streams(bus, MODEL)
    await ensure_consumers(bus, MODEL, BUILD)
    queue = WorkQueue(bus, [Source(Stage.PREFILL, Lane.INTERACTIVE, MODEL, BUILD)])
    await submit_job(bus, "default", MODEL, Lane.INTERACTIVE, b"{}")
    delivery = await queue.next()
    run = JobRun(bus, Address("default", delivery.origin, 0), delivery, History())
    yield run
    run.close()
    await delivery.settle(Settle.ACK)
    await queue.close()


@pytest.mark.parametrize("stop_at", range(NUM_AWAITS))
async def test_interrupted_at_each_await(run: JobRun, stop_at: int):
    passed: list[int] = []
    cleaned = False

    async def job() -> None:
        nonlocal cleaned
        try:
            for number in range(NUM_AWAITS):
                passed.append(number)
                if number == stop_at:
                    asyncio.get_running_loop().call_soon(run.interrupt, Cancelled("first"))
                    asyncio.get_running_loop().call_soon(run.interrupt, DeadlineExceeded("second"))
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
        finally:
            cleaned = True

    with pytest.raises(Cancelled, match="first"):
        await run.work(job())
    assert passed == list(range(stop_at + 1)) and cleaned


async def test_an_interrupt_after_the_last_await_changes_nothing(run: JobRun):
    async def job() -> None:
        run.put(start_of(run), done())
        await run.settled()

    await run.work(job())
    run.interrupt(Cancelled("too late"))


async def test_the_deadline_of_the_first_token_ends_with_it(run: JobRun):
    async def job() -> None:
        run.set_deadline(100.0, ttft_timeout_s=1e-9)
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="first token"):
        await run.work(job())


async def test_a_hand_off_takes_along_what_is_left(run: JobRun):
    run.set_deadline(100.0, ttft_timeout_s=10.0)
    left = run.time_left()
    assert 0.0 < left["ttft_left_s"] <= 10.0 < left["timeout_left_s"] <= 100.0
    run.made_first_token()
    assert run.time_left()["ttft_left_s"] is None


async def test_a_job_that_had_ended_is_not_ended_again(run: JobRun, bus: Bus):
    """The deadline comes while the end waits for its ack."""
    run.put(start_of(run), done())
    await run.end(DeadlineExceeded("too late"))
    stored = await read_all(bus, run.tenant, run.job)
    assert [isinstance(event, (Done, Error)) for message in stored for event in message.events] == [False, True]


async def test_nothing_is_published_once_the_claim_is_gone(run: JobRun, bus: Bus):
    async def job() -> None:
        run.delivery.abandon()
        run.put(start_of(run))
        await asyncio.Event().wait()

    with pytest.raises(ClaimLost):
        await run.work(job())
    with pytest.raises(ClaimLost):
        await run.end(Cancelled("not ours to say"))
    assert await read_all(bus, run.tenant, run.job) == []
