"""`kvrelay up` as a test drives it: real processes, found by name, killed at will."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.supervisor import runtime_file
from tests.models.default_model import DATA_DIR, default_model

READY_TIMEOUT_S = 90.0
LOOK_EVERY_S = 0.05


class Up:
    def __init__(self, data_dir: Path, process: asyncio.subprocess.Process, http: str, nats: str) -> None:
        self.data_dir = data_dir
        self.process = process
        self.http = http
        self.nats = nats

    @property
    def names(self) -> list[str]:
        """Of the children."""
        running = runtime_file.read(self.data_dir)
        assert running is not None, "the supervisor is gone"
        return list(running.pids)

    def pid(self, name: str) -> int:
        """Of a child by its name: `prefill-0`, `decode-0`, `gateway`, `nats`. Raises `KeyError`."""
        running = runtime_file.read(self.data_dir)
        assert running is not None, "the supervisor is gone"
        return running.pids[name]

    def kill(self, name: str) -> int:
        """SIGKILL; the pid that died."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def replaced(self, name: str, dead: int) -> None:
        """Until the supervisor has started another process in place of `dead`."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while self.pid(name) == dead:
                await asyncio.sleep(LOOK_EVERY_S)

    async def kvrelay(self, *arguments: str, exit_code: int = 0) -> list[str]:
        """Runs a command on this pipeline's data folder; the lines that it printed. Fails for another exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "services.cli.main", *arguments, "--data", str(self.data_dir),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        printed, _ = await process.communicate()
        assert process.returncode == exit_code, printed.decode()
        return printed.decode().splitlines()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), READY_TIMEOUT_S)


@asynccontextmanager
async def running_up(data_dir: Path, *arguments: str, log: Path | None = None, **env: str) -> AsyncIterator[Up]:
    """A pipeline on `data_dir` that shares the prepared model with the other tests; logs to `log`, or to stderr."""
    default_model()
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / "models").exists():
        (data_dir / "models").symlink_to(DATA_DIR / "models")
    with contextlib.nullcontext() if log is None else log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli.main", "up", "--data", str(data_dir), "--port", "0", *arguments,
            env={**os.environ, "KVRELAY_API_METRICS_PORT": "-1", "KVRELAY_SCHEDULER_GRACE_S": "2", **env},
            stdout=asyncio.subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
        words = line.decode().split()
        assert words[:1] == ["ready"], f"up did not become ready: {line!r}"
        yield Up(data_dir, process, words[1], words[2])
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 60.0)
            except TimeoutError:
                process.kill()
                await process.wait()
