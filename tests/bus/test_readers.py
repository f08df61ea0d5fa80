"""`follow` and `watch`: the same behaviour, whatever happens on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from schemas.errors import DeadlineExceeded
from schemas.events import Error, Event, Retry, Token, encode_events
from schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, REPLIES_STREAM, reply_subject
from services.bus import reader as reader_module
from services.bus import watch as watch_module
from services.bus.chain import append
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.jetstream import call
from services.bus.order import Gap
from services.bus.reader import follow, following
from services.bus.replies import ReplyWriter
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from services.bus.watch import watch
from tests.bus.conftest import MakeBus
from tests.bus.events import START, ending, token, whole
from tests.bus.polling import restart

Reader = Callable[[Bus, str, str], AsyncIterator[Event]]


class SomeTaker:
    """Has room two times of three."""

    def __init__(self, arrived: asyncio.Queue[Event | None]) -> None:
        self._arrived = arrived
        self._asked = 0
        self.num_taken = 0

    @property
    def has_room(self) -> bool:
        self._asked += 1
        return self._asked % 3 != 0

    def take(self, events: list[Event]) -> None:
        self.num_taken += len(events)
        for event in events:
            self._arrived.put_nowait(event)


async def take(bus: Bus, tenant: str, job: str) -> AsyncIterator[Event]:
    """`watch` with a taker: what it takes and what is yielded, as they come."""
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in watch(bus, tenant, job, taker=SomeTaker(arrived)):
                arrived.put_nowait(event)
        finally:
            arrived.put_nowait(None)

    pumping = asyncio.create_task(pump())
    try:
        while (event := await arrived.get()) is not None:
            yield event
        await pumping
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)


@pytest.fixture(params=[follow, watch, take], ids=["follow", "watch", "take"])
def read(request: pytest.FixtureRequest) -> Reader:
    return request.param


@pytest.fixture
async def replies(bus: Bus) -> Bus:
    await ensure_streams(bus, "readers")
    return bus


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    async with asyncio.timeout(20):
        return [event async for event in events]


def writer(bus: Bus, job: str, last: int = 0) -> ReplyWriter:
    return ReplyWriter(bus, "default", job, last, "decode.0.1")


async def write_one_by_one(write: ReplyWriter, events: list[Event]) -> None:
    for event in events:
        write.put(event)
        await write.drained()


async def test_a_reader_after_the_end_replays_everything(read: Reader, replies: Bus, job: str) -> None:
    await write_one_by_one(writer(replies, job), whole(30))
    assert await collect(read(replies, "default", job)) == whole(30)


async def test_a_reader_before_the_start_sees_everything(read: Reader, replies: Bus, job: str) -> None:
    events = read(replies, "default", job)
    reading = asyncio.create_task(collect(events))
    await asyncio.sleep(0.05)
    await write_one_by_one(writer(replies, job), whole(30))
    assert await reading == whole(30)


async def test_readers_in_the_middle_of_two_workers(read: Reader, replies: Bus, job: str) -> None:
    prefill = writer(replies, job)
    await write_one_by_one(prefill, [START, token(0), token(1)])
    readings = [asyncio.create_task(collect(read(replies, "default", job))) for _ in range(3)]
    decode = writer(replies, job, prefill.last)
    prefill.close()
    await write_one_by_one(decode, whole(20)[3:])
    for reading in readings:
        assert await reading == whole(20)


async def test_a_reader_survives_restarts_of_the_broker(
    read: Reader, own_server: NatsServer, make_bus: MakeBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, worker = await make_bus(own_server.url), await make_bus(own_server.url)
    await ensure_streams(worker, "m")
    reading = asyncio.create_task(collect(read(reader, "default", "j")))
    write = writer(worker, "j")
    for number, event in enumerate(whole(30)):
        if number in (10, 20):
            await restart(own_server, reader, worker)
        write.put(event)
        await asyncio.sleep(0.002)
    await write.drained()
    assert await reading == whole(30)


async def test_an_end_that_the_stream_refused_is_not_believed(read: Reader, replies: Bus, job: str) -> None:
    reading = asyncio.create_task(collect(read(replies, "default", job)))
    write = writer(replies, job)
    await write_one_by_one(write, [START, token(0)])
    end = Error(code="cancelled", message="too late")
    assert await append(replies, "default", job, [end], last=0) is None
    assert await append(replies, "default", job, [token(0), token(1)], last=0) is None  # a worker that woke late
    await write_one_by_one(write, whole(5)[2:])
    assert await reading == whole(5)


async def test_a_hole_in_the_stream_is_never_joined(read: Reader, replies: Bus, job: str) -> None:
    write = writer(replies, job)
    await write_one_by_one(write, whole(5))
    messages = await read_all(replies, "default", job)
    await call(replies, f"STREAM.MSG.DELETE.{REPLIES_STREAM}", {"seq": messages[2].sequence})
    with pytest.raises(Gap, match="token 2 came where 1 was expected"):
        await collect(read(replies, "default", job))


async def test_many_readers_come_and_go_without_a_trace(read: Reader, replies: Bus, job: str) -> None:
    await write_one_by_one(writer(replies, job), whole(3))
    tasks, subscriptions = len(asyncio.all_tasks()), len(replies._client._subs)
    await asyncio.gather(*(collect(read(replies, "default", job)) for _ in range(20)))
    abandoned = read(replies, "default", f"{job}-never")
    waiting = asyncio.create_task(anext(abandoned))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= tasks
    assert len(replies._client._subs) == subscriptions
    assert len(replies._inbox) == 0


async def test_follow_gives_up_when_nothing_comes(replies: Bus, job: str) -> None:
    with pytest.raises(DeadlineExceeded, match=reply_subject("default", job)):
        await collect(follow(replies, "default", job, silence_s=0.1))


async def test_a_reader_that_is_there_before_the_job_hears_every_event(replies: Bus, job: str) -> None:
    before = (await call(replies, f"CONSUMER.NAMES.{REPLIES_STREAM}"))["total"]
    async with following(replies, "default", job) as events:
        assert (await call(replies, f"CONSUMER.NAMES.{REPLIES_STREAM}"))["total"] == before + 1
        await write_one_by_one(writer(replies, job), whole(5))
        assert await collect(events) == whole(5)


async def test_follow_notices_a_consumer_that_fell_silent(
    replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "SILENT_AFTER_S", 0.3)
    monkeypatch.setattr(reader_module, "HEARTBEAT_S", 0.1)
    reading = asyncio.create_task(collect(follow(replies, "default", job)))
    write = writer(replies, job)
    await write_one_by_one(write, [START, token(0)])
    for name in (await call(replies, f"CONSUMER.NAMES.{REPLIES_STREAM}"))["consumers"]:
        await call(replies, f"CONSUMER.DELETE.{REPLIES_STREAM}.{name}")
    await write_one_by_one(write, whole(5)[2:])
    assert await reading == whole(5)


async def test_a_slow_watcher_is_served_from_the_stream_in_bounded_memory(
    replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    heard = watch_module._Feed._on_raw

    def measured(self, payload: bytes, headers: bytes) -> None:
        nonlocal most
        heard(self, payload, headers)
        most = max(most, sum(len(waiting.payload) for waiting in self._messages))

    monkeypatch.setattr(watch_module._Feed, "_on_raw", measured)
    events = watch(replies, "default", job, buffer_bytes=2_000)
    write = writer(replies, job)
    write.put(START)
    seen = [await anext(events)]
    await write_one_by_one(write, whole(200)[1:])
    assert 1_000 < most <= 2_000
    seen += await collect(events)
    assert seen == whole(200)


async def test_a_slow_watcher_does_not_slow_its_neighbours(replies: Bus, job: str) -> None:
    slow = watch(replies, "default", f"{job}-slow", buffer_bytes=1_000)
    slow_writer = writer(replies, f"{job}-slow")
    slow_writer.put(START)
    await anext(slow)
    jobs = [f"{job}-{number}" for number in range(20)]
    readings = [asyncio.create_task(collect(watch(replies, "default", name))) for name in jobs]
    await write_one_by_one(slow_writer, whole(100)[1:])
    await asyncio.gather(*(write_one_by_one(writer(replies, name), whole(20)) for name in jobs))
    for reading in readings:
        assert await reading == whole(20)
    assert await collect(slow) == whole(100)[1:]


async def test_a_lost_message_is_read_from_the_stream(replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = watch_module._Feed._on_raw
    number = 0

    def deaf_at_times(self, payload: bytes, headers: bytes) -> None:
        nonlocal number
        number += 1
        if number % 3:
            heard(self, payload, headers)

    monkeypatch.setattr(watch_module._Feed, "_on_raw", deaf_at_times)
    monkeypatch.setattr(watch_module, "LOOK_S", 0.05)
    reading = asyncio.create_task(collect(watch(replies, "default", job)))
    await write_one_by_one(writer(replies, job), whole(40))
    assert await reading == whole(40)


async def test_a_message_heard_before_it_can_be_read_is_not_lost(
    replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core message comes first; here the one before it was missed, and the stream is behind for a moment."""
    write = writer(replies, job)
    await write_one_by_one(write, [START, token(0)])
    events = watch(replies, "default", job)
    assert [await anext(events), await anext(events)] == [START, token(0)]
    waiting = asyncio.create_task(anext(events))
    await asyncio.sleep(0.05)
    headers = {EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: "1"}  # refused by the stream, heard by the watcher
    await replies.publish(reply_subject("default", job), encode_events([token(2)]), headers)
    await asyncio.sleep(0.01)
    await write_one_by_one(write, [token(1), token(2), *ending(3)])
    seen: list[Event] = [await waiting, *await collect(events)]
    assert seen == whole(3)[2:]
    assert all(isinstance(event, Token) for event in seen[:2])


