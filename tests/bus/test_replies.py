import asyncio
from collections.abc import Callable

import pytest

from schemas.errors import Cancelled, ClaimLost, Internal, TooLarge
from schemas.events import Error, Event, Token
from schemas.subjects import CLAIM_HEADER, REPLIES_STREAM, WORKER_HEADER, reply_subject
from services.bus import hub as hub_module
from services.bus.chain import append, end_job, open_job
from services.bus.connection import Bus
from services.bus.history import last_message, read_all
from services.bus.hub import ReplyHub
from services.bus.jetstream import call
from services.bus.replies import MAX_WAITING_TOKENS, ReplyWriter
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from tests.bus.conftest import MakeBus
from tests.bus.events import START, ending, token, whole
from tests.bus.polling import restart, until


@pytest.fixture
async def replies(bus: Bus) -> Bus:
    await ensure_streams(bus, "replies")
    return bus


def writer(
    bus: Bus, job: str, last: int = 0, delivery: int = 1, on_lost: Callable[[], None] | None = None
) -> ReplyWriter:
    return ReplyWriter(bus, "default", job, last, f"decode.0.{delivery}", on_lost=on_lost)


async def stored_events(bus: Bus, job: str) -> list[Event]:
    return [event for message in await read_all(bus, "default", job) for event in message.events]


async def test_events_are_stored_once_in_order_under_the_claim(replies: Bus, job: str) -> None:
    write = writer(replies, job)
    for event in whole(20):
        write.put(event)
        await asyncio.sleep(0)
    last = await write.drained()
    assert write.ended
    messages = await read_all(replies, "default", job)
    assert [event for message in messages for event in message.events] == whole(20)
    assert {message.claim for message in messages} == {"decode.0.1"}
    assert messages[-1].sequence == last == write.last
    assert await last_message(replies, "default", job) == messages[-1]


async def test_what_waits_goes_together_and_the_trace_goes_along(replies: Bus, job: str) -> None:
    write = ReplyWriter(replies, "default", job, 0, "decode.0.1", trace={"traceparent": "00-a-b-01"})
    for event in whole(50):
        write.put(event)
    await write.drained()
    assert len(await read_all(replies, "default", job)) <= 2
    message = await replies.request(f"$JS.API.DIRECT.GET.{REPLIES_STREAM}.{reply_subject('default', job)}")
    assert message.headers is not None
    assert message.headers["traceparent"] == "00-a-b-01"
    assert message.headers[CLAIM_HEADER] == "decode.0.1"
    assert message.headers[WORKER_HEADER] == replies.name


