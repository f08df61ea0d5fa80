"""The jobs that a worker has in hand, by tenant and id, and who may end them from outside: cancels, and dead owners."""

import asyncio
import contextlib
from collections.abc import Iterator

from schemas.beat import OWNER_SILENT_AFTER_S
from schemas.errors import BusUnavailable, Cancelled
from schemas.subjects import Lane
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.watchers import watcher_of
from services.worker.run import JobRun

OWNER_CHECK_S = 1.0


class Runs:
    def __init__(self, bus: Bus, beats: BeatTable) -> None:
        self._bus = bus
        self._beats = beats
        self._runs: dict[tuple[str, str], JobRun] = {}
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(list(self._runs.values()))

    def num_preparing(self, lane: Lane) -> int:
        """Those that have not joined the batch yet."""
        return sum(run.is_preparing and run.delivery.lane is lane for run in self._runs.values())

    @property
    def any_refused(self) -> bool:
        """Whether one waits for room in the next stage's queue."""
        return any(run.is_refused for run in self._runs.values())

    def get(self, tenant: str, job: str) -> JobRun | None:
        return self._runs.get((tenant, job))

    def add(self, run: JobRun) -> None:
        self._runs[run.tenant, run.job] = run
        self._added.set()

    def remove(self, run: JobRun) -> None:
        """Unless a later delivery of the job has its place."""
        if self.get(run.tenant, run.job) is run:
            del self._runs[run.tenant, run.job]

    def cancel(self, tenant: str, job: str) -> None:
        run = self.get(tenant, job)
        if run is not None:
            run.interrupt(Cancelled("the job was cancelled"))

    async def watch_owners(self) -> None:
        """Ends the jobs of gateways that died, unless their readers have gone on to another one. Until cancelled."""
        while True:
            if not self._runs:
                self._added.clear()
                await self._added.wait()
            await asyncio.sleep(OWNER_CHECK_S)
            orphans = [run for run in self if self._is_orphan(run)]
            await asyncio.gather(*(self._pass_on(run) for run in orphans))

    def _is_orphan(self, run: JobRun) -> bool:
        return run.owner is not None and self._beats.owner_silent(run.owner, OWNER_SILENT_AFTER_S)

    async def _pass_on(self, run: JobRun) -> None:
        with contextlib.suppress(BusUnavailable):  # asked again a little later
            heir = await watcher_of(self._bus, run.tenant, run.job) if self._beats.alive("gateway") else None
            if heir is not None:
                run.owned_by(heir)
            else:
                run.owner_died()
