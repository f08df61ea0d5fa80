"""The life of a worker process: warm up, say so, take jobs one at a time, hand back, exit.

The stages differ in their `Role`; claims, poison, cancels, owners and shutdown are the same for both and live here.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from schemas.beat import Beat, ProcessRole, ProcessState
from schemas.errors import BusUnavailable, IdConflict, KvrelayError, Poisoned, Settle
from schemas.events import Retry
from schemas.subjects import Lane, Stage
from services import telemetry
from services.bus.beats import BeatTable
from services.bus.cancels import CancelListener
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.delivery import run as run_delivery
from services.bus.depth import num_unsettled
from services.bus.history import read_all
from services.bus.jetstream import Refused
from services.bus.micro import Tally
from services.bus.queue import WorkQueue
from services.bus.streams import Source
from services.engine.batch import Batch
from services.worker import canary, gauges
from services.worker.address import Address, address_of
from services.worker.admission import Admission
from services.worker.alibi import Alibis, acquit
from services.worker.drain import Drain
from services.worker.history import History
from services.worker.lanes import Lanes
from services.worker.peers import Peers
from services.worker.pin_keeper import PinKeeper
from services.worker.room import Permit, Room
from services.worker.run import JobRun
from services.worker.runs import Runs
from services.worker.runtime import Runtime
from services.worker.strays import Strays
from services.worker.taking import Taking

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LONE_RUNS = 3


class Role(Protocol[T]):
    """What a stage adds to the process."""

    name: ProcessRole
    stages: tuple[Stage, ...]  # whose queues it takes jobs from, best first
    feeds: ProcessRole | None  # jobs are taken only while a worker of this role and the same build beats
    batch: Batch

    def has_budget(self, lane: Lane, num_preparing: int) -> bool:
        """Whether one more job of a lane may be taken, while `num_preparing` of it have not joined the batch yet."""

    async def prepare(self, delivery: Delivery, address: Address) -> T:
        """What can be done while the job's history is read. May be cancelled; what it raises ends the job."""

    def expect(self, run: JobRun) -> None:
        """The job must wait to run alone: watches its deadline and its owner meanwhile."""

    async def work(self, run: JobRun, permit: Permit, prepared: Awaitable[T]) -> None:
        """The job, from its message to the last thing that must be stored before the message is settled."""

    def hand_back(self) -> None:
        """No more jobs come: those that run go to other workers, with what they have."""