async def test_the_worker_s_name_counts_in_what_fits_into_a_message(
    server: NatsServer, make_bus: MakeBus, job: str
) -> None:
    bus = await make_bus(server.url)
    await ensure_streams(bus, "replies")
    bus.name = "x" * (bus.max_payload // 2)
    write = writer(bus, job)
    with pytest.raises(TooLarge):
        write.put(Token(choice=0, index=0, id=1, text="x" * (bus.max_payload // 2)))
    for index in range(2):
        write.put(Token(choice=0, index=index, id=1, text="x" * (bus.max_payload // 3)))
    await write.drained()
    assert [message.worker for message in await read_all(bus, "default", job)] == [bus.name] * 2
    assert bus.num_reconnects == 0


async def test_goes_on_behind_what_others_wrote_before(replies: Bus, job: str) -> None:
    last = await open_job(replies, "default", job)
    assert last is not None
    prefill = ReplyWriter(replies, "default", job, last, "prefill.0.1")
    prefill.put(START, token(0))
    decode = writer(replies, job, await prefill.drained())
    prefill.close()
    decode.put(token(1), *ending(2))
    await decode.drained()
    assert (await stored_events(replies, job))[1:] == whole(2)
    assert await open_job(replies, "default", job) is None


async def test_messages_stay_below_the_limit(replies: Bus, job: str) -> None:
    write = writer(replies, job)
    events: list[Event] = [Token(choice=0, index=n, id=n, text="x" * 3000) for n in range(100)]
    write.put(*events)
    with pytest.raises(TooLarge):
        write.put(Token(choice=0, index=100, id=1, text="x" * replies.max_payload))
    write.put(*ending(100))
    await write.drained()
    assert (await stored_events(replies, job))[:100] == events
    assert replies.num_reconnects == 0


async def test_a_full_backlog_shows_and_drains(replies: Bus, job: str) -> None:
    write = writer(replies, job)
    for index in range(MAX_WAITING_TOKENS - 1):
        write.put(token(index))
    assert not write.congested
    write.put(token(MAX_WAITING_TOKENS - 1))
    assert write.congested
    await write.drained()
    assert not write.congested
    write.close()


async def test_nothing_may_follow_an_end(replies: Bus, job: str) -> None:
    write = writer(replies, job)
    write.put(*whole(1))
    with pytest.raises(Internal):
        write.put(token(1))
    await write.drained()
    with pytest.raises(Internal):
        write.put(token(1))


async def test_of_two_writers_one_wins_and_the_other_stops_in_silence(replies: Bus, job: str) -> None:
    lost: list[int] = []
    first = writer(replies, job, on_lost=lambda: lost.append(1))
    first.put(START, token(0))
    await first.drained()
    second = writer(replies, job, first.last, delivery=2)
    second.put(token(1))
    await second.drained()
    first.put(token(1))
    with pytest.raises(ClaimLost):
        await first.drained()
    assert (first.lost, first.ended, lost) == (True, False, [1])
    first.put(token(2))  # ignored
    second.put(*ending(2))
    await second.drained()
    assert await stored_events(replies, job) == whole(2)


@pytest.mark.parametrize("same_claim", [False, True])
async def test_two_writers_at_once_make_one_stream_with_one_end(replies: Bus, job: str, same_claim: bool) -> None:
    """A broker that crashed may give out a claim twice."""
    writers = [writer(replies, job, delivery=1 if same_claim else n) for n in range(2)]
    for event in whole(30):
        for write in writers:
            write.put(event)
        await asyncio.sleep(0)
    for write in writers:
        await asyncio.gather(write.drained(), return_exceptions=True)
    assert any(write.ended for write in writers)
    assert await stored_events(replies, job) == whole(30)


async def test_a_cancelled_job_takes_no_more_events(replies: Bus, job: str) -> None:
    lost = asyncio.Event()
    write = writer(replies, job, on_lost=lost.set)
    write.put(START, token(0))
    await write.drained()
    assert await end_job(replies, "default", job, Error.of(Cancelled("by the caller")))
    write.put(token(1))
    await write.drained()
    assert lost.is_set()
    assert (write.ended, write.lost) == (True, False)
    events = await stored_events(replies, job)
    assert events[:2] == [START, token(0)]
    assert [type(event) for event in events[2:]] == [Error]


async def test_only_one_of_many_ends_is_written(replies: Bus, job: str) -> None:
    ends = [Error(code="cancelled", message=f"by {n}") for n in range(5)]
    written = await asyncio.gather(*(end_job(replies, "default", job, end) for end in ends))
    assert sorted(written) == [False] * 4 + [True]
    assert await stored_events(replies, job) == [ends[written.index(True)]]


async def test_an_append_behind_an_old_message_is_refused(replies: Bus, job: str) -> None:
    assert await append(replies, "default", job, [START], last=0)
    assert await append(replies, "default", job, [token(0)], last=0) is None


async def test_a_full_stream_is_waited_for(own_server: NatsServer, make_bus: MakeBus, job: str) -> None:
    bus = await make_bus(own_server.url)
    await ensure_streams(bus, "m")
    config = (await call(bus, f"STREAM.INFO.{REPLIES_STREAM}"))["config"]
    await call(bus, f"STREAM.UPDATE.{REPLIES_STREAM}", config | {"max_msgs": 1})
    write = writer(bus, job)
    write.put(START)
    await write.drained()
    write.put(token(0), *ending(1))

    async def refused() -> bool:
        return write.failures > 1

    await until(refused)
    assert not write.closed
    await call(bus, f"STREAM.UPDATE.{REPLIES_STREAM}", config)
    await write.drained()
    assert await stored_events(bus, job) == whole(1)


async def test_a_stream_survives_restarts_of_the_broker(
    own_server: NatsServer, make_bus: MakeBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await make_bus(own_server.url)
    await ensure_streams(bus, "m")
    writers = [writer(bus, f"j{n}") for n in range(8)]
    for write in writers:
        write.put(START)
    for index in range(30):
        if index in (10, 20):
            await restart(own_server, bus)
        for write in writers:
            write.put(token(index))
        await asyncio.sleep(0.001)
    for write in writers:
        write.put(*ending(30))
        await write.drained()
        assert await stored_events(bus, write.job) == whole(30)


async def test_events_that_a_crashed_broker_lost_are_sent_again_even_after_the_end(replies: Bus, job: str) -> None:
    write = writer(replies, job)
    for event in whole(5):
        write.put(event)
        await write.drained()
    assert write.ended
    messages = await read_all(replies, "default", job)
    for message in messages[3:]:  # as if they had never reached the disk
        await call(replies, f"STREAM.MSG.DELETE.{REPLIES_STREAM}", {"seq": message.sequence})
    replies.part(ReplyHub).recover(write, at_once=True)

    async def whole_again() -> bool:
        return await stored_events(replies, job) == whole(5)

    await until(whole_again)
    assert write.ended


async def test_events_that_their_writer_cannot_send_again_end_the_delivery(
    replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "REWIND_WAIT_S", 0.1)
    write = writer(replies, job, last=10**6)  # written by a worker that is gone, lost by the broker
    write.put(token(5))
    with pytest.raises(ClaimLost):
        await write.drained()
    assert not write.published


async def test_the_handing_over_worker_sends_again_what_the_next_one_builds_on(replies: Bus, job: str) -> None:
    prefill = ReplyWriter(replies, "default", job, 0, "prefill.0.1")
    prefill.put(START, token(0))
    last = await prefill.drained()
    prefill.close()
    await call(replies, f"STREAM.MSG.DELETE.{REPLIES_STREAM}", {"seq": last})
    decode = writer(replies, job, last)
    decode.put(token(1), *ending(2))
    replies.part(ReplyHub).recover(prefill, at_once=True)

    async def done() -> bool:
        return decode.closed

    await until(done)
    # The sequence of its predecessor is another one now: decode cannot know what it stands for, and hands back.
    assert decode.lost
    assert await stored_events(replies, job) == [START, token(0)]


async def test_without_a_claim_nothing_new_is_sent_but_what_was_lost_is(replies: Bus, job: str) -> None:
    held = True
    write = ReplyWriter(replies, "default", job, 0, "decode.0.1", held=lambda: held)
    write.put(START)
    await write.drained()
    write.put(token(0))
    last = await write.drained()
    held = False
    await call(replies, f"STREAM.MSG.DELETE.{REPLIES_STREAM}", {"seq": last})
    replies.part(ReplyHub).recover(write, at_once=True)

    async def sent_again() -> bool:
        return await stored_events(replies, job) == [START, token(0)]

    await until(sent_again)
    write.put(token(1))
    with pytest.raises(ClaimLost):
        await write.drained()
    assert await stored_events(replies, job) == [START, token(0)]


async def test_finished_writers_leave_nothing_behind(replies: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEEP_S", 0.05)
    hub = replies.part(ReplyHub)
    tasks = len(asyncio.all_tasks())
    for number in range(20):
        write = writer(replies, f"{job}-{number}")
        write.put(*whole(3)) if number % 2 else write.put(START)
        await write.drained()
        write.close()

    async def forgotten() -> bool:
        return hub.num_writers == 0

    await until(forgotten)
    assert len(replies._inbox) == 0
    assert len(asyncio.all_tasks()) <= tasks + 1
