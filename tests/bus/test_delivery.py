import asyncio
import time

import pytest

from schemas.errors import ClaimLost, IdConflict, Internal, InvalidRequest, Settle
from schemas.subjects import MSG_ID_HEADER, Lane, Stage, dead_subject, derived_job_id
from services.bus import delivery as delivery_module
from services.bus.connection import Bus
from services.bus.delivery import Delivery, Receipt, run
from services.bus.jetstream import call
from services.bus.progress import Progress
from services.bus.publish import submit_job
from services.bus.queue import WorkQueue
from services.bus.streams import Source
from tests.bus.conftest import ACK_WAIT_S, BUILD
from tests.bus.polling import TIMEOUT_S


class Clock:
    """Stands in for `elapsed_s`; `jump` is a pause that the process did not notice."""

    def __init__(self) -> None:
        self._real = delivery_module.elapsed_s
        self.jump = 0.0

    def __call__(self) -> float:
        return self._real() + self.jump


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(delivery_module, "elapsed_s", fake)
    return fake


@pytest.fixture
async def source(model: str) -> Source:
    return Source(Stage.PREFILL, Lane.INTERACTIVE, model, BUILD)


@pytest.fixture
async def queue(bus: Bus, source: Source):
    queue = WorkQueue(bus, [source])
    yield queue
    await queue.close()


async def take(bus: Bus, queue: WorkQueue, source: Source, headers: dict[str, str] | None = None) -> Delivery:
    await submit_job(bus, "default", source.model, source.lane, b"payload", headers)
    return await queue.next()


async def pending(bus: Bus, source: Source) -> tuple[int, int]:
    """(messages in the stream, deliveries without an ack)"""
    stream = await call(bus, f"STREAM.INFO.{source.stream}")
    consumer = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
    return stream["state"]["messages"], consumer["num_ack_pending"]


def lost(delivery: Delivery) -> asyncio.Event:
    event = asyncio.Event()
    delivery.on_lost = event.set
    return event


def test_receipts_of_one_server_and_of_a_cluster() -> None:
    plain = Receipt.parse("$JS.ACK.S.C.2.17.5.1700000000500000000.0")
    assert plain == Receipt(2, 17, 5, 1700000000.5)
    assert Receipt.parse("$JS.ACK.hub.ACCHASH.S.C.2.17.5.1700000000500000000.0.r4nd") == plain


async def test_knows_where_it_comes_from(bus: Bus, queue: WorkQueue, source: Source) -> None:
    delivery = await take(bus, queue, source, {"traceparent": "00-1-2-01"})
    assert (delivery.stage, delivery.lane, delivery.num_delivered) == (Stage.PREFILL, Lane.INTERACTIVE, 1)
    assert delivery.origin == derived_job_id(delivery.sequence, delivery.stream_created_ms)
    assert delivery.claim(2) == "prefill.2.1"
    assert delivery.headers["traceparent"] == "00-1-2-01"
    assert 0 <= delivery.age_s() < 5
    await delivery.settle(Settle.ACK)


@pytest.mark.parametrize("ack_wait_s", [2.4])
async def test_the_claim_is_renewed_past_ack_wait(
    bus: Bus, queue: WorkQueue, source: Source, ack_wait_s: float
) -> None:
    delivery = await take(bus, queue, source)
    second = asyncio.create_task(queue.next())
    done, _ = await asyncio.wait([second], timeout=1.3 * ack_wait_s)
    assert not done, "the message was given to somebody else"
    assert delivery.held
    assert await delivery.settle(Settle.ACK)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert await pending(bus, source) == (0, 0)


async def test_an_abandoned_message_comes_back_after_ack_wait(bus: Bus, queue: WorkQueue, source: Source) -> None:
    first = await take(bus, queue, source)
    first.abandon()
    async with asyncio.timeout(TIMEOUT_S):
        second = await queue.next()
    assert second.num_delivered == 2
    assert second.origin == first.origin
    assert not first.held
    assert not await first.settle(Settle.ACK)
    assert await pending(bus, source) == (1, 1)
    assert await second.settle(Settle.ACK)


async def test_after_a_pause_the_old_delivery_touches_nothing(
    bus: Bus, queue: WorkQueue, source: Source, clock: Clock
) -> None:
    first = await take(bus, queue, source)
    clock.jump = 2 * ACK_WAIT_S
    assert not first.held
    for how in (Settle.ACK, Settle.REDELIVER, Settle.DEAD_LETTER):
        assert not await first.settle(how)
    assert await pending(bus, source) == (1, 1)
    async with asyncio.timeout(TIMEOUT_S):
        second = await queue.next()
    assert await second.settle(Settle.ACK)


async def test_the_owner_hears_when_its_claim_is_lost(bus: Bus, queue: WorkQueue, source: Source, clock: Clock) -> None:
    delivery = await take(bus, queue, source)
    event = lost(delivery)
    clock.jump = 2 * ACK_WAIT_S
    async with asyncio.timeout(TIMEOUT_S):
        await event.wait()
    assert not delivery.held


