"""Starts a pipeline, keeps it running, replaces its workers when asked to (SIGHUP), stops it.

Order: the model is made ready while NATS starts, then all workers and the gateway together. They stop together as
well, and the servers last, so that jobs can be handed back.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from schemas.errors import SetupError
from services import telemetry
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.config import Settings
from services.supervisor import plan, runtime_file
from services.supervisor.broker import BlockServer, Broker
from services.supervisor.child import Child, Program, spawn
from services.supervisor.kept_server import KeptServer
from services.supervisor.ports import settle_port
from services.supervisor.readiness import wait_until_ready
from services.supervisor.rollout import Newcomer, Rollout

_log = logging.getLogger("kvrelay.supervisor")
_PAST_GRACE_S = 5.0  # what a worker may take to hand back its jobs once its own grace is over


class Asked(NamedTuple):
    """What `kvrelay up` was asked for. `reload` reads all sources of settings again; raises `SetupError`."""

    settings: Settings
    crew: plan.Crew
    reload: Callable[[], Settings]
    rolling: bool = False


def run(asked: Asked) -> int:
    """`kvrelay up`: blocks until SIGTERM or SIGINT, then returns 0. Raises `SetupError` when it gives up."""
    with runtime_file.owned(asked.settings.kv.data_dir):
        telemetry.configure("up", f"up-{os.getpid()}", plan.without_metrics(asked.settings))
        try:
            return asyncio.run(Supervisor(asked).run())
        finally:
            telemetry.shutdown()


class Supervisor:
    """Lives for one `run`. The settings are the user's; what the children get has real addresses in it."""

    def __init__(self, asked: Asked) -> None:
        settings = asked.settings
        self._asked = asked
        self._settings = settings
        self._port = settle_port(settings.api.host, settings.api.port)
        self._bus_url = settings.bus.url
        self._children: list[Child | KeptServer] = []  # the servers first, if they are ours
        self._newcomers: list[Newcomer] = []
        self._ready = False
        self._rollout = runtime_file.Rollout()
        self._group: asyncio.TaskGroup | None = None
        self._asked_to_stop = asyncio.Event()
        self._asked_to_roll = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._asked_to_roll.set)
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
                await self._start_servers_and_model(group)
                self._start_pipeline(group)
                await self._announce()
                self._group = group
                await self._roll_when_asked()
        except* SetupError as failed:
            await self._stop()
            raise failed.exceptions[0] from None

    async def _start_servers_and_model(self, group: asyncio.TaskGroup) -> None:
        """The model's conversion is the longer of the two on the first start, and runs in a process of its own."""
        program = plan.model_program(self._settings)
        process = await spawn(program)
        try:
            if not self._bus_url:
                self._bus_url = self._start_server(Broker(self._settings, self._tell), group)
            if self._settings.kv.redis_url == "embedded":
                self._start_server(BlockServer(self._settings, self._tell), group)
            if await process.wait() != 0:
                raise SetupError(f"the model {self._settings.compute.model!r} cannot be used; the lines above say why")
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()

    def _start_server(self, server: KeptServer, group: asyncio.TaskGroup) -> str:
        """Its url."""
        server.start()
        self._children.append(server)
        group.create_task(server.keep())
        return server.url

    def _start_pipeline(self, group: asyncio.TaskGroup) -> None:
        settings = plan.with_addresses(self._settings, self._bus_url, self._port)
        if plan.crowded(settings, sum(self._asked.crew)):
            _log.warning("more workers than cores: they will slow each other down")
        for program in plan.pipeline_programs(settings, self._asked.crew, rolling=self._asked.rolling):
            child = Child(program, self._tell)
            self._children.append(child)
            group.create_task(child.keep())

    async def _announce(self) -> None:
        found = await wait_until_ready(msgspec.structs.replace(self._settings.api, port=self._port))
        if found.state != "ok":
            _log.warning(found.state, extra={"fields": {"reasons": "; ".join(found.reasons)}})
        self._ready = True
        self._tell()
        sys.stdout.write(f"ready {self._http_url} {self._bus_url}\n")
        sys.stdout.flush()

    @property
    def _http_url(self) -> str:
        scheme = "https" if self._settings.api.tls_cert_file else "http"
        return f"{scheme}://{self._settings.api.host}:{self._port}"

    def _tell(self) -> None:
        """Writes who runs where, once everybody does and whenever somebody was started again."""
        if self._ready:
            pids = {child.name: child.pid for child in self._children if child.pid is not None}
            here = runtime_file.RuntimeFile(
                pid=os.getpid(), http=self._http_url, nats=self._bus_url, pids=pids, rollout=self._rollout
            )
            runtime_file.write(self._settings.kv.data_dir, here)

    async def _roll_when_asked(self) -> None:
        """Never returns. A rollout that fails leaves the old workers running, and says why."""
        while True:
            await self._asked_to_roll.wait()
            self._asked_to_roll.clear()
            self._rollout = runtime_file.Rollout(number=self._rollout.number + 1, is_running=True)
            error = ""
            try:
                await self._roll()
            except SetupError as failed:
                error = failed.message
                _log.error("the workers were not all replaced: %s", error)
            self._rollout = runtime_file.Rollout(number=self._rollout.number, error=error)
            self._newcomers.clear()
            self._tell()

    async def _roll(self) -> None:
        rolling = runtime_file.may_change_build(self._settings.kv.data_dir) or self._asked.rolling
        settings = plan.reloaded(self._settings, self._asked.reload())
        olds = [child for child in self._children if isinstance(child, Child) and child.name != "gateway"]
        programs = plan.worker_programs(
            plan.with_addresses(settings, self._bus_url, self._port),
            self._asked.crew,
            rolling=rolling,
            beside=[child.program for child in olds],
        )
        async with await Bus.connect(self._bus_url, f"up-{os.getpid()}", settings.bus) as bus:
            beats = BeatTable(bus)
            await beats.start()
            try:
                rollout = Rollout(beats, self._grace_s, self._start_newcomer, self._replace, self._say)
                await rollout.run(list(zip(olds, programs, strict=True)))
            finally:
                await beats.close()
        self._settings = settings

    def _start_newcomer(self, old: Child, program: Program) -> Newcomer:
        child = Child(program, self._tell)
        self._newcomers.append(Newcomer(old, child, asyncio.create_task(child.keep())))
        return self._newcomers[-1]

    def _replace(self, newcomer: Newcomer) -> None:
        """From now on the pipeline ends when the new worker cannot be kept running."""
        self._children[self._children.index(newcomer.old)] = newcomer.child
        assert self._group is not None
        self._group.create_task(_outcome(newcomer.keeping))

    def _say(self, step: str) -> None:
        _log.info("rolling restart: %s", step)
        self._rollout = msgspec.structs.replace(self._rollout, step=step)
        self._tell()

    @property
    def _grace_s(self) -> float:
        return self._settings.scheduler.grace_s + _PAST_GRACE_S

    def _on_signal(self) -> None:
        """The first signal stops in order, the second at once."""
        if self._asked_to_stop.is_set():
            for child in [*self._children, *(newcomer.child for newcomer in self._newcomers)]:
                child.kill()
        self._asked_to_stop.set()

    async def _stop(self) -> None:
        self._ready = False
        others = [child for child in self._children if isinstance(child, Child)]
        others += [newcomer.child for newcomer in self._newcomers if newcomer.child not in others]
        await asyncio.gather(*(child.stop(self._grace_s) for child in others))
        for child in self._children:
            if isinstance(child, KeptServer):
                await child.stop(self._grace_s)


async def _outcome(keeping: asyncio.Task[None]) -> None:
    """Ends as `keeping` does."""
    await keeping