async def test_a_taker_gets_what_is_next_in_order_and_never_the_end(replies: Bus, job: str) -> None:
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()
    taker = SomeTaker(arrived)
    events = watch(replies, "default", job, taker=taker)
    reading = asyncio.create_task(collect(events))
    write = writer(replies, job)
    await write_one_by_one(write, [START])
    await write_one_by_one(write, whole(30)[1:])
    yielded = await reading
    taken = [arrived.get_nowait() for _ in range(arrived.qsize())]
    assert 0 < taker.num_taken == len(taken) < 30
    assert sorted(map(whole(30).index, yielded + taken)) == list(range(len(whole(30))))
    assert yielded == sorted(yielded, key=whole(30).index) and taken == sorted(taken, key=whole(30).index)
    assert yielded[-1] == whole(30)[-1]


async def test_an_event_without_a_number_is_missed_too(replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a token tells that a start or a retry came before it; the chain does."""
    heard = watch_module._Feed._on_raw

    def deaf_to_retries(self, payload: bytes, headers: bytes) -> None:
        if b'"retry"' not in payload:
            heard(self, payload, headers)

    monkeypatch.setattr(watch_module._Feed, "_on_raw", deaf_to_retries)
    write = writer(replies, job)
    await write_one_by_one(write, [START])
    events = watch(replies, "default", job)
    assert await anext(events) == START
    rest = [Retry(attempt=1), token(0), *ending(1)]
    reading = asyncio.create_task(collect(events))
    await write_one_by_one(write, rest)
    assert await reading == rest
