"""Jobs under random faults: every stream equal to the undisturbed one, and nothing left over at the end."""

import dataclasses
import time
from pathlib import Path

import aiohttp
import pytest

from schemas.events import Done, Error
from services.bus.connection import Bus
from tests.chaos import oracle, state
from tests.chaos.driver import Driver, Plan
from tests.chaos.mix import kinds
from tests.chaos.reference import references
from tests.chaos.site import POOL_BYTES, Site, running_site

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

MORE_BYTES = POOL_BYTES + 100_000_000  # pages are given memory when they are first used
SMALL = Plan(
    seed=1, num_kinds=6, num_jobs=16, num_at_once=14, fault_every_s=2.5, longest_fault_s=3.0,
    min_faults=12, max_faults=12, min_each_kind=1, min_takeovers=1, min_running=8, timeout_s=900.0,
)  # fmt: skip
FULL = Plan(
    seed=1, num_kinds=24, num_jobs=500, num_at_once=28, fault_every_s=10.0, longest_fault_s=8.0,
    min_faults=60, max_faults=1000, min_each_kind=5, min_takeovers=100, min_running=16, timeout_s=3000.0,
)  # fmt: skip


async def test_nothing_lost_and_nothing_doubled(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plan = _plan(request.config)
    print(f"\n{plan}", flush=True)
    async with (
        running_site(tmp_path) as site,
        await Bus.connect(site.proxy.url, "client") as bus,
        aiohttp.ClientSession() as session,
    ):
        print(f"the disk is {'a small one' if site.disk.mounted else 'full when the processes are told so'}")
        distinct = kinds(plan.num_kinds)
        undisturbed = await references(site, bus, distinct, session)
        await state.settled(site)
        before = await state.look(site)
        print(f"{len(undisturbed)} distinct jobs undisturbed", flush=True)
        started_s = time.monotonic()
        tally = await Driver(site, bus, plan, undisturbed, distinct).run()
        print(f"in {time.monotonic() - started_s:.0f} s: {tally}", flush=True)
        site.control.heal()
        await state.settled(site)
        await _check_all_streams(site, list(undisturbed.values()))
        after = await state.returned(site, before, MORE_BYTES)
        print(f"before: {before}\nafter:  {after}")
        assert site.complaints == []
        assert tally.max_running >= plan.min_running
        assert await site.up.stop() == 0


async def _check_all_streams(site: Site, undisturbed: list[oracle.Stream]) -> None:
    """Also of jobs that no client heard of again: they ended once, and as far as they went they were right."""
    for job in await state.all_jobs(site.bus):
        stream = await oracle.stored_stream(site.bus, job)
        if isinstance(stream.end, Done):
            assert any(stream.choices == reference.choices for reference in undisturbed), job
        else:
            assert isinstance(stream.end, Error) and stream.end.code == "cancelled", (job, stream.end)
            assert job.startswith("req-"), f"{job} was cancelled, though its client never left"
            assert any(oracle.is_beginning(stream, reference) for reference in undisturbed), job


def _plan(config: pytest.Config) -> Plan:
    """The small one or the full one, with what the command line changes."""
    given = {"seed": "--seed", "num_jobs": "--jobs", "fault_every_s": "--fault-every"}
    values = {name: config.getoption(option) for name, option in given.items()}
    plan = FULL if config.getoption("--full-chaos") else SMALL
    return dataclasses.replace(plan, **{name: value for name, value in values.items() if value is not None})
