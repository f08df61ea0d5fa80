"""One process of the pipeline that is kept running until it is told to stop."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from schemas.errors import SetupError
from services.supervisor import tether
from services.supervisor.backoff import Backoff

_log = logging.getLogger("kvrelay.supervisor")


class Program(NamedTuple):
    """What to run. `env` is the whole environment."""

    name: str
    argv: list[str]
    env: dict[str, str]


def tethered() -> list[str]:
    """What to put before a command so that it dies with this process."""
    return [sys.executable, "-E", "-P", "-S", tether.__file__, str(os.getpid())]


async def spawn(program: Program) -> asyncio.subprocess.Process:
    """Starts `program` tethered to this process, in a group of its own: a Ctrl-C in the terminal is ours to pass on.

    What it prints goes to stderr, since stdout belongs to the `ready` line.
    """
    return await asyncio.create_subprocess_exec(
        *tethered(),
        *program.argv,
        env=program.env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    )


class Child:
    """Owned by one task that runs `keep`; `stop` may be called by another, once."""

    def __init__(self, program: Program, on_start: Callable[[], None] = lambda: None) -> None:
        self.program = program
        self.name = program.name
        self.restarts = 0
        self._on_start = on_start
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None while it is not running."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and running else None

    @property
    def has_exited(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def keep(self) -> None:
        """Runs until `stop`; starts again what dies. Raises `SetupError` once it is pointless."""
        backoff = Backoff()
        clock = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            self._process = await spawn(self.program)
            started_s = clock()
            if self._stopping.is_set():  # `stop` came while it was being started
                self._process.terminate()
            self._on_start()
            code = await self._process.wait()
            if self._stopping.is_set():
                return
            delay_s = backoff.died(code, clock() - started_s)
            if delay_s is None:
                raise SetupError(f"{self.name} cannot be kept running: it {_death(code)}; its log says why")
            _log.warning("restart", extra={"fields": {"child": self.name, "cause": _death(code), "delay_s": delay_s}})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            self.restarts += 1

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to whoever is still there after `grace_s`. Returns when it is gone."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            _log.warning("killed", extra={"fields": {"child": self.name, "grace_s": grace_s}})
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL now, instead of what is left of the grace."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _death(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"
