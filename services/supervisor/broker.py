"""The embedded NATS server as a child of the supervisor."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from schemas.errors import SetupError
from services.bus.server import NatsServer
from services.config import Settings
from services.supervisor.backoff import Backoff
from services.supervisor.child import tethered

_log = logging.getLogger("kvrelay.supervisor")


class Broker:
    """Like `Child`, for a server that must be up before anybody else starts, and on the same port when it returns.

    Starting it blocks the supervisor's loop for about 0.1 s, on purpose: the kernel ties a child's life to the
    thread that made it.
    """

    name = "nats"

    def __init__(self, settings: Settings, on_start: Callable[[], None]) -> None:
        self._server = NatsServer(settings.kv.data_dir, settings=settings.bus, wrapper=tethered())
        self._on_start = on_start
        self._stopping = asyncio.Event()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.alive() else None

    def start(self) -> None:
        """Returns once it answers. Raises `SetupError`."""
        self._server.start()
        self._on_start()

    async def keep(self) -> None:
        """Runs until `stop`; starts the server again when it dies. Raises `SetupError` once it is pointless."""
        backoff = Backoff()
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while True:
            exit_code = await asyncio.to_thread(self._server.wait)
            if self._stopping.is_set():
                return
            delay_s = backoff.died(1 if exit_code is None else exit_code, clock() - started_s)
            if delay_s is None:
                raise SetupError(f"nats-server cannot be kept running; see {self._server.log_path}")
            _log.warning("restart", extra={"fields": {"child": self.name, "delay_s": delay_s}})
            if await self._stopped_within(delay_s):
                return
            started_s = clock()
            with contextlib.suppress(SetupError):  # counted as a death when it is waited for next
                self.start()

    async def stop(self, grace_s: float) -> None:
        """Ends the server; its files are complete at any moment, so `grace_s` is not needed."""
        self._stopping.set()
        await asyncio.to_thread(self._server.stop)

    def kill(self) -> None:
        """SIGKILL now."""
        self._server.kill()

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()
