import asyncio

import pytest

from schemas.errors import Settle
from schemas.subjects import Lane, Stage
from services.bus import queue as queue_module
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.publish import submit_job
from services.bus.queue import WorkQueue
from services.bus.server import NatsServer
from services.bus.streams import Source, ensure_consumers, ensure_streams
from tests.bus.conftest import BUILD, MakeBus
from tests.bus.polling import TIMEOUT_S, restart, until


def sources(model: str) -> list[Source]:
    return [Source(Stage.PREFILL, lane, model, BUILD) for lane in (Lane.INTERACTIVE, Lane.BATCH)]


async def info(bus: Bus, source: Source) -> dict:
    return await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")


async def until_waiting(bus: Bus, model: str, count: int, lanes: slice = slice(None)) -> None:
    """Until `count` pull requests wait at each lane."""

    async def waiting() -> bool:
        return all([(await info(bus, source))["num_waiting"] == count for source in sources(model)[lanes]])

    await until(waiting)


async def test_the_preferred_lane_comes_first_and_one_job_at_a_time(bus: Bus, model: str) -> None:
    for number in range(3):
        await submit_job(bus, "default", model, Lane.BATCH, b"batch %d" % number)
        await submit_job(bus, "default", model, Lane.INTERACTIVE, b"interactive %d" % number)
    queue = WorkQueue(bus, sources(model))
    taken = []
    for _ in range(6):
        delivery = await queue.next()
        taken.append(delivery.data)
        pending = [(await info(bus, source))["num_ack_pending"] for source in sources(model)]
        assert sum(pending) == 1, "holds exactly what was asked for"
        assert await delivery.settle(Settle.ACK)
    assert taken == [b"interactive %d" % n for n in range(3)] + [b"batch %d" % n for n in range(3)]
    await queue.close()


async def test_a_waiting_reader_gets_a_job_of_any_lane(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model))
    for lane in (Lane.BATCH, Lane.INTERACTIVE):
        waiting = asyncio.create_task(queue.next())
        await until_waiting(bus, model, 1)
        await submit_job(bus, "default", model, lane, b"x")
        delivery = await waiting
        assert delivery.lane is lane
        await delivery.settle(Settle.ACK)
    await queue.close()


async def test_a_lane_that_is_not_wanted_waits_and_the_other_does_not(bus: Bus, model: str) -> None:
    wanted = {Lane.INTERACTIVE, Lane.BATCH}
    queue = WorkQueue(bus, sources(model), wanted.__contains__)
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    wanted.remove(Lane.BATCH)
    await submit_job(bus, "default", model, Lane.BATCH, b"batch")
    await submit_job(bus, "default", model, Lane.INTERACTIVE, b"interactive")
    delivery = await waiting
    assert delivery.data == b"interactive" and await delivery.settle(Settle.ACK)
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1, slice(1))
    assert not waiting.done()
    wanted.add(Lane.BATCH)
    queue.look_again()
    delivery = await waiting
    assert (delivery.data, delivery.num_delivered) == (b"batch", 1) and await delivery.settle(Settle.ACK)
    await queue.close()


async def test_a_lane_that_is_not_wanted_is_not_asked(bus: Bus, model: str) -> None:
    """Its jobs are for readers that want them."""
    wanted = {Lane.INTERACTIVE, Lane.BATCH}
    full, idle = WorkQueue(bus, sources(model), wanted.__contains__), WorkQueue(bus, sources(model))
    waiting = asyncio.create_task(full.next())
    await until_waiting(bus, model, 1)
    wanted.remove(Lane.BATCH)
    full.look_again()
    await until_waiting(bus, model, 0, slice(1, 2))
    await submit_job(bus, "default", model, Lane.BATCH, b"batch")
    delivery = await asyncio.wait_for(idle.next(), TIMEOUT_S)
    assert (delivery.data, delivery.num_delivered) == (b"batch", 1) and await delivery.settle(Settle.ACK)
    wanted.add(Lane.BATCH)
    full.look_again()
    await until_waiting(bus, model, 1, slice(1, 2))
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for queue in (full, idle):
        await queue.close()


async def test_a_cancelled_wait_takes_its_requests_back_and_swallows_nothing(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model))
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until_waiting(bus, model, 0)
    await submit_job(bus, "default", model, Lane.BATCH, b"x")
    other = WorkQueue(bus, sources(model))
    delivery = await other.next()
    assert delivery.num_delivered == 1
    await delivery.settle(Settle.ACK)
    await queue.close()
    await other.close()


async def test_a_job_that_arrives_while_the_wait_is_cancelled_is_not_lost(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model))
    for _ in range(20):
        waiting = asyncio.create_task(queue.next())
        await until_waiting(bus, model, 1)
        submit = asyncio.create_task(submit_job(bus, "default", model, Lane.BATCH, b"x"))
        await asyncio.sleep(0)
        waiting.cancel()
        await submit
        await asyncio.gather(waiting, return_exceptions=True)
        delivery = waiting.result() if not waiting.cancelled() else await queue.next()
        assert delivery.num_delivered == 1
        assert await delivery.settle(Settle.ACK)
    await queue.close()


