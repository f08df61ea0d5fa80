"""Streams that take nothing more: the worker keeps its claim, tries again, and takes no more jobs meanwhile."""

import asyncio
from typing import Any

import pytest

from schemas.errors import Cancelled
from schemas.events import Done, Event, Token
from schemas.subjects import REPLIES_STREAM, Stage, stream_name
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.jetstream import call
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.bus.polling import until
from tests.worker.conftest import BUILD, Worker, done, start_of
from tests.worker.test_process import events_of, queue_is_empty
from tests.worker.test_strays import handoff

ACK_WAIT_S = 2.4
LONG_S = 1.3 * ACK_WAIT_S  # a claim that is not renewed is lost meanwhile


async def limit(bus: Bus, stream: str, max_msgs: int) -> None:
    config: dict[str, Any] = (await call(bus, f"STREAM.INFO.{stream}"))["config"]
    await call(bus, f"STREAM.UPDATE.{stream}", config | {"max_msgs": max_msgs})


async def num_stored(bus: Bus, stream: str) -> int:
    return int((await call(bus, f"STREAM.INFO.{stream}"))["state"]["messages"])


@pytest.mark.parametrize("ack_wait_s", [ACK_WAIT_S])
async def test_a_full_queue_at_the_hand_off(worker: Worker, bus: Bus):
    """The hand-off waits with its claim held, and the next job stays in the queue."""
    decode = stream_name(Stage.DECODE, worker.model)
    refused, second_begun, deliveries = asyncio.Event(), asyncio.Event(), []

    async def first(run: JobRun, permit: Permit) -> None:
        deliveries.append(run.delivery.num_delivered)
        forward = run.on_refused

        def note() -> None:
            assert forward is not None
            forward()
            refused.set()

        run.on_refused = note
        await run.publish(handoff("first", BUILD), Stage.DECODE)

    async def second(run: JobRun, permit: Permit) -> None:
        second_begun.set()
        run.put(start_of(run), done())

    await bus.request(f"kvrelay.decode.{worker.model}.{BUILD}.batch", b"in the way")
    await limit(bus, decode, 1)
    await worker.submit("first", first)
    await asyncio.wait_for(refused.wait(), 10)
    await worker.submit("second", second)
    await asyncio.sleep(LONG_S)
    assert not second_begun.is_set() and await num_stored(bus, decode) == 1
    await limit(bus, decode, -1)
    await asyncio.wait_for(second_begun.wait(), 10)
    await until(lambda: queue_is_empty(worker))
    assert await num_stored(bus, decode) == 2 and deliveries == [1], "handed off once, by the one that had it"


@pytest.mark.parametrize("ack_wait_s", [ACK_WAIT_S])
async def test_replies_that_take_nothing_lose_no_event(worker: Worker, bus: Bus):
    deliveries: list[int] = []
    events: list[Event] = [Token(choice=0, index=index, id=index, text="x") for index in range(300)]
    begun = asyncio.Event()

    async def stream(run: JobRun, permit: Permit) -> None:
        deliveries.append(run.delivery.num_delivered)
        run.put(start_of(run))
        await run.settled()
        await limit(bus, REPLIES_STREAM, await num_stored(bus, REPLIES_STREAM))
        for event in events:
            run.put(event)
            await asyncio.sleep(0)
        assert run.writer.congested, "a sequence pauses here"
        begun.set()
        await run.settled()
        run.put(done())

    await worker.submit("full", stream)
    await asyncio.wait_for(begun.wait(), 10)
    await asyncio.sleep(LONG_S)
    assert len(await read_all(bus, "default", "full")) == 1, "only its start has room"
    await limit(bus, REPLIES_STREAM, -1)
    _, *stored, end = await events_of(bus, "full")
    assert stored == events and isinstance(end, Done) and deliveries == [1]


async def test_a_job_can_be_cancelled_while_the_replies_are_full(worker: Worker, bus: Bus):
    """The end waits for room, as events do."""
    begun = asyncio.Event()

    async def stream(run: JobRun, permit: Permit) -> None:
        run.put(start_of(run))
        await run.settled()
        begun.set()
        await asyncio.Event().wait()

    await worker.submit("cancel", stream)
    await asyncio.wait_for(begun.wait(), 10)
    await limit(bus, REPLIES_STREAM, await num_stored(bus, REPLIES_STREAM))
    cancelling = asyncio.create_task(cancel_job(bus, "default", "cancel", Cancelled("enough")))
    await asyncio.wait([cancelling], timeout=0.5)
    assert not cancelling.done()
    await limit(bus, REPLIES_STREAM, -1)
    assert await cancelling
    await until(lambda: queue_is_empty(worker))
