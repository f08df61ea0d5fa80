"""Starts a worker process: connects, loads the model while it beats `warming`, then serves until SIGTERM."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable

from schemas.beat import Beat, ProcessRole
from services import telemetry
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.streams import ensure_consumers, ensure_streams
from services.settings import Settings
from services.worker.process import Role, WorkerProcess
from services.worker.runtime import Runtime, set_threads

log = logging.getLogger(__name__)


def run_worker(settings: Settings, bus_url: str, name: ProcessRole, make_role: Callable[[Runtime], Role]) -> int:
    """Blocks until the worker has ended; the exit code. Raises `SetupError` if it cannot start."""
    process = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
    telemetry.configure(name, process, settings)
    set_threads(settings)
    try:
        asyncio.run(_serve(settings, bus_url, name, process, make_role))
    finally:
        telemetry.shutdown()
    return 0


async def _serve(
    settings: Settings, bus_url: str, name: ProcessRole, process: str, make_role: Callable[[Runtime], Role]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await Bus.connect(bus_url, process, settings.bus) as bus:
        beats = BeatTable(bus)
        await beats.start()
        worker: WorkerProcess | None = None

        def beat() -> Beat:
            if worker is not None:
                return worker.beat()
            return Beat(process=process, role=name, state="warming", host=socket.gethostname(), pid=os.getpid())

        publisher = BeatPublisher(bus, beat)
        await publisher.start()
        loading = asyncio.create_task(asyncio.to_thread(Runtime.load, settings))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        runtime = await loading
        try:
            await ensure_streams(bus, runtime.text.slug)
            await ensure_consumers(bus, runtime.text.slug, runtime.build)
            worker = WorkerProcess(process, runtime, bus, beats, make_role(runtime))
            log.info("%s takes jobs of model %s", process, runtime.text.slug)
            await worker.serve(stop, publisher.beat)
        finally:
            if worker is not None:
                worker.state = "stopped"  # also when it fails: nobody need wait until it is silent for long
            stopping.cancel()
            await publisher.close()
            await beats.close()
            runtime.close()