class WorkerProcess:
    """One worker: made ready by its maker, run once by `serve`."""

    def __init__(self, process: str, runtime: Runtime, bus: Bus, beats: BeatTable, role: Role[Any]) -> None:
        self.process = process
        self.state: ProcessState = "ok"
        self.tally = Tally()
        self._runtime = runtime
        self._bus = bus
        self._beats = beats
        self._role = role
        self._stages = role.stages
        self._peers = Peers(beats, process, role.name, role.feeds, (runtime.text.slug, runtime.build))
        self._room = Room(runtime.pool, runtime.settings.scheduler.max_sequences)
        self._admission = Admission()
        self._alibis = Alibis(bus.name, beats)
        self._runs = Runs(bus, beats)
        self._jobs: set[asyncio.Task[None]] = set()
        self._num_offered = 0  # places that are held for jobs which have not come
        self._changed = asyncio.Event()
        self._lanes = Lanes(
            self._room.max_sequences, lambda lane: self._role.has_budget(lane, self._runs.num_preparing(lane))
        )
        self._taking = Taking(bus, self._take_jobs, self._lanes.wants)
        role.batch.after_pass = self._note_change
        runtime.blocks.must_reach_all = lambda: not self._peers.are_all_at(runtime.place)

    async def serve(self, stop: asyncio.Event, beat_now: Callable[[], Awaitable[None]]) -> None:
        """Takes jobs until `stop` is set, then ends what runs or hands it back. `beat_now` tells of a new state."""
        await beat_now()
        cancels = CancelListener(self._bus, self._runs.cancel)
        await cancels.start()
        loops = [
            asyncio.create_task(self._role.batch.run(), name="batch"),
            asyncio.create_task(self._runs.watch_owners(), name="owners"),
            asyncio.create_task(
                gauges.keep_fresh(self._bus, self._sources(), self._runtime, lambda: self._num_running), name="gauges"
            ),
            asyncio.create_task(self._watch_takers(), name="takers"),
            asyncio.create_task(canary.watch(self._runtime), name="canary"),
            asyncio.create_task(
                PinKeeper(self._runtime, self._bus, warms=Stage.PREFILL in self._role.stages).run(), name="pins"
            ),
            asyncio.create_task(Strays(self._bus, self._beats, self._runtime.text.slug).run(), name="strays"),
        ]
        loops.append(self._taking.start(self._sources()))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*loops, stopping], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()  # a loop only ends by an error, which ends the process
            drain = Drain(self._runtime.settings.scheduler.grace_s, self._peers, self._jobs)
            self.state = "draining"
            acquit(self._runs)
            await beat_now()
            await self._take_what_was_begun()
            await drain.run(self._is_queue_empty, self._taking.stop, self._role.hand_back)
        finally:
            stopping.cancel()
            for loop in loops:
                loop.cancel()
            await cancels.close()
            await self._taking.stop()

    def beat(self) -> Beat:
        troubles = self._runtime.troubles
        return Beat(
            process=self.process,
            role=self._role.name,
            state="degraded" if troubles and self.state == "ok" else self.state,
            reasons=troubles,
            model=self._runtime.text.slug,
            build=self._runtime.build,
            text=self._runtime.text_id,
            running=self._num_running,
            capacity=self._room.max_sequences,
            host=socket.gethostname(),
            pid=os.getpid(),
            place=self._runtime.place,
            alibis=self._alibis.told,
            meter=telemetry.meter(),
        )

    @property
    def _num_running(self) -> int:
        return self._room.num_sequences - self._num_offered

    def _sources(self) -> list[Source]:
        """Interactive jobs before batch jobs, and what was begun before what is new."""
        return [
            Source(stage, lane, self._runtime.text.slug, self._runtime.build)
            for lane in (Lane.INTERACTIVE, Lane.BATCH)
            for stage in self._stages
        ]

    async def _take_what_was_begun(self) -> None:
        """Who finishes its build's queues before it leaves takes no new jobs meanwhile: any build may do them."""
        begun = tuple(stage for stage in self._stages if stage is not Stage.PREFILL)
        if self._peers.is_last_stage and begun and begun != self._stages:
            await self._taking.stop()
            self._stages = begun
            self._taking.start(self._sources())

    async def _take_jobs(self, queue: WorkQueue) -> None:
        while True:
            await self._admission.wait_open()
            await self._peers.wait_for_taker()
            while not self._may_take():
                self._changed.clear()
                await self._changed.wait()
            permit = await self._room.enter(1, self._runtime.context_pages)
            delivery = None
            self._num_offered = 1
            try:
                if self._peers.take_on() and self._may_take():
                    delivery = await self._room.unless_wanted(queue.next())
            finally:
                self._num_offered = 0
                if delivery is None:
                    permit.close()
            if delivery is not None:
                self._lanes.begun(delivery.lane)
                job = asyncio.create_task(self._job(delivery, permit))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
                await asyncio.sleep(0)  # its first request goes out before the next job is asked for

    def _may_take(self) -> bool:
        """Not while the next stage's queue is full: what is taken then would only wait here with a claim."""
        return not self._runs.any_refused and self._lanes.wants(Lane.INTERACTIVE)

    def _note_change(self) -> None:
        """Of what may be taken."""
        self._changed.set()
        if self._lanes.has_reopened():
            self._taking.look_again()

    async def _watch_takers(self) -> None:
        """Stops the waiting for a job once nobody would take it on."""
        while True:
            await self._peers.wait_for_taker()
            await self._peers.wait_for_no_taker()
            self._room.call_off()

    async def _job(self, delivery: Delivery, permit: Permit) -> None:
        try:
            await run_delivery(delivery, lambda delivery: self._handle(delivery, permit))
        except Exception:  # the outermost loop: one job's bug must not end the others
            log.exception("%r failed for a reason that is a bug; it is abandoned and comes back", delivery)
        finally:
            permit.close()
            self._lanes.ended(delivery.lane)
            self._note_change()

    async def _handle(self, delivery: Delivery, permit: Permit) -> None:
        """The job of one delivery. What it raises decides how the message is settled."""
        address = address_of(delivery)
        context = telemetry.extract(delivery.headers)
        name = "decode" if delivery.stage is Stage.DECODE else "prefill"
        with telemetry.span(name, context, tenant=address.tenant, job=address.job):
            delivery.progress = self._role.batch.progress
            preparing = asyncio.create_task(self._role.prepare(delivery, address))
            try:
                history = History.of(await read_all(self._bus, address.tenant, address.job))
                await self._run(JobRun(self._bus, address, delivery, history), address, permit, preparing)
            finally:
                preparing.cancel()
                await asyncio.gather(preparing, return_exceptions=True)

    async def _run(self, run: JobRun, address: Address, permit: Permit, prepared: Awaitable[Any]) -> None:
        run.on_refused = self._room.call_off
        self._runs.add(run)
        try:
            await self._perform(run, self._work(run, address, permit, prepared))
        finally:
            self._runs.remove(run)
            self._admission.leave(run)
            run.close()

    async def _perform(self, run: JobRun, work: Coroutine[Any, Any, None]) -> None:
        telemetry.job_started(tenant=run.tenant, job=run.job, stage=self._role.name)
        code, began_ns, failed = "abandoned", time.perf_counter_ns(), False
        try:
            await run.work(work)
            code = "ok"
        except KvrelayError as error:
            code = error.code
            self._alibis.note(run, error)
            failed = error.settle in (Settle.ACK, Settle.DEAD_LETTER)
            if failed and not isinstance(error, IdConflict):
                await run.end(error)
            raise
        finally:
            stage = Stage.DECODE if run.stage is Stage.DECODE else Stage.PREFILL
            self.tally.note(stage, began_ns, code if failed else "")
            telemetry.job_ended(tenant=run.tenant, job=run.job, code=code, stage=self._role.name)

    async def _work(self, run: JobRun, address: Address, permit: Permit, prepared: Awaitable[Any]) -> None:
        is_ours = run.begun_by in (None, self._runtime.build)
        if run.history.end is None and not run.is_foreign and is_ours:
            await self._admit(run, address, permit)
        await self._role.work(run, permit, prepared)

    async def _admit(self, run: JobRun, address: Address, permit: Permit) -> None:
        """Waits until the job may run: alone, if its last delivery died without a new event.

        Without its room: a job that runs may be waiting for that.
        """
        num_lone_runs = await self._alibis.num_lone_runs(run)
        if num_lone_runs >= MAX_LONE_RUNS:
            raise Poisoned(f"the job brought its worker down {MAX_LONE_RUNS} times while it ran alone")
        fruitless = run.history.num_fruitless(run.stage, address.hop, run.delivery.num_delivered)
        if fruitless > 0:
            self._role.expect(run)
        await self._admission.enter(run, suspect=fruitless > 0, on_wait=permit.close)
        if fruitless > 0 and self.state != "draining":
            run.lone_attempt = num_lone_runs + 1
            run.put(Retry(attempt=run.lone_attempt))
            await run.settled()
            run.on_event = lambda: self._admission.clear(run)

    async def _is_queue_empty(self) -> bool:
        with contextlib.suppress(BusUnavailable, Refused):
            return sum([await num_unsettled(self._bus, source) for source in self._sources()]) == 0
        return False
