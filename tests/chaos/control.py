"""The driver's side of what lies under the processes (`interposed/`): sets faults, and asks what a process holds."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from tests.chaos.interposed.faultpage import ROLES, FaultPage, Faults

INTERPOSED = Path(__file__).parent / "interposed"
REPORT_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.02


class Holdings(msgspec.Struct):
    """What a process holds: tasks by the name of their coroutine, and counts of its own books."""

    tasks: dict[str, int]
    held: dict[str, int]


class Control:
    def __init__(self, folder: Path, kv_folder: Path) -> None:
        self._path = folder / "faults"
        self._page = FaultPage(str(self._path))
        self.env = {
            "CHAOS_PAGE": str(self._path),
            "CHAOS_KV": str(kv_folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(INTERPOSED), os.environ.get("PYTHONPATH", "")])),
        }

    def freeze_store(self, seconds: float) -> None:
        self._change(frozen_until_s=time.monotonic() + seconds)

    def fill_disk(self, seconds: float) -> None:
        self._change(full_until_s=time.monotonic() + seconds)

    def shift_clock(self, offset_s: float, *, pid: int = 0, role: str = "") -> None:
        """Of one process, or of all of a role, those yet to be born too, until the next shift."""
        self._change(clock_pid=pid or -1, clock_role=ROLES.index(role) if role else -1, clock_offset_s=offset_s)

    def _change(self, **values: float) -> None:
        self._page.write(self._page.read()._replace(**values))

    def heal(self) -> None:
        self._page.write(Faults(clock_pid=-1, clock_role=-1))

    async def holdings(self, pid: int) -> Holdings:
        """Raises `TimeoutError` if the process does not answer: its event loop hangs."""
        report = Path(f"{self._path}.{pid}")
        report.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            while not report.exists():
                await asyncio.sleep(LOOK_EVERY_S)
        return msgspec.json.decode(report.read_bytes(), type=Holdings)
