"""What is told of jobs on a real broker: each state as it is reached, and answers that no race makes wrong."""

import asyncio

import msgspec
import pytest

from schemas.errors import Cancelled, Settle
from schemas.job_report import ChoiceReport, JobReport
from schemas.state import JobState
from schemas.subjects import Lane, Stage
from services.bus import job_state
from services.bus.cancels import cancel_job
from services.bus.chain import open_job
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.facts import StreamFacts
from services.bus.jetstream import call
from services.bus.job_state import look
from services.bus.publish import submit_job
from services.bus.queue import WorkQueue
from services.bus.replies import ReplyWriter
from services.bus.streams import Source, ensure_streams
from tests.bus.conftest import BUILD
from tests.bus.events import START, ending, token


class Client:
    """Publishes jobs of a model, and takes their messages as prefill workers do."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.bus = bus
        self.model = model
        self.queue = WorkQueue(bus, [Source(Stage.PREFILL, Lane.INTERACTIVE, model, BUILD)])

    async def submit(self) -> Delivery:
        await submit_job(self.bus, "default", self.model, Lane.INTERACTIVE, b"{}")
        return await self.queue.next()

    async def begun(self, job: str, num_tokens: int = 0) -> tuple[Delivery, ReplyWriter]:
        """A job whose prefill has written `start` and some tokens."""
        delivery = await self.submit()
        writer = ReplyWriter(self.bus, "default", job, 0, delivery.claim())
        writer.put(msgspec.structs.replace(START, origin=delivery.origin), *map(token, range(num_tokens)))
        await writer.drained()
        return delivery, writer


@pytest.fixture
async def client(bus: Bus, model: str):
    client = Client(bus, model)
    yield client
    await client.queue.close()


async def test_a_life_as_it_is_told(client: Client, job: str) -> None:
    bus, model = client.bus, client.model
    assert await look(bus, "default", job) == JobReport(id=job, tenant="default", state=JobState.UNKNOWN)

    last = await open_job(bus, "default", job, model)
    report = await look(bus, "default", job)
    assert (report.state, report.model, report.worker, report.choices) == (JobState.QUEUED, model, None, [])

    delivery = await client.submit()
    prefill = ReplyWriter(bus, "default", job, last, delivery.claim())
    prefill.put(msgspec.structs.replace(START, origin=delivery.origin), token(0))
    last = await prefill.drained()
    report = await look(bus, "default", job)
    assert (report.state, report.worker) == (JobState.PREFILLING, bus.name)
    assert (report.build, report.prompt_tokens, report.cached_tokens) == ("b", 3, 0)

    await delivery.settle(Settle.ACK)
    assert (await look(bus, "default", job)).state is JobState.HANDED_OFF

    decode = ReplyWriter(bus, "default", job, last, "decode.1.2")
    decode.put(token(1), token(0, choice=1))
    await decode.drained()
    report = await look(bus, "default", job)
    assert (report.state, report.hops, report.age_s is not None) == (JobState.DECODING, 1, True)
    assert report.choices == [ChoiceReport(choice=0, tokens=2), ChoiceReport(choice=1, tokens=1)]

    decode.put(*ending(2))
    await decode.drained()
    report = await look(bus, "default", job)
    assert (report.state, report.model) == (JobState.DONE, model)
    assert report.choices[0] == ChoiceReport(choice=0, tokens=2, reason="length")
    told = [(d.stage, d.hop, d.delivery, d.worker, d.tokens) for d in report.deliveries]
    assert told == [(Stage.PREFILL, 0, 1, bus.name, 1), (Stage.DECODE, 1, 2, bus.name, 2)]
    assert report.age_s == pytest.approx(report.last_event_at - report.first_event_at, abs=0.001)


async def test_a_cancelled_job_and_its_error(client: Client, job: str) -> None:
    delivery, _ = await client.begun(job)
    assert await cancel_job(client.bus, "default", job, Cancelled("by hand"))
    report = await look(client.bus, "default", job)
    assert report.state is JobState.CANCELLED
    assert report.error is not None and report.error.message == "by hand"
    assert (await look(client.bus, "acme", job)).state is JobState.UNKNOWN
    await delivery.settle(Settle.ACK)


async def test_a_job_that_ends_while_it_is_looked_at_was_never_handed_off(
    client: Client, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the events and the look at the queue, prefill writes the end and settles."""
    delivery, writer = await client.begun(job, num_tokens=1)
    on_queue = job_state._on_queue

    async def late(bus: Bus, origin: tuple[int, int]) -> tuple[str | None, bool]:
        writer.put(*ending(1))
        await writer.drained()
        await delivery.settle(Settle.ACK)
        return await on_queue(bus, origin)

    monkeypatch.setattr(job_state, "_on_queue", late)
    assert (await look(client.bus, "default", job)).state is JobState.DONE


async def test_a_stream_made_anew_is_another_queue(client: Client, job: str) -> None:
    """Its sequences begin again: another job's message must not be taken for this one's."""
    bus, model = client.bus, client.model
    delivery, _ = await client.begun(job)
    delivery.abandon()
    assert (await look(bus, "default", job)).state is JobState.PREFILLING
    await call(bus, f"STREAM.DELETE.{delivery.source.stream}")
    bus.part(StreamFacts).forget(delivery.source.stream)
    await asyncio.sleep(0.002)  # its name in origins is its time of birth in ms
    await ensure_streams(bus, model)
    assert (await submit_job(bus, "default", model, Lane.INTERACTIVE, b"{}")).sequence == delivery.sequence
    report = await look(bus, "default", job)
    assert (report.state, report.model) == (JobState.HANDED_OFF, None)


async def test_the_queue_is_found_among_those_of_many_models(client: Client, job: str) -> None:
    for number in range(3):
        await ensure_streams(client.bus, f"other-{job}-{number}")
    delivery, _ = await client.begun(job)
    report = await look(client.bus, "default", job)
    assert (report.state, report.model) == (JobState.PREFILLING, client.model)
    await delivery.settle(Settle.ACK)
