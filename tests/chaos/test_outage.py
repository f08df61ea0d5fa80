"""A broker that is away for longer than a worker waits for it at its start."""

import asyncio
from pathlib import Path

import pytest

from services.bus.connection import Bus
from services.supervisor.backoff import STABLE_S
from tests.chaos.load import essence, run_jobs
from tests.chaos.site import running_site

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

NOTICED_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.1


async def test_a_worker_that_dies_while_the_broker_is_away_comes_back_with_it(tmp_path: Path) -> None:
    async with running_site(tmp_path, num_decode=1) as site, await Bus.connect(site.broker.url, "client") as bus:
        await asyncio.sleep(STABLE_S)  # it has worked
        site.broker.kill()
        site.up.kill("decode-0")
        async with asyncio.timeout(NOTICED_TIMEOUT_S):
            while not any("exited with 2" in line for line in site.log):
                assert site.up.process.returncode is None, "up gave up on a worker whose broker was away"
                await asyncio.sleep(LOOK_EVERY_S)
        site.broker.start()
        await bus.wait_connected()
        (stream,) = await run_jobs(bus, [{"prompt": "Once", "max_tokens": 4}])
        essence(stream)
