"""Whether the queue slows down as it fills: publishing and pulling behind N waiting jobs, as ratios to few.

Two brokers of our own, one with few jobs queued and one with many, take turns, so that a drift of the machine hits
both. Disk and server settings are the user's; only filling goes without waiting for the disk.
"""

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from schemas.errors import Settle
from schemas.job import Job
from schemas.subjects import MSG_ID_HEADER, Lane, Stage
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import job_msg_id, submit_job
from services.bus.queue import WorkQueue
from services.bus.server import NatsServer
from services.bus.streams import Source, ensure_streams
from services.settings import Settings

MODEL = "bench"
TENANT = "default"
BUILD = "0" * 12
NUM_AT_ONCE = 256  # publishes in flight while filling
PROMPT_TOKENS = list(range(1000, 1040))
UNSYNCED = "5m"

Row = dict[str, str | int | float]

_numbers = itertools.count()


def run(settings: Settings, depths: Sequence[int], num_jobs: int, rounds: int) -> Iterator[Row]:
    """One row a depth: jobs/s published and pulled one after the other, and their ratios to the first depth's.

    `num_jobs` are published and then pulled in each of `rounds`; the first round only warms up.
    """
    few, *others = depths
    for depth in others or [few]:
        with tempfile.TemporaryDirectory() as shallow, tempfile.TemporaryDirectory() as deep:
            asyncio.run(fill(settings, shallow, few))
            filled_per_s = asyncio.run(fill(settings, deep, depth))
            rates = asyncio.run(_take_turns(settings, [shallow, deep], num_jobs, rounds))
        yield {
            "queued": depth,
            "beside": few,
            "jobs": num_jobs,
            "rounds": rounds,
            **_row(*rates),
            "filled_per_s": filled_per_s,
        }


class Rate(msgspec.Struct):
    """Jobs/s of one round."""

    publish: float
    pull: float


def _row(shallow: list[Rate], deep: list[Rate]) -> Row:
    row: Row = {}
    for name in Rate.__struct_fields__:
        few, many = ([getattr(rate, name) for rate in rates] for rates in (shallow, deep))
        row[f"{name}_per_s"] = round(statistics.median(many), 1)
        row[f"{name}_ratio"] = round(statistics.median(m / f for f, m in zip(few, many, strict=True)), 3)
    return row


async def fill(settings: Settings, folder: str, depth: int) -> float:
    """Jobs/s. The broker is gone afterwards and its queue stays in `folder`."""
    quick = msgspec.structs.replace(settings.bus, sync_interval=UNSYNCED)
    with NatsServer(folder, settings=quick) as server:
        async with await Bus.connect(server.url, "bench", quick) as bus:
            await ensure_streams(bus, MODEL)
            started_s = time.perf_counter()
            for first in range(0, depth, NUM_AT_ONCE):
                await asyncio.gather(*(_publish(bus) for _ in range(first, min(first + NUM_AT_ONCE, depth))))
            return round(depth / (time.perf_counter() - started_s), 1)


async def _take_turns(settings: Settings, folders: list[str], num_jobs: int, rounds: int) -> list[list[Rate]]:
    rates: list[list[Rate]] = [[] for _ in folders]
    async with contextlib.AsyncExitStack() as stack:
        queues = [await stack.enter_async_context(opened(settings, folder)) for folder in folders]
        for number in range(rounds + 1):
            published = [await publish_rate(bus, num_jobs) for bus, _ in queues]
            pulled = [await pull_rate(queue, num_jobs) for _, queue in queues]
            if number:
                for rate, publish, pull in zip(rates, published, pulled, strict=True):
                    rate.append(Rate(publish, pull))
    return rates


@contextlib.asynccontextmanager
async def opened(settings: Settings, folder: str) -> AsyncIterator[tuple[Bus, WorkQueue]]:
    """A broker on a filled folder, and a reader of its queue that looks where a prefill worker does."""
    with NatsServer(folder, settings=settings.bus) as server:
        async with await Bus.connect(server.url, "bench", settings.bus) as bus:
            stages = (Stage.REWORK, Stage.PREFILL)
            queue = WorkQueue(bus, [Source(stage, lane, MODEL, BUILD) for lane in Lane for stage in stages])
            try:
                yield bus, queue
            finally:
                await queue.close()


async def publish_rate(bus: Bus, num_jobs: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_jobs):
        await _publish(bus)
    return num_jobs / (time.perf_counter() - started_s)


async def pull_rate(queue: WorkQueue, num_jobs: int) -> float:
    """Takes and settles: the queue is as deep afterwards as it was before the publishes."""
    started_s = time.perf_counter()
    for _ in range(num_jobs):
        delivery = await queue.next()
        await delivery.settle(Settle.ACK)
    return num_jobs / (time.perf_counter() - started_s)


async def _publish(bus: Bus) -> None:
    job = Job(id=f"bench-{next(_numbers)}", prompt_token_ids=PROMPT_TOKENS, max_tokens=64)
    assert job.id is not None
    headers = {MSG_ID_HEADER: job_msg_id(TENANT, job.id)}
    await submit_job(bus, TENANT, MODEL, Lane.INTERACTIVE, encode(job), headers)
