"""Results have a bound, and a batch that meets it waits."""

import asyncio

import pytest

from schemas.subjects import RESULTS_STREAM, results_subject
from services.batch.results import COMPLETED, Result, store, stored
from services.bus import records
from services.bus.connection import Bus
from tests.batch.conftest import RESULTS_BYTES


async def test_a_batch_that_has_no_room_waits_for_it(bus: Bus, tenant: str, caplog: pytest.LogCaptureFixture) -> None:
    large = Result(1, COMPLETED, b"x" * (RESULTS_BYTES * 2 // 3))
    assert await store(bus, tenant, "before", large)
    storing = asyncio.create_task(store(bus, tenant, "batch", large))
    async with asyncio.timeout(30):
        while "no room for its results" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not storing.done()
    await records.erase(bus, RESULTS_STREAM, results_subject(tenant, "before"))
    assert await storing
    assert [result async for result in stored(bus, tenant, "batch")] == [large]
