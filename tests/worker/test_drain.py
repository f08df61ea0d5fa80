"""How a worker leaves: what it finishes, what it hands back, and that it is gone in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from schemas.beat import Beat, ProcessRole, ProcessState
from schemas.events import Done
from schemas.subjects import Stage, stream_name
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.streams import ensure_consumers, ensure_streams
from services.settings import Scheduler, Settings
from services.worker.drain import CHECK_S
from services.worker.room import Permit
from services.worker.run import JobRun
from tests.bus.polling import until
from tests.bus.throwaway import throwaway_server
from tests.worker.conftest import BUILD, SETTINGS, Worker, done, start_of
from tests.worker.test_process import events_of

LONG_S = 60.0  # no test waits for it


class Other:
    """Another process, as its beats show it."""

    def __init__(self, bus: Bus, model: str, role: ProcessRole, state: ProcessState = "ok", running: int = 0) -> None:
        self.state: ProcessState = state
        self.running = running
        self._said = model, role
        self.publisher = BeatPublisher(bus, self._beat)

    def _beat(self) -> Beat:
        model, role = self._said
        return Beat(
            process=f"other-{role}", role=role, state=self.state, model=model, build=BUILD, running=self.running
        )

    async def becomes(self, state: ProcessState, running: int = 0) -> None:
        self.state, self.running = state, running
        await self.publisher.beat()


class Serving(NamedTuple):
    worker: Worker
    stop: asyncio.Event
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def serving(
    bus: Bus,
    model: str,
    *others: Other,
    grace_s: float = LONG_S,
    name: ProcessRole = "prefill",
    feeds: ProcessRole | None = None,
) -> AsyncIterator[Serving]:
    """A worker that runs beside `others`, whose beats it has heard."""
    await ensure_streams(bus, model)
    await ensure_consumers(bus, model, BUILD)
    settings = Settings(bus=SETTINGS.bus, scheduler=Scheduler(max_sequences=2, grace_s=grace_s))
    worker = Worker(bus, model, settings, name, feeds)
    stop = asyncio.Event()

    async def beat_now() -> None:
        return None

    async with contextlib.AsyncExitStack() as stack:
        await worker.beats.start()
        stack.push_async_callback(worker.beats.close)
        for other in others:
            await other.publisher.start()
            stack.push_async_callback(other.publisher.close)
        await worker.beats.wait_for(lambda table: len(table.alive()) == len(others))
        task = asyncio.create_task(worker.process.serve(stop, beat_now))
        stack.callback(task.cancel)
        yield Serving(worker, stop, task)


class Gate:
    """A job that waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, run: JobRun, permit: Permit) -> None:
        run.put(start_of(run))
        await run.settled()
        self.begun.set()
        await self.open.wait()
        run.put(done())


async def num_queued(bus: Bus, model: str) -> int:
    return int((await call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, model)}"))["state"]["messages"])


async def test_the_last_of_its_build_finishes_the_queue_and_leaves(bus: Bus):
    """Five jobs, two places: three still wait when it is told to go."""
    async with serving(bus, "last") as last:
        gates = [Gate() for _ in range(5)]
        for number, gate in enumerate(gates):
            await last.worker.submit(f"last-{number}", gate)
        await asyncio.wait_for(asyncio.gather(*(gate.begun.wait() for gate in gates[:2])), 10)
        last.stop.set()
        for gate in gates:
            await asyncio.wait_for(gate.begun.wait(), 10)
            assert not last.worker.role.handed_back.is_set()
            gate.open.set()
        await asyncio.wait_for(last.task, 10)
        assert last.worker.process.state == "draining"
        assert await num_queued(bus, "last") == 0
        for number in range(5):
            assert isinstance((await events_of(bus, f"last-{number}"))[-1], Done)


