"""Starts a worker process: connects, loads the model while it beats `warming`, then serves until it is told to go."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace

from schemas.beat import Beat, ProcessRole
from schemas.drain import DrainReply
from services import telemetry
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.drain import DrainListener
from services.bus.micro import MicroService, Tally
from services.bus.streams import set_up
from services.settings import Settings
from services.worker.build_check import wait_for_place
from services.worker.grace import Curfew, leave_hanging_threads
from services.worker.process import Role, WorkerProcess
from services.worker.runtime import Prepared, Runtime, set_threads

log = logging.getLogger(__name__)

MakeRole = Callable[[Runtime, BeatTable], Role[Any]]


def run_worker(
    settings: Settings, bus_url: str, name: ProcessRole, make_role: MakeRole, *, rolling: bool = False
) -> int:
    """Blocks until the worker has ended; the exit code. `rolling`: it may serve beside another build of its model.

    Raises `SetupError` if it cannot start.
    """
    process = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
    telemetry.configure(name, process, settings)
    set_threads(settings)
    try:
        asyncio.run(_Life(settings, process, name).run(bus_url, make_role, rolling))
    finally:
        telemetry.shutdown()
    leave_hanging_threads()
    return 0


class _Life:
    """A worker from its first beat to its last."""

    def __init__(self, settings: Settings, process: str, name: ProcessRole) -> None:
        self._settings = settings
        self._began_s = time.monotonic()
        self._stop = asyncio.Event()
        self._curfew = Curfew(settings.scheduler.grace_s)
        self._worker: WorkerProcess | None = None
        self._beat = Beat(process=process, role=name, state="warming", host=socket.gethostname(), pid=os.getpid())

    async def run(self, bus_url: str, make_role: MakeRole, rolling: bool) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave)
        async with await Bus.connect(bus_url, self._beat.process, self._settings.bus) as bus:
            beats, ear = BeatTable(bus), DrainListener(bus, self._beat.process, self._on_drain)
            service, publisher = MicroService(bus, self._look), BeatPublisher(bus, self._now)
            for part in (beats, ear, service, publisher):  # whoever hears the first beat may ask at once
                await part.start()
            serving = asyncio.create_task(self._serve(bus, beats, publisher, make_role, rolling))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
                if self._worker is None:
                    serving.cancel()  # what it loads on another thread is nothing to wait for
                await asyncio.gather(serving, return_exceptions=self._worker is None and self._stop.is_set())
            finally:
                self._beat = replace(self._now(), state="stopped")  # also when it fails: nobody need wait for it
                self._worker = None
                stopping.cancel()
                for part in (publisher, service, ear, beats):
                    await part.close()

    async def _serve(
        self, bus: Bus, beats: BeatTable, publisher: BeatPublisher, make_role: MakeRole, rolling: bool
    ) -> None:
        runtime = await self._load(publisher)
        try:
            if not rolling:
                await wait_for_place(beats, self._beat)
            await set_up(bus, runtime.text.slug, runtime.build)
            # Libraries and model stay. A collection that looks at all of them again takes a quarter of a second, in
            # which no sequence gets a token.
            gc.collect()
            gc.freeze()
            self._worker = WorkerProcess(self._beat.process, runtime, bus, beats, make_role(runtime, beats))
            log.info("%s takes jobs of model %s", self._beat.process, runtime.text.slug)
            await self._worker.serve(self._stop, publisher.beat)
        finally:
            runtime.close()

    async def _load(self, publisher: BeatPublisher) -> Runtime:
        """On a thread of its own, which may be left behind: asyncio waits for those of its default executor."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(thread, Prepared.of, self._settings, self._beat.role)
        self._beat = replace(self._beat, model=prepared.files.slug, build=prepared.build, text=prepared.text_id)
        await publisher.beat()
        runtime = await loop.run_in_executor(thread, Runtime.load, self._settings, prepared)
        thread.shutdown(wait=False)
        return runtime

    def _leave(self) -> None:
        self._stop.set()
        self._curfew.begin()

    def _on_drain(self) -> DrainReply:
        self._leave()
        grace_s = self._settings.scheduler.grace_s
        return DrainReply(process=self._beat.process, grace_s=grace_s, running=self._now().running)

    def _look(self) -> tuple[Beat, Tally]:
        return self._now(), self._worker.tally if self._worker is not None else Tally()

    def _now(self) -> Beat:
        beat = self._worker.beat() if self._worker is not None else self._beat
        return replace(beat, uptime_s=round(time.monotonic() - self._began_s, 3))
