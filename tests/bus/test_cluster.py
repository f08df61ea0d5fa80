"""A cluster of three that loses a server, and then its leader: publishers, workers and readers all go on."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from schemas.errors import BusUnavailable
from schemas.events import Event, Token, is_end
from schemas.subjects import MSG_ID_HEADER, REPLIES_STREAM, Lane, Stage
from services.bus import delivery
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.depth import num_unsettled
from services.bus.history import read_all
from services.bus.jetstream import Refused, call
from services.bus.publish import job_msg_id, submit_job
from services.bus.queue import WorkQueue
from services.bus.reader import follow
from services.bus.replies import ReplyWriter
from services.bus.streams import Source, ensure_consumers, ensure_streams
from services.bus.watch import watch
from services.settings import Bus as BusSettings
from tests.bus.cluster import Cluster, leader_of, num_current, running_cluster
from tests.bus.conftest import BUILD
from tests.bus.events import ending, token, whole

MODEL = "m"
NUM_JOBS = 12
NUM_TOKENS = 60
SETTINGS = BusSettings(replicas=3)

pytestmark = pytest.mark.timeout(240)


class Progress:
    """Tokens that readers saw, and the longest time in which none of them saw one."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.gap_s = 0.0
        self._seen_s = time.monotonic()
        self._changed = asyncio.Condition()

    async def note(self, event: Event) -> None:
        if isinstance(event, Token):
            now_s = time.monotonic()
            self.gap_s = max(self.gap_s, now_s - self._seen_s)
            self.num_tokens, self._seen_s = self.num_tokens + 1, now_s
            async with self._changed:
                self._changed.notify_all()

    async def more(self, num_tokens: int) -> None:
        goal = self.num_tokens + num_tokens
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_tokens >= goal)


async def tried(action: Callable[[], Awaitable[object]]) -> None:
    """Again and again while there is no leader."""
    while True:
        try:
            await action()
            return
        except (BusUnavailable, Refused):
            await asyncio.sleep(0.1)


async def work(bus: Bus) -> None:
    """A worker that takes jobs for ever and goes on where the last one stopped."""
    queue = WorkQueue(bus, [Source(Stage.PREFILL, Lane.INTERACTIVE, MODEL, BUILD)])
    jobs: set[asyncio.Task[object]] = set()
    try:
        while True:
            jobs.add(asyncio.create_task(delivery.run(await queue.next(), lambda taken: generate(bus, taken))))
    finally:
        for job in jobs:
            job.cancel()
        await queue.close()


async def generate(bus: Bus, taken: Delivery) -> None:
    job = taken.data.decode()
    messages = await read_all(bus, "default", job)
    stored = [event for message in messages for event in message.events]
    if stored and is_end(stored[-1]):
        return
    writer = ReplyWriter(
        bus, "default", job, messages[-1].sequence if messages else 0, taken.claim(), held=lambda: taken.held
    )
    if not stored:
        writer.put(whole(0)[0])
    for index in range(sum(isinstance(event, Token) for event in stored), NUM_TOKENS):
        writer.put(token(index))
        await asyncio.sleep(0.1)  # a step
    writer.put(*ending(NUM_TOKENS))
    await writer.drained()


async def ask(client: Bus, gateway: Bus, job: str, progress: Progress) -> tuple[list[Event], list[Event]]:
    """What a plain reader and the gateway see of a job that is published by the client."""
    headers = {MSG_ID_HEADER: job_msg_id("default", job)}
    await tried(lambda: submit_job(client, "default", MODEL, Lane.INTERACTIVE, job.encode(), headers))

    async def read(events: AsyncIterator[Event]) -> list[Event]:
        seen = []
        async for event in events:
            seen.append(event)
            await progress.note(event)
        return seen

    plain, watched = await asyncio.gather(
        read(follow(client, "default", job)), read(watch(gateway, "default", job))
    )  # fmt: skip
    return plain, watched


async def lose_one_after_the_other(bus: Bus, cluster: Cluster, progress: Progress) -> None:
    """First a server that follows, then the one that leads the replies."""
    await progress.more(2 * NUM_JOBS)
    leader = await leader_of(bus, REPLIES_STREAM)
    follower = cluster.others(leader)[0]
    await asyncio.to_thread(cluster.kill, follower)
    await progress.more(4 * NUM_JOBS)
    await asyncio.to_thread(cluster.start, follower)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(BusUnavailable):
                if await num_current(bus, REPLIES_STREAM) == 3:
                    break
            await asyncio.sleep(0.1)
    progress.gap_s = 0.0
    leader = await leader_of(bus, REPLIES_STREAM)
    await asyncio.to_thread(cluster.kill, leader)
    await progress.more(4 * NUM_JOBS)
    await asyncio.to_thread(cluster.start, leader)


@pytest.mark.slow
async def test_every_stream_is_exact_through_the_loss_of_a_server_and_of_the_leader(tmp_path: Path) -> None:
    progress = Progress()
    with running_cluster(tmp_path) as cluster:
        async with contextlib.AsyncExitStack() as stack:
            names = ("client", "gateway", "worker-1", "worker-2")
            client, gateway, *workers = [
                await stack.enter_async_context(await Bus.connect(cluster.url, name, SETTINGS)) for name in names
            ]
            await tried(lambda: ensure_streams(client, MODEL))
            await tried(lambda: ensure_consumers(client, MODEL, BUILD))
            working = [asyncio.create_task(work(bus)) for bus in workers]
            asking = [
                asyncio.create_task(ask(client, gateway, f"first-{number}", progress)) for number in range(NUM_JOBS)
            ]
            losing = asyncio.create_task(lose_one_after_the_other(client, cluster, progress))
            while not losing.done():  # publishing goes on while servers come and go
                asking.append(asyncio.create_task(ask(client, gateway, f"later-{len(asking)}", progress)))
                await asyncio.wait([losing], timeout=1.0)
            await losing
            answers = await asyncio.gather(*asking)
            assert all(plain == watched == whole(NUM_TOKENS) for plain, watched in answers)
            for number in range(NUM_JOBS):
                stored = [e for m in await read_all(client, "default", f"first-{number}") for e in m.events]
                assert stored == whole(NUM_TOKENS), "one end, and no event missing or twice"
            source = Source(Stage.PREFILL, Lane.INTERACTIVE, MODEL, BUILD)
            async with asyncio.timeout(20):
                while await num_unsettled(client, source):
                    await asyncio.sleep(0.1)
            for one in working:
                one.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            assert (await call(client, f"STREAM.INFO.{REPLIES_STREAM}"))["config"]["num_replicas"] == 3
    print(f"\n{len(answers)} streams equal, longest silence around the leader's end {progress.gap_s:.1f} s")
