"""All workers replaced while they stream: no token lost or repeated, and each job ends on the build that began it."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas.beat import Beat
from schemas.events import Event, Start
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.publish import submit_job
from services.bus.reader import follow
from tests.chaos.load import MODEL, eight_jobs, essence, run_jobs
from tests.chaos.up import Up, running_up

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SILENCE_S = 300.0  # streams wait for each other: 16 run at once

_numbers = itertools.count()


class Load:
    """Streams of `jobs` in turn, each under a salt of its own, so that no prompt is in the store already."""

    def __init__(self, bus: Bus, jobs: list[dict[str, Any]]) -> None:
        self._bus = bus
        self._jobs = jobs
        self._names: list[str] = []

    async def run(self, num_streams: int, at_once: int) -> list[list[Event]]:
        places = asyncio.Semaphore(at_once)

        async def stream(number: int) -> list[Event]:
            async with places:
                name = f"rolling-{next(_numbers)}"
                self._names.append(name)
                job = {**self._jobs[number % len(self._jobs)], "id": name, "cache_salt": name}
                await submit_job(self._bus, "default", MODEL, Lane.INTERACTIVE, encode(job))
                return [event async for event in follow(self._bus, "default", name, SILENCE_S)]

        return list(await asyncio.gather(*(stream(number) for number in range(num_streams))))

    async def num_handed_over(self) -> int:
        """Streams that more than one decode worker wrote."""
        handed_over = 0
        for name in self._names:
            claims = {message.claim for message in await read_all(self._bus, "default", name)}
            handed_over += sum(claim.startswith("decode.") for claim in claims) > 1
        return handed_over


SLOW = ("--dtype", "bfloat16")
"""Streams that last as long as the start of a worker."""


def count_equal(streams: list[list[Event]], references: dict[str, list[list[Event]]]) -> Counter[str]:
    """By build: how many streams equal the undisturbed run of their job on that build."""
    equal: Counter[str] = Counter()
    for number, events in enumerate(streams):
        (build,) = [event.build for event in events if isinstance(event, Start)]
        own = references[build]
        equal[build] += essence(events) == own[number % len(own)]
    return equal


async def references(bus: Bus, jobs: list[dict[str, Any]]) -> dict[str, list[list[Event]]]:
    """The undisturbed streams, by the build that runs."""
    streams = await run_jobs(bus, jobs)
    (build,) = {event.build for events in streams for event in events if isinstance(event, Start)}
    return {build: [essence(events) for events in streams]}


async def new_worker_loads(bus: Bus, up: Up) -> None:
    """Returns when a decode worker beside the running one knows its model; it serves some seconds later."""
    beats = BeatTable(bus)
    await beats.start()

    def is_loading(beat: Beat) -> bool:
        return beat.role == "decode" and beat.state == "warming" and beat.model != ""

    await beats.wait_for(lambda table: any(is_loading(beat) for beat in table.alive()))
    await beats.close()


async def test_a_rolling_restart_in_the_middle_of_twelve_streams(tmp_path: Path):
    jobs = eight_jobs(max_tokens=40)
    async with running_up(tmp_path, *SLOW) as up, await Bus.connect(up.nats, "client") as bus:
        expected = await references(bus, jobs)
        old = [up.pid(name) for name in ("prefill-0", "decode-0")]
        restarting = asyncio.create_task(up.kvrelay("restart"))
        await new_worker_loads(bus, up)
        load = Load(bus, jobs)
        streams = await load.run(12, at_once=12)
        assert (await restarting)[-1] == "all workers are replaced"
        assert not {up.pid(name) for name in ("prefill-0", "decode-0")} & set(old)
        handed_over = await load.num_handed_over()
    equal = count_equal(streams, expected)
    print(f"\nrolling restart: {equal.total()} of 12 streams equal, {handed_over} handed over in the middle")
    assert equal.total() == 12 and handed_over > 0


@pytest.mark.slow
async def test_three_rolling_restarts_during_two_hundred_streams(tmp_path: Path):
    jobs = eight_jobs(max_tokens=32)
    async with running_up(tmp_path, *SLOW) as up, await Bus.connect(up.nats, "client") as bus:
        expected = await references(bus, jobs)
        load = Load(bus, jobs)
        streaming = asyncio.create_task(load.run(200, at_once=40))
        for number in range(3):
            await up.kvrelay("restart")
            assert not streaming.done(), f"restart {number + 1} came too late"
        streams = await streaming
        handed_over = await load.num_handed_over()
    equal = count_equal(streams, expected)
    print(f"\nthree rolling restarts: {equal.total()} of 200 streams equal, {handed_over} handed over in the middle")
    assert equal.total() == 200 and handed_over >= 20


@pytest.mark.slow
async def test_a_rolling_change_of_build_during_two_hundred_streams(tmp_path: Path):
    """bfloat16 to float32, which is refused unless it is meant. The old decode worker finishes its queue, so its grace
    is long."""
    jobs = eight_jobs(max_tokens=32)
    config = tmp_path / "kvrelay.toml"
    config.write_bytes(b'[compute]\ndtype = "bfloat16"\n')
    env = {"KVRELAY_CONFIG": str(config), "KVRELAY_SCHEDULER_GRACE_S": "300"}
    async with running_up(tmp_path, **env) as up, await Bus.connect(up.nats, "client") as bus:
        expected = await references(bus, jobs)
        config.write_bytes(b'[compute]\ndtype = "float32"\n')
        assert "not all workers were replaced" in (await up.kvrelay("restart", exit_code=1))[-1]
        load = Load(bus, jobs)
        streaming = asyncio.create_task(load.run(200, at_once=32))
        await up.kvrelay("restart", "--rolling")
        assert not streaming.done(), "the change came too late"
        streams = await streaming
        expected |= await references(bus, jobs)
    equal = count_equal(streams, expected)
    print(f"\nrolling change of build: {equal.total()} of 200 streams equal, by build {dict(equal)}")
    assert equal.total() == 200
    assert len(equal) == 2 and min(equal.values()) >= 20
