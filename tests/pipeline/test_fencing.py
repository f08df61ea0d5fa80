"""A worker that was paused past its claim, at any point of a job, and wakes while or after another one does the job:
one stream, the very same, settled once. With a duplicate window shorter than the pause: message ids do not help."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from schemas.errors import Settle
from schemas.events import Done
from schemas.handoff import Handoff
from schemas.subjects import Lane, Stage, decode_subject, stream_name
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.history import read_all
from services.bus.jetstream import call
from services.bus.publish import publish_handoff
from services.bus.streams import Source
from services.worker import run as run_module
from services.worker.run import JobRun
from tests.bus.polling import until
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import handoff_of, write
from tests.pipeline.gate import DECODE_POINTS, NUM_TOKENS, PREFILL_POINTS, Point
from tests.pipeline.local import LocalPipeline, LocalWorker
from tests.pipeline.second_worker import second_worker

WINDOW_S = 0.2  # less than ack_wait
JOB: dict[str, Any] = {
    "prompt_token_ids": list(range(3, 45)), "max_tokens": NUM_TOKENS, "seed": 1, "ignore_eos": True,
}  # fmt: skip


class Settlements:
    """What the broker confirmed, by stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.confirmed: list[tuple[str, str, int, Settle]] = []
        settle = Delivery.settle

        async def recorded(delivery: Delivery, how: Settle, *args: Any) -> bool:
            done = await settle(delivery, how, *args)
            if done and delivery.job is not None:
                self.confirmed.append((delivery.job[1], str(delivery.stage), delivery.num_delivered, how))
            return done

        monkeypatch.setattr(Delivery, "settle", recorded)

    def of(self, job: str, stage: Stage) -> list[tuple[int, Settle]]:
        return [(number, how) for name, where, number, how in self.confirmed if (name, where) == (job, str(stage))]

    def any_of(self, job: str, stage: Stage) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            return bool(self.of(job, stage))

        return condition


@pytest.fixture
def settlements(monkeypatch: pytest.MonkeyPatch) -> Settlements:
    return Settlements(monkeypatch)


