"""Cancels and deadlines at every point of a job's life: compute stops within a step, nothing stays held, one end."""

import asyncio
from typing import Any

import pytest

from schemas.errors import Cancelled
from schemas.events import Done, Error, Event, Finish, is_end
from schemas.subjects import Stage
from services.bus import hub as hub_module
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.history import read_all
from tests.bus.polling import until
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import handoff_of, leave
from tests.pipeline.gate import DECODE_POINTS, NUM_TOKENS, PREFILL_POINTS, Point
from tests.pipeline.leftovers import at_rest, nothing_left
from tests.pipeline.local import Answer, LocalPipeline, LocalWorker

JOB: dict[str, Any] = {
    "prompt_token_ids": list(range(3, 45)), "max_tokens": NUM_TOKENS, "n": 2, "seed": 1, "ignore_eos": True,
}  # fmt: skip
CHUNKS = {"chunk_tokens": 16, "token_budget": 16}
TIMEOUTS_S = (0.5, 2.0, 8.0)  # the first that is long enough on this machine to come to the point


@pytest.fixture(autouse=True)
def writers_are_forgotten_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEEP_S", 0.05)


async def events_of(pipeline: LocalPipeline, job: str) -> list[Event]:
    return [event for message in await read_all(pipeline.bus, "default", job) for event in message.events]


async def is_over(worker: LocalWorker, job: str) -> bool:
    return worker.process._runs.get("default", job) is None


async def has_left(worker: LocalWorker) -> bool:
    return len(worker.role.batch) == 0


def num_steps(pipeline: LocalPipeline) -> int:
    return sum(w.role.batch.progress.steps for w in (pipeline.prefill_worker, pipeline.decode_worker))


@pytest.mark.parametrize("point", [*PREFILL_POINTS, *DECODE_POINTS], ids=lambda point: point.name)
async def test_cancelled(tiny_pipelines: Pipelines, point: Point) -> None:
    async with tiny_pipelines(scheduler=CHUNKS) as pipeline:
        await pipeline.ask(**JOB)
        before = await at_rest(pipeline)
        with point.gate(pipeline) as gate:
            job = await pipeline.submit(**JOB, cache_salt="another time")
            await gate.wait()
            is_first_end = await cancel_job(pipeline.bus, "default", job, Cancelled("not wanted any more"))
            # The job itself goes on, or has ended, while the worker that is done with it stands still.
            assert is_first_end or point.after
            if not point.after:
                await until(lambda: is_over(point.worker(pipeline), job))
            steps = num_steps(pipeline)
        await nothing_left(pipeline, before)
        if not point.after:
            assert num_steps(pipeline) <= steps + 1, "the pass that stood still, and no more"
        *events, end = await events_of(pipeline, job)
        assert isinstance(end, Error) and end.code == "cancelled" if is_first_end else isinstance(end, Done)
        assert not any(is_end(event) for event in events)
        assert (await pipeline.ask(**JOB)).essence, "and the next one is served"


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_cancelled_while_nobody_has_it(tiny_pipelines: Pipelines, stage: Stage) -> None:
    """In the queue of prefill; or its blocks are stored, and the hand-off waits for a decode worker."""
    async with tiny_pipelines(scheduler=CHUNKS) as pipeline:
        whole = await pipeline.ask(**JOB)
        before = await at_rest(pipeline)
    async with await Bus.connect(pipeline.url) as pipeline.bus:
        if stage is Stage.PREFILL:
            job = await pipeline.submit(**JOB)
        else:
            job = await leave(pipeline, handoff_of(pipeline, JOB, whole.events[:3]), whole.events[:3])
        assert await cancel_job(pipeline.bus, "default", job, Cancelled("not wanted any more"))
    async with tiny_pipelines(scheduler=CHUNKS) as pipeline:
        assert (await pipeline.ask(**JOB)).essence == whole.essence
        await nothing_left(pipeline, before)
        *events, end = await events_of(pipeline, job)
        assert isinstance(end, Error) and end.code == "cancelled" and not any(is_end(event) for event in events)


async def expire_at(pipeline: LocalPipeline, point: Point, deadline: str) -> Answer:
    """The stream of a job whose `deadline` passes while it stands still at `point`."""
    for timeout_s in TIMEOUTS_S:
        with point.gate(pipeline) as gate:
            job = await pipeline.submit(**JOB, cache_salt=f"{timeout_s}", **{deadline: timeout_s})
            reading = asyncio.create_task(pipeline.read(job))
            reaching = asyncio.create_task(gate.reached.wait())
            await asyncio.wait([reading, reaching], return_when=asyncio.FIRST_COMPLETED)
            reaching.cancel()
            answer = await reading
            await until(lambda name=job: is_over(point.worker(pipeline), name))
            steps = num_steps(pipeline)
        if gate.reached.is_set():
            await until(lambda: has_left(point.worker(pipeline)))
            assert num_steps(pipeline) <= steps + 1, "the pass that stood still, and no more"
            return answer
    raise AssertionError(f"{point.name} was not reached in {TIMEOUTS_S[-1]} s")


@pytest.mark.parametrize(
    ("point", "deadline"),
    [
        *((point, "ttft_timeout_s") for point in PREFILL_POINTS[:3]),
        *((point, "timeout_s") for point in [*PREFILL_POINTS[:-1], *DECODE_POINTS[1:-1]]),
    ],
    ids=lambda value: value.name if isinstance(value, Point) else value,
)
async def test_a_deadline_passes(tiny_pipelines: Pipelines, point: Point, deadline: str) -> None:
    """Never as a `finish` for length: the reader must not take it for a whole answer."""
    async with tiny_pipelines(scheduler=CHUNKS) as pipeline:
        await pipeline.ask(**JOB)
        before = await at_rest(pipeline)
        answer = await expire_at(pipeline, point, deadline)
        assert isinstance(answer.end, Error) and answer.end.code == "deadline_exceeded"
        assert not any(isinstance(event, Finish) for event in answer.events)
        await nothing_left(pipeline, before)
