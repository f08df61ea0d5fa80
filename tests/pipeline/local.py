"""A whole pipeline in one process on a real nats-server: for tests that look at tokens rather than at crashes."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from schemas.events import Event, Finish, Start, Token
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.publish import submit_job
from services.bus.reader import follow
from services.bus.streams import ensure_consumers, ensure_streams
from services.decode.role import DecodeRole
from services.engine.arithmetics import Arithmetics
from services.engine.model import Model
from services.models.files import ModelFiles
from services.prefill.role import PrefillRole
from services.settings import Settings
from services.text.model import TextModel
from services.worker.process import Role, WorkerProcess
from services.worker.runtime import Runtime

SILENCE_S = 60.0

_numbers = itertools.count()  # a job's id is its own for as long as the broker lives, whatever pipeline ran it


class Answer(msgspec.Struct):
    """A job's whole stream, sorted by choice."""

    events: list[Event]

    @property
    def start(self) -> Start:
        (start,) = [event for event in self.events if isinstance(event, Start)]
        return start

    @property
    def end(self) -> Event:
        return self.events[-1]

    def token_ids(self, choice: int = 0) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token) and event.choice == choice]

    def text(self, choice: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, (Token, Finish)) and e.choice == choice)

    def finish(self, choice: int = 0) -> Finish:
        (finish,) = [event for event in self.events if isinstance(event, Finish) and event.choice == choice]
        return finish

    @property
    def essence(self) -> list[Event]:
        """What must be identical whatever the delivery: token and finish events, by choice."""
        kept = [event for event in self.events if isinstance(event, (Token, Finish))]
        return sorted(kept, key=lambda event: event.choice)


class LocalWorker(NamedTuple):
    bus: Bus
    runtime: Runtime
    role: Role[Any]
    process: WorkerProcess
    publisher: BeatPublisher


class LocalPipeline:
    """One prefill and one decode worker, each around a model of its own, and a client's connection."""

    def __init__(self, url: str, bus: Bus, text: TextModel, workers: tuple[LocalWorker, LocalWorker]) -> None:
        self.url = url
        self.bus = bus
        self.text = text
        self.prefill_worker, self.decode_worker = workers
        self.prefill, self.decode = (worker.runtime for worker in workers)

    async def submit(self, tenant: str = "default", **job: Any) -> str:
        """Publishes a job; its id."""
        job.setdefault("id", f"job-{next(_numbers)}")
        await submit_job(self.bus, tenant, self.text.slug, Lane.INTERACTIVE, encode(job))
        return str(job["id"])

    async def read(self, job: str, tenant: str = "default") -> Answer:
        return Answer([event async for event in follow(self.bus, tenant, job, SILENCE_S)])

    async def ask(self, tenant: str = "default", **job: Any) -> Answer:
        return await self.read(await self.submit(tenant, **job), tenant)

    async def ask_all(self, jobs: list[dict[str, Any]]) -> list[Answer]:
        """All at once."""
        names = [await self.submit(**job) for job in jobs]
        return list(await asyncio.gather(*(self.read(name) for name in names)))


@contextlib.asynccontextmanager
async def run_pipeline(
    url: str, files: ModelFiles, text: TextModel, models: tuple[Model, Model], settings: tuple[Settings, Settings]
) -> AsyncIterator[LocalPipeline]:
    """`models` and `settings`: of prefill, of decode. Of two arithmetics they make a mixed build."""
    arithmetics = Arithmetics(*(model.arithmetic for model in models))
    prefill, decode = (
        Runtime(own, files, text, model, arithmetics) for own, model in zip(settings, models, strict=True)
    )
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await Bus.connect(url, "client", settings[0].bus))
        await ensure_streams(bus, text.slug)
        await ensure_consumers(bus, text.slug, prefill.build)
        # In this order prefill hears decode's first beat, and need not wait for the next.
        first = await stack.enter_async_context(run_worker(url, prefill, PrefillRole))
        second = await stack.enter_async_context(run_worker(url, decode, DecodeRole))
        yield LocalPipeline(url, bus, text, (first, second))


@contextlib.asynccontextmanager
async def run_worker(
    url: str, runtime: Runtime, make_role: Callable[[Runtime, BeatTable], Role[Any]]
) -> AsyncIterator[LocalWorker]:
    """Serves until the block ends; closes `runtime`. What the worker fails with is raised at the end."""
    stop = asyncio.Event()
    async with await Bus.connect(url, "worker", runtime.settings.bus) as bus:
        beats = BeatTable(bus)
        await beats.start()
        role = make_role(runtime, beats)
        name = f"{role.name}-{id(runtime)}"
        process = WorkerProcess(name, runtime, bus, beats, role)
        publisher = BeatPublisher(bus, process.beat)
        await publisher.start()
        serving = asyncio.create_task(process.serve(stop, publisher.beat))
        try:
            yield LocalWorker(bus, runtime, role, process, publisher)
        finally:
            stop.set()
            await asyncio.wait([serving])
            await publisher.close()
            await beats.close()
            runtime.close()
        serving.result()


def settings_for(data_dir: Path, **groups: dict[str, Any]) -> Settings:
    """Small and quick: `groups` override by group and key."""
    plain: dict[str, Any] = {
        "kv": {"data_dir": str(data_dir)},
        "scheduler": {"grace_s": 1.0, "kv_memory_bytes": 800_000_000},
    }
    for group, values in groups.items():
        plain.setdefault(group, {}).update(values)
    return msgspec.convert(plain, Settings)