async def test_the_second_of_two_jobs_that_come_together_waits_with_its_claim_renewed(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model))
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    await asyncio.gather(*(submit_job(bus, "default", model, lane, b"x") for lane in Lane))
    first = await waiting
    second = await queue.next()
    assert {first.lane, second.lane} == set(Lane)
    assert second.num_delivered == 1
    assert await first.settle(Settle.ACK)
    assert await second.settle(Settle.ACK)
    await queue.close()


@pytest.mark.parametrize("ack_wait_s", [60.0])  # so that nothing comes back unless it is given back
async def test_a_job_that_nobody_asks_for_is_given_back(bus: Bus, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "HOLD_S", 0.05)
    queue, other = WorkQueue(bus, sources(model)), WorkQueue(bus, sources(model))
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    await asyncio.gather(*(submit_job(bus, "default", model, lane, b"x") for lane in Lane))
    first = await waiting
    async with asyncio.timeout(TIMEOUT_S):
        second = await other.next()
    assert {first.lane, second.lane} == set(Lane)
    await first.settle(Settle.ACK)
    await second.settle(Settle.ACK)
    await queue.close()
    await other.close()


@pytest.mark.parametrize("ack_wait_s", [60.0])
async def test_close_gives_back_what_it_holds(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model))
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    await asyncio.gather(*(submit_job(bus, "default", model, lane, b"x") for lane in Lane))
    first = await waiting
    await first.settle(Settle.ACK)
    await queue.close()
    other = WorkQueue(bus, sources(model))
    async with asyncio.timeout(TIMEOUT_S):
        second = await other.next()
    await second.settle(Settle.ACK)
    await other.close()
    await until_waiting(bus, model, 0)


async def test_a_removed_consumer_and_stream_are_made_again(bus: Bus, model: str) -> None:
    queue = WorkQueue(bus, sources(model)[:1])
    source = sources(model)[0]
    for what in (f"CONSUMER.DELETE.{source.stream}.{source.consumer}", f"STREAM.DELETE.{source.stream}"):
        waiting = asyncio.create_task(queue.next())
        await until_waiting(bus, model, 1, slice(1))
        await call(bus, what)
        await ensure_streams(bus, model)
        submitted = await submit_job(bus, "default", model, Lane.INTERACTIVE, b"x")
        async with asyncio.timeout(10):
            delivery = await waiting
        assert delivery.sequence == submitted.sequence
        assert await delivery.settle(Settle.ACK)
    await queue.close()


async def test_waits_through_a_restart_of_the_broker(own_server: NatsServer, make_bus: MakeBus) -> None:
    reader, client = await make_bus(own_server.url), await make_bus(own_server.url)
    await ensure_streams(client, "m")
    await ensure_consumers(client, "m", BUILD)
    queue = WorkQueue(reader, sources("m"))
    waiting = asyncio.create_task(queue.next())
    await until_waiting(client, "m", 1)
    await restart(own_server, reader, client)
    await submit_job(client, "default", "m", Lane.BATCH, b"x")
    async with asyncio.timeout(10):
        delivery = await waiting
    assert await delivery.settle(Settle.ACK)
    await queue.close()


async def test_two_readers_share_the_jobs(bus: Bus, model: str) -> None:
    queues = [WorkQueue(bus, sources(model)) for _ in range(2)]
    taken: list[bytes] = []

    async def read(queue: WorkQueue) -> None:
        while True:
            delivery = await queue.next()
            taken.append(delivery.data)
            await delivery.settle(Settle.ACK)
            if len(taken) == len(jobs):
                all_taken.set()

    jobs = [b"%d" % number for number in range(60)]
    all_taken = asyncio.Event()
    readers = [asyncio.create_task(read(queue)) for queue in queues]
    await asyncio.gather(
        *(submit_job(bus, "default", model, Lane(list(Lane)[n % 2]), job) for n, job in enumerate(jobs))
    )
    async with asyncio.timeout(20):
        await all_taken.wait()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert sorted(taken) == sorted(jobs)
    for queue in queues:
        await queue.close()


async def test_nothing_is_left_behind(bus: Bus, model: str) -> None:
    subscriptions = len(bus._client._subs)
    tasks = len(asyncio.all_tasks())
    queue = WorkQueue(bus, sources(model))
    for _ in range(5):
        await submit_job(bus, "default", model, Lane.BATCH, b"x")
        await (await queue.next()).settle(Settle.ACK)
    waiting = asyncio.create_task(queue.next())
    await until_waiting(bus, model, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await queue.close()
    await asyncio.sleep(0)
    assert len(bus._client._subs) == subscriptions
    assert len(asyncio.all_tasks()) <= tasks + 1  # the clock of `StreamFacts`
    assert len(bus._inbox) == 0
