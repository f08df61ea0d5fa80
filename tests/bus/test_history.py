import asyncio

import pytest

from schemas.errors import BusUnavailable
from services.bus import history as history_module
from services.bus.connection import Bus
from services.bus.facts import StreamFacts
from services.bus.history import last_message, read_all, read_some
from services.bus.replies import ReplyWriter
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from tests.bus.conftest import MakeBus
from tests.bus.events import whole


@pytest.fixture
async def replies(bus: Bus) -> Bus:
    await ensure_streams(bus, "history")
    return bus


@pytest.fixture(params=[False, True], ids=["direct", "leader"])
async def reads(request: pytest.FixtureRequest, replies: Bus) -> Bus:
    """Both ways of reading give the same; one server can play a replicated stream's leader."""
    replies.part(StreamFacts)._replicated = request.param
    return replies


async def test_nothing_there(reads: Bus, job: str) -> None:
    assert await last_message(reads, "default", job) is None
    assert await read_all(reads, "default", job) == []


async def test_the_last_and_all_among_other_jobs(reads: Bus, job: str) -> None:
    writers = [ReplyWriter(reads, "default", f"{job}-{n}", 0, f"decode.{n}.1") for n in range(4)]
    for event in whole(30):
        for write in writers:
            write.put(event)
        await asyncio.gather(*(write.drained() for write in writers))
    for number, write in enumerate(writers):
        messages = await read_all(reads, "default", write.job)
        assert [event for message in messages for event in message.events] == whole(30)
        assert [message.sequence for message in messages] == sorted(message.sequence for message in messages)
        assert {message.claim for message in messages} == {f"decode.{number}.1"}
        assert await last_message(reads, "default", write.job) == messages[-1]
        assert [message.ended for message in messages] == [False] * (len(messages) - 1) + [True]
        assert await read_all(reads, "default", write.job, after=messages[9].sequence) == messages[10:]
        assert abs(messages[-1].stored_at - reads.now()) < 10


async def test_long_histories_come_in_batches(replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "BATCH_MESSAGES", 7)
    write = ReplyWriter(replies, "default", job, 0, "decode.0.1")
    for event in whole(20):
        write.put(event)
        await write.drained()
    messages = await read_all(replies, "default", job)
    assert len(messages) == len(whole(20))
    some, more = await read_some(replies, "default", job, after=messages[2].sequence)
    assert (some, more) == (messages[3:10], True)


async def test_jobs_of_tenants_are_apart(replies: Bus, job: str) -> None:
    write = ReplyWriter(replies, "acme", job, 0, "decode.0.1")
    write.put(*whole(1))
    await write.drained()
    assert await read_all(replies, "default", job) == []
    assert await read_all(replies, "acme", job) != []


async def test_a_broker_that_is_away_is_not_an_empty_history(own_server: NatsServer, make_bus: MakeBus) -> None:
    bus = await make_bus(own_server.url)
    await ensure_streams(bus, "m")
    await last_message(bus, "default", "j")
    down = asyncio.Event()
    bus.on_connection(down=down.set)
    own_server.kill()
    async with asyncio.timeout(10):
        await down.wait()
    with pytest.raises(BusUnavailable):
        await last_message(bus, "default", "j")
    with pytest.raises(BusUnavailable):
        await read_all(bus, "default", "j")