async def test_a_confirmation_that_took_too_long_confirms_nothing(
    bus: Bus, queue: WorkQueue, source: Source, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await take(bus, queue, source)
    event = lost(delivery)
    request = bus.request

    async def paused_in_between(subject: str, *args, **kwargs):
        answer = await request(subject, *args, **kwargs)
        clock.jump = 2 * ACK_WAIT_S
        return answer

    monkeypatch.setattr(bus, "request", paused_in_between)
    async with asyncio.timeout(TIMEOUT_S):
        await event.wait()


async def test_a_worker_that_stands_still_loses_its_claims(
    bus: Bus, queue: WorkQueue, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await take(bus, queue, source)
    event = lost(delivery)
    delivery.progress = Progress()
    monkeypatch.setattr(delivery.progress, "stands_still", lambda: True)
    async with asyncio.timeout(TIMEOUT_S):
        second = await queue.next()
        await event.wait()
    assert second.num_delivered == 2
    assert await second.settle(Settle.ACK)


async def test_a_removed_consumer_ends_the_claim(bus: Bus, queue: WorkQueue, source: Source) -> None:
    delivery = await take(bus, queue, source)
    event = lost(delivery)
    await call(bus, f"CONSUMER.DELETE.{source.stream}.{source.consumer}")
    async with asyncio.timeout(10):
        await event.wait()
    assert not await delivery.settle(Settle.ACK)


async def test_redelivery_waits_as_long_as_asked(bus: Bus, queue: WorkQueue, source: Source) -> None:
    first = await take(bus, queue, source)
    asked_s = time.monotonic()
    assert await first.settle(Settle.REDELIVER, delay_s=0.2)
    async with asyncio.timeout(TIMEOUT_S):
        second = await queue.next()
    assert second.num_delivered == 2 and time.monotonic() - asked_s >= 0.2
    await second.settle(Settle.ACK)


async def test_settling_twice_is_settling_once(bus: Bus, queue: WorkQueue, source: Source) -> None:
    delivery = await take(bus, queue, source)
    assert await delivery.settle(Settle.ACK)
    assert not await delivery.settle(Settle.REDELIVER)
    assert await pending(bus, source) == (0, 0)


@pytest.mark.parametrize(
    ("headers", "job"),
    [
        ({MSG_ID_HEADER: "default.named"}, "named"),
        (None, ""),
        ({MSG_ID_HEADER: "other.x"}, ""),
        ({MSG_ID_HEADER: "default.a b>*"}, ""),
    ],
)
async def test_dead_letters_are_kept_under_the_job_then_gone_from_the_queue(
    bus: Bus, queue: WorkQueue, source: Source, headers: dict[str, str] | None, job: str
) -> None:
    delivery = await take(bus, queue, source, headers)
    assert await delivery.settle(Settle.DEAD_LETTER, error=IdConflict("the id is taken"))
    subject = dead_subject("default", job or delivery.origin)
    message = await bus.request(f"$JS.API.DIRECT.GET.KVRELAY_DEAD.{subject}")
    assert message.data == b"payload"
    assert message.headers is not None and message.headers["Kvrelay-Code"] == "id_conflict"
    assert await pending(bus, source) == (0, 0)


async def test_a_payload_of_the_limit_is_dead_lettered_as_far_as_it_fits(
    bus: Bus, queue: WorkQueue, source: Source
) -> None:
    await submit_job(bus, "default", source.model, source.lane, b"x" * bus.max_payload)
    delivery = await queue.next()
    delivery.job = ("default", f"big-{source.model}")
    assert await delivery.settle(Settle.DEAD_LETTER, error=IdConflict("taken"))
    message = await bus.request(f"$JS.API.DIRECT.GET.KVRELAY_DEAD.{dead_subject(*delivery.job)}")
    assert message.headers is not None
    assert message.headers["Kvrelay-Truncated"] == str(bus.max_payload)
    assert message.data.strip(b"x") == b"" and len(message.data) > bus.max_payload - 1_000
    assert bus.num_reconnects == 0


@pytest.mark.parametrize(
    ("outcome", "settled", "left"),
    [
        (None, Settle.ACK, (0, 0)),
        (Settle.REDELIVER, Settle.REDELIVER, (1, 1)),
        (InvalidRequest("bad"), Settle.ACK, (0, 0)),
        (Internal("bug"), Settle.REDELIVER, (1, 1)),
        (IdConflict("taken"), Settle.DEAD_LETTER, (0, 0)),
        (ClaimLost("gone"), Settle.DROP, (1, 1)),
    ],
)
async def test_errors_become_the_fate_of_the_message(
    bus: Bus, queue: WorkQueue, source: Source, outcome, settled: Settle, left: tuple[int, int]
) -> None:
    delivery = await take(bus, queue, source)

    async def handler(_: Delivery) -> Settle | None:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert await run(delivery, handler) is settled
    assert await pending(bus, source) == left


async def test_an_unknown_failure_leaves_the_message_to_come_back(bus: Bus, queue: WorkQueue, source: Source) -> None:
    delivery = await take(bus, queue, source)

    async def handler(_: Delivery) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(delivery, handler)
    async with asyncio.timeout(TIMEOUT_S):
        again = await queue.next()
    assert again.num_delivered == 2
    await again.settle(Settle.ACK)
