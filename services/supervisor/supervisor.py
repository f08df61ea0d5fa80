"""Starts a pipeline, keeps it running, stops it.

Order: the model is made ready while NATS starts, then all workers and the gateway together. They stop together as
well, and NATS last, so that jobs can be handed back.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys

from schemas.errors import SetupError
from services import telemetry
from services.config import Settings
from services.supervisor import plan, runtime_file
from services.supervisor.broker import Broker
from services.supervisor.child import Child, spawn
from services.supervisor.ports import settle_port
from services.supervisor.readiness import wait_until_ready

_log = logging.getLogger("kvrelay.supervisor")
_PAST_GRACE_S = 5.0  # what a worker may take to hand back its jobs once its own grace is over


def run(settings: Settings, num_prefill: int, num_decode: int) -> int:
    """`kvrelay up`: blocks until SIGTERM or SIGINT, then returns 0. Raises `SetupError` when it gives up."""
    with runtime_file.owned(settings.kv.data_dir):
        telemetry.configure("up", f"up-{os.getpid()}", plan.without_metrics(settings))
        try:
            return asyncio.run(Supervisor(settings, num_prefill, num_decode).run())
        finally:
            telemetry.shutdown()


class Supervisor:
    """Lives for one `run`. `settings` are the user's; what the children get has real addresses in it."""

    def __init__(self, settings: Settings, num_prefill: int, num_decode: int) -> None:
        self._settings = settings
        self._num_prefill, self._num_decode = num_prefill, num_decode
        self._port = settle_port(settings.api.host, settings.api.port)
        self._bus_url = settings.bus.url
        self._children: list[Child | Broker] = []  # the broker first, if it is ours
        self._ready = False
        self._asked_to_stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        work = asyncio.create_task(self._work())
        asked = asyncio.create_task(self._asked_to_stop.wait())
        await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await self._stop()
            work.cancel()
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return 0

    async def _work(self) -> None:
        """Never returns. Raises `SetupError`, after stopping everybody, when something cannot be kept running."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._start_bus_and_model(group)
                self._start_pipeline(group)
                await self._announce()
        except* SetupError as failed:
            await self._stop()
            raise failed.exceptions[0] from None

    async def _start_bus_and_model(self, group: asyncio.TaskGroup) -> None:
        """The model's conversion is the longer of the two on the first start, and runs in a process of its own."""
        program = plan.model_program(self._settings)
        process = await spawn(program)
        try:
            if not self._bus_url:
                broker = Broker(self._settings, self._tell)
                broker.start()
                self._children.append(broker)
                self._bus_url = broker.url
                group.create_task(broker.keep())
            if await process.wait() != 0:
                raise SetupError(f"the model {self._settings.compute.model!r} cannot be used; the lines above say why")
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()

    def _start_pipeline(self, group: asyncio.TaskGroup) -> None:
        settings = plan.with_addresses(self._settings, self._bus_url, self._port)
        if plan.crowded(settings, self._num_prefill + self._num_decode):
            _log.warning("more workers than cores: they will slow each other down")
        for program in plan.pipeline_programs(settings, self._num_prefill, self._num_decode):
            child = Child(program, self._tell)
            self._children.append(child)
            group.create_task(child.keep())

    async def _announce(self) -> None:
        found = await wait_until_ready(self._settings.api.host, self._port)
        if found.state != "ok":
            _log.warning(found.state, extra={"fields": {"reasons": "; ".join(found.reasons)}})
        self._ready = True
        self._tell()
        sys.stdout.write(f"ready {self._http_url} {self._bus_url}\n")
        sys.stdout.flush()

    @property
    def _http_url(self) -> str:
        return f"http://{self._settings.api.host}:{self._port}"

    def _tell(self) -> None:
        """Writes who runs where, once everybody does and whenever somebody was started again."""
        if self._ready:
            pids = {child.name: child.pid for child in self._children if child.pid is not None}
            here = runtime_file.RuntimeFile(pid=os.getpid(), http=self._http_url, nats=self._bus_url, pids=pids)
            runtime_file.write(self._settings.kv.data_dir, here)

    def _on_signal(self) -> None:
        """The first signal stops in order, the second at once."""
        if self._asked_to_stop.is_set():
            for child in self._children:
                child.kill()
        self._asked_to_stop.set()

    async def _stop(self) -> None:
        self._ready = False
        grace_s = self._settings.scheduler.grace_s + _PAST_GRACE_S
        others = [child for child in self._children if not isinstance(child, Broker)]
        await asyncio.gather(*(child.stop(grace_s) for child in others))
        for child in self._children:
            if isinstance(child, Broker):
                await child.stop(grace_s)
