"""A broker, and a worker process on it whose role does what a test says: no model, no KV."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.store import KVStore
from schemas.beat import ProcessRole
from schemas.events import Done, Event, Start, Usage
from schemas.subjects import Lane, Stage
from schemas.wire import encode
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.publish import submit_job
from services.bus.server import NatsServer
from services.bus.streams import ensure_consumers, ensure_streams
from services.engine.batch import Batch
from services.settings import Bus as BusSettings
from services.settings import Scheduler, Settings
from services.worker.address import Address
from services.worker.process import WorkerProcess
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.bus.throwaway import throwaway_server
from tests.engine.stub_engine import StubEngine, make_pool
from tests.kvstore.blocks import GEOMETRY, IDENTITY

BUILD = "0123456789ab"
MAX_SEQUENCES = 4
# Short, so that abandoned jobs come back soon.
SETTINGS = Settings(bus=BusSettings(ack_wait_s=0.6), scheduler=Scheduler(max_sequences=MAX_SEQUENCES, grace_s=0.1))

Work = Callable[[JobRun, Permit], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("worker"), settings=SETTINGS.bus) as running:
        yield running


@pytest.fixture
def ack_wait_s() -> float:
    """Of the consumers that `worker` has. More, by parametrize, for a claim that must outlive a busy machine."""
    return SETTINGS.bus.ack_wait_s


@pytest.fixture
async def bus(server: NatsServer, ack_wait_s: float) -> AsyncIterator[Bus]:
    settings = msgspec.structs.replace(SETTINGS.bus, ack_wait_s=ack_wait_s)
    async with await Bus.connect(server.url, "worker", settings) as bus:
        yield bus


class FakeRole:
    """Each job runs `work`, which a test sets by the job's id."""

    name: ProcessRole = "prefill"
    stages: tuple[Stage, ...] = (Stage.PREFILL,)
    feeds: ProcessRole | None = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.works: dict[str, Work] = {}
        self.handed_back = asyncio.Event()
        self.timeout_s = 60.0  # of a job that waits to run alone

    def has_budget(self, lane: Lane, num_preparing: int) -> bool:
        return True

    def expect(self, run: JobRun) -> None:
        run.set_deadline(self.timeout_s)

    async def prepare(self, delivery: Delivery, address: Address) -> None:
        return None

    async def work(self, run: JobRun, permit: Permit, prepared: Awaitable[None]) -> None:
        if run.history.end is None:
            await self.works[run.job](run, permit)
            await run.settled()

    def hand_back(self) -> None:
        self.handed_back.set()


class Worker:
    """A running worker process, and how a client of it publishes."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        settings: Settings = SETTINGS,
        name: ProcessRole = "prefill",
        feeds: ProcessRole | None = None,
    ) -> None:
        self.bus = bus
        self.model = model
        self.pool = make_pool(MAX_SEQUENCES)
        self.role = FakeRole(Batch(StubEngine(self.pool), chunk_tokens=16, token_budget=16))  # type: ignore[arg-type]
        self.role.name, self.role.feeds = name, feeds
        self.beats = BeatTable(bus)
        runtime: Any = SimpleNamespace(
            settings=settings,
            text=SimpleNamespace(slug=model),
            build=BUILD,
            text_id="text",
            pool=self.pool,
            context_pages=1,
            store=KVStore([], IDENTITY, GEOMETRY),
            other_stores=[],
            blocks=SimpleNamespace(),
            place="here",
            canary=None,
            troubles=[],
            engine=SimpleNamespace(num_passes=0),
            pinned=SimpleNamespace(prefixes=[], refresh=lambda: False),
            on_store_thread=asyncio.to_thread,
        )
        self.process = WorkerProcess(bus.name, runtime, bus, self.beats, self.role)

    async def submit(self, job: str, work: Work | None = None, lane: Lane = Lane.INTERACTIVE) -> str:
        """Publishes a job that runs `work`; its origin."""
        if work is not None:
            self.role.works[job] = work
        body = encode({"id": job, "prompt": "x"})
        return await (await submit_job(self.bus, "default", self.model, lane, body)).origin(self.bus)


@pytest.fixture
async def worker(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    model = f"m{abs(hash(request.node.name))}"
    await ensure_streams(bus, model)
    await ensure_consumers(bus, model, BUILD)
    worker = Worker(bus, model)
    stop = asyncio.Event()

    async def beat_now() -> None:
        return None

    serving = asyncio.create_task(worker.process.serve(stop, beat_now))
    yield worker
    stop.set()
    await serving
    assert worker.pool.num_held == 0 and worker.pool.num_unreserved == MAX_SEQUENCES


def start_of(run: JobRun) -> Start:
    return Start(
        job=run.job,
        origin=run.delivery.origin,
        digest="d",
        build=BUILD,
        seed=1,
        prompt_tokens=1,
        cached_tokens=0,
    )


def done() -> Event:
    return Done(usage=Usage(prompt_tokens=1, completion_tokens=0))
