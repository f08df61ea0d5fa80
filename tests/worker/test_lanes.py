"""Batch jobs leave room in a worker for those who wait for an answer."""

import asyncio

import pytest

from schemas.subjects import Lane
from services.worker.lanes import Lanes
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.worker.conftest import MAX_SEQUENCES, Worker

NUM_BATCH = MAX_SEQUENCES + 2


@pytest.mark.parametrize(("num_places", "num_batch"), [(1, 1), (2, 1), (4, 3), (16, 12)])
def test_a_quarter_is_kept_free(num_places: int, num_batch: int) -> None:
    lanes = Lanes(num_places, lambda _: True)
    for _ in range(num_batch):
        assert lanes.wants(Lane.BATCH)
        lanes.begun(Lane.BATCH)
    assert not lanes.wants(Lane.BATCH) and lanes.wants(Lane.INTERACTIVE)
    assert not lanes.has_reopened()
    lanes.ended(Lane.BATCH)
    assert lanes.has_reopened() and not lanes.has_reopened()


def test_what_no_request_would_get_no_batch_gets() -> None:
    open_lanes = {Lane.BATCH}
    lanes = Lanes(16, lambda lane: lane in open_lanes)
    assert not lanes.wants(Lane.BATCH)
    open_lanes.add(Lane.INTERACTIVE)
    assert lanes.has_reopened() and lanes.wants(Lane.BATCH)


async def test_a_request_is_taken_beside_any_number_of_batch_jobs(worker: Worker) -> None:
    """They fill their part of the worker, and more of them wait; none of them is lost for it."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    go_on = asyncio.Event()

    async def work(run: JobRun, permit: Permit) -> None:
        begun.put_nowait(run.job)
        await go_on.wait()

    async def first(number: int) -> set[str]:
        return {await asyncio.wait_for(begun.get(), 30) for _ in range(number)}

    names = {f"b{number}" for number in range(NUM_BATCH)}
    for name in sorted(names):
        await worker.submit(name, work, Lane.BATCH)
    seen = await first(MAX_SEQUENCES - 1)
    assert seen < names
    await worker.submit("urgent", work)
    assert await first(1) == {"urgent"}
    go_on.set()
    assert seen | await first(NUM_BATCH - len(seen)) == names
