"""A server of somebody else's as a child of the supervisor: NATS, Valkey."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from schemas.errors import SetupError
from services.supervisor.backoff import Backoff

_log = logging.getLogger("kvrelay.supervisor")


class Server(Protocol):
    """Its methods block, `kill` but for a moment. It comes back under the same `url`."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def log_path(self) -> Path: ...

    def alive(self) -> bool: ...

    def start(self) -> object: ...

    def wait(self) -> int | None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class KeptServer:
    """Like `Child`, for a server that must be up before anybody else starts, and in the same place when it returns.

    Starting it blocks the supervisor's loop for about 0.1 s, on purpose: the kernel ties a child's life to the
    thread that made it.
    """

    def __init__(self, name: str, server: Server, on_start: Callable[[], None]) -> None:
        self.name = name
        self._server = server
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
                raise SetupError(f"{self.name} cannot be kept running; see {self._server.log_path}")
            _log.warning("restart", extra={"fields": {"child": self.name, "delay_s": delay_s}})
            if await self._stopped_within(delay_s):
                return
            started_s = clock()
            with contextlib.suppress(SetupError):  # counted as a death when it is waited for next
                self.start()

    async def stop(self, grace_s: float) -> None:
        """Ends the server; what it must keep is complete at any moment, so `grace_s` is not needed."""
        self._stopping.set()
        await asyncio.to_thread(self._server.stop)

    def kill(self) -> None:
        """SIGKILL now."""
        self._server.kill()

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()