async def test_the_last_decode_worker_waits_for_prompts_that_are_on_their_way(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.worker.peers.LAST_BEAT_S", 0.0)
    prefill = Other(bus, "way", "prefill", running=1)
    async with serving(bus, "way", prefill, name="decode") as last:
        last.stop.set()
        gate = Gate()
        await prefill.becomes("ok", running=1)
        await asyncio.wait_for(last.worker.beats.wait_for(lambda _: last.worker.process.state == "draining"), 10)
        await last.worker.submit("way", gate)
        await asyncio.wait_for(gate.begun.wait(), 10)
        gate.open.set()
        await until(lambda: is_empty(bus, "way"))
        await asyncio.wait([last.task], timeout=5 * CHECK_S)
        assert not last.task.done(), "the prefill worker still has a prompt"
        await prefill.becomes("draining", running=0)
        await asyncio.wait_for(last.task, 10)


async def is_empty(bus: Bus, model: str) -> bool:
    return await num_queued(bus, model) == 0


async def test_jobs_go_to_a_peer_at_once(bus: Bus):
    """Also to one that comes while the last one finishes its queue."""
    for name, state in (("peer", "ok"), ("worn", "degraded"), ("late", "draining")):
        peer = Other(bus, name, "prefill", state)  # type: ignore[arg-type]
        async with serving(bus, name, peer) as one:
            gate, waiting = Gate(), Gate()
            await one.worker.submit(name, gate)
            await asyncio.wait_for(gate.begun.wait(), 10)
            one.stop.set()
            if state == "draining":
                await until_draining(one)
                await peer.becomes("ok")
            await asyncio.wait_for(one.worker.role.handed_back.wait(), 10)
            await one.worker.submit(f"{name}-2", waiting)
            gate.open.set()
            await asyncio.wait_for(one.task, 10)
            assert not waiting.begun.is_set(), "nothing was taken any more"


async def until_draining(one: Serving) -> None:
    await one.worker.beats.wait_for(lambda _: one.worker.process.state == "draining")


async def test_a_job_that_hangs_is_left_within_the_grace(bus: Bus):
    async with serving(bus, "hangs", grace_s=0.5) as one:
        gate = Gate()
        await one.worker.submit("hangs", gate)
        await asyncio.wait_for(gate.begun.wait(), 10)
        one.stop.set()
        await asyncio.wait_for(one.task, 10)
        assert one.worker.role.handed_back.is_set() and not one.worker.process._jobs
        assert await num_queued(bus, "hangs") == 1, "it comes back"
        assert one.worker.pool.num_held == 0


async def test_a_worker_without_its_broker_leaves_all_the_same(tmp_path: Path):
    with throwaway_server(tmp_path, settings=SETTINGS.bus) as own:
        bus = await Bus.connect(own.url, "worker", SETTINGS.bus)
        async with bus, serving(bus, "alone", grace_s=0.5) as one:
            gate = Gate()
            await one.worker.submit("alone", gate)
            await asyncio.wait_for(gate.begun.wait(), 10)
            await asyncio.to_thread(own.kill)
            one.stop.set()
            await asyncio.wait_for(one.task, 10)
            assert one.worker.pool.num_held == 0


@pytest.mark.parametrize("ack_wait_s", [3.0])
@pytest.mark.parametrize("gone", ["draining", "stopped"])
async def test_no_job_is_begun_that_nobody_would_take_on(bus: Bus, gone: ProcessState):
    """Its decode workers leave while it waits for a prompt: another build's prefill takes that."""
    decode = Other(bus, gone, "decode")
    async with serving(bus, gone, decode, feeds="decode") as prefill:
        first, second = Gate(), Gate()
        first.open.set()
        await prefill.worker.submit(f"{gone}-1", first)
        await asyncio.wait_for(first.begun.wait(), 10)
        await decode.becomes(gone)
        await asyncio.wait_for(prefill.worker.beats.wait_for(lambda table: not table.working("decode", gone)), 10)
        await until(lambda: asks_for_nothing(bus, gone))
        await prefill.worker.submit(f"{gone}-2", second)
        assert await num_queued(bus, gone) == 1 and not second.begun.is_set()
        await decode.becomes("ok")
        await asyncio.wait_for(second.begun.wait(), 10)
        second.open.set()
        await until(lambda: is_empty(bus, gone))


async def asks_for_nothing(bus: Bus, model: str) -> bool:
    info = await call(bus, f"CONSUMER.INFO.{stream_name(Stage.PREFILL, model)}.interactive")
    return int(info["num_waiting"]) == 0


async def test_who_only_waits_for_a_job_runs_none(bus: Bus):
    async with serving(bus, "idle") as one:
        await until(lambda: asks_for_something(bus, "idle"))
        assert one.worker.process.beat().running == 0
        gate = Gate()
        await one.worker.submit("idle", gate)
        await asyncio.wait_for(gate.begun.wait(), 10)
        assert one.worker.process.beat().running == 1
        gate.open.set()


async def asks_for_something(bus: Bus, model: str) -> bool:
    return not await asks_for_nothing(bus, model)