@pytest.fixture
def handed_off(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs of all hand-offs that workers published, stored or not."""
    jobs: list[str] = []

    async def recorded(bus: Bus, handoff: Handoff, *args: Any, **kwargs: Any) -> int:
        jobs.append(handoff.job)
        return await publish_handoff(bus, handoff, *args, **kwargs)

    monkeypatch.setattr(run_module, "publish_handoff", recorded)
    return jobs


async def shorten_window(pipeline: LocalPipeline) -> None:
    for stage in Stage:
        stream = stream_name(stage, pipeline.text.slug)
        config = (await call(pipeline.bus, f"STREAM.INFO.{stream}"))["config"]
        await call(pipeline.bus, f"STREAM.UPDATE.{stream}", config | {"duplicate_window": int(WINDOW_S * 1e9)})


async def are_queues_empty(pipeline: LocalPipeline) -> bool:
    for stage in Stage:
        source = Source(stage, Lane.INTERACTIVE, pipeline.text.slug, pipeline.decode.build)
        info = await call(pipeline.bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
        if info["num_pending"] or info["num_ack_pending"]:
            return False
    return True


def fall_asleep(worker: LocalWorker, job: str) -> JobRun:
    """The claim is not renewed from now on, as if the process had been stopped; the run that holds it."""
    run = worker.process._runs.get("default", job)
    assert run is not None
    run.delivery._renewal.cancel()
    return run


@pytest.mark.parametrize(
    "wakes",
    ["while the other runs", pytest.param("after the end", marks=pytest.mark.slow)],  # a second a test
)
@pytest.mark.parametrize("point", [*PREFILL_POINTS, *DECODE_POINTS], ids=lambda point: point.name)
async def test_paused_past_the_claim(
    tiny_pipelines: Pipelines, settlements: Settlements, handed_off: list[str], point: Point, wakes: str
) -> None:
    # No worker has room for more than this job, so that whoever sleeps takes no other.
    num_choices = 2 if point in DECODE_POINTS[2:] else 1
    scheduler = {"max_sequences": num_choices, "chunk_tokens": 16, "token_budget": 16}
    fields = {**JOB, "n": num_choices}
    async with tiny_pipelines(scheduler=scheduler) as pipeline, AsyncExitStack() as stack:
        await shorten_window(pipeline)
        whole = await pipeline.ask(**fields)
        gate = stack.enter_context(point.gate(pipeline))
        job = await pipeline.submit(**fields, cache_salt="another time")
        await gate.wait()
        sleeper = fall_asleep(point.worker(pipeline), job)
        other = await stack.enter_async_context(second_worker(pipeline, point.stage))

        async def is_taken_over() -> bool:
            return other.process._runs.get("default", job) is not None or bool(settlements.of(job, point.stage))

        await until(is_taken_over)
        assert not sleeper.delivery.held
        if wakes == "while the other runs":
            gate.open()
        answer = await pipeline.read(job)
        gate.open()
        assert answer.essence == whole.essence and isinstance(answer.end, Done)
        await until(lambda: are_queues_empty(pipeline))
        await until(settlements.any_of(job, point.stage))
        ((number, how),) = settlements.of(job, point.stage)
        assert number > 1 and how is Settle.ACK, "once, by another than the sleeper"
        await nobody_wrote_behind_the_other(pipeline, point.stage, job)
        assert handed_off.count(job) == 1
    for runtime in (pipeline.prefill, pipeline.decode):
        assert runtime.pool.num_held == 0


async def nobody_wrote_behind_the_other(pipeline: LocalPipeline, stage: Stage, job: str) -> None:
    claims = [message.claim for message in await read_all(pipeline.bus, "default", job)]
    deliveries = [claim.rpartition(".")[2] for claim in claims if claim.startswith(str(stage))]
    assert deliveries == sorted(deliveries)


@pytest.mark.parametrize(
    ("late", "room"), [(b"+ACK", 1), (b"-NAK", 1), (b"-NAK", 4), (b"+WPI", 1), (b"+TERM", 1)], ids=str
)
async def test_a_late_settlement_acts_on_the_second_delivery_and_changes_nothing(
    tiny_pipelines: Pipelines, settlements: Settlements, late: bytes, room: int
) -> None:
    """Ours never sends one; the broker would not tell it from the second's own. A nak brings a third delivery, which
    may run beside the second if there is room."""
    point = DECODE_POINTS[3]
    # Of a message that is gone the second delivery is the last: it must outlive a pause of the machine.
    bus = {"ack_wait_s": 2.4} if late in (b"+ACK", b"+TERM") else {}
    async with tiny_pipelines(scheduler={"max_sequences": 1}, bus=bus) as pipeline, AsyncExitStack() as stack:
        whole = await pipeline.ask(**JOB)
        gate = stack.enter_context(point.gate(pipeline))
        job = await pipeline.submit(**JOB)
        await gate.wait()
        sleeper = fall_asleep(point.worker(pipeline), job)
        other = await stack.enter_async_context(second_worker(pipeline, point.stage, room))
        in_its_run = Point("", Stage.DECODE, lambda _: (other.runtime.engine, "run", 1))
        with in_its_run.gate(pipeline) as second_gate:
            await second_gate.wait()
            await pipeline.bus.publish(sleeper.delivery._reply, late)
            await pipeline.bus.request("$JS.API.INFO")  # the broker has read it
        gate.open()
        answer = await pipeline.read(job)
        assert answer.essence == whole.essence and isinstance(answer.end, Done)
        await until(lambda: are_queues_empty(pipeline))
        await until(settlements.any_of(job, point.stage))
        settled = settlements.of(job, point.stage)
        assert all(number > 1 for number, _ in settled), "not by the first"
        assert len(settled) == 1 or late == b"-NAK", "a third delivery finds the end, and may settle as well"


async def test_a_hand_off_that_was_stored_twice(tiny_pipelines: Pipelines) -> None:
    """A prefill worker that woke past the duplicate window. Both copies run at once: the chain takes one's events."""
    job = {**JOB, "max_tokens": 60}
    async with tiny_pipelines(scheduler={"max_sequences": 2}) as pipeline:
        whole = await pipeline.ask(**job)
        handoff = handoff_of(pipeline, job, whole.events[:2])
        subject = decode_subject(pipeline.text.slug, handoff.build, Lane.INTERACTIVE)
        await write(pipeline, handoff, whole.events[:2])
        for _ in range(2):
            await pipeline.bus.request(subject, encode(handoff))
        answer = await pipeline.read(handoff.job)
        assert answer.essence == whole.essence and isinstance(answer.end, Done)
        await until(lambda: are_queues_empty(pipeline))
        ends = [message for message in await read_all(pipeline.bus, "default", handoff.job) if message.ended]
        assert len(ends) == 1
