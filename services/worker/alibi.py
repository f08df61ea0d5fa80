"""Who was not at fault: runs alone that ended without an event, in a worker that lives on and knows why.

A run alone counts against its job (`services.worker.process`), because a worker that dies cannot say what killed it.
One that lives says in its beats which of its runs the bus has ended: the broker was away, or the claim lapsed in a
cut connection. So broker restarts condemn nobody, however often they come. A worker that leaves writes it down
instead, since nobody may hear it afterwards. See infra/decisions/0017-lone-runs-condemn.md.
"""

from collections import deque
from collections.abc import Iterable

from schemas.beat import BEAT_INTERVAL_S
from schemas.errors import BusUnavailable, ClaimLost, KvrelayError
from schemas.events import Retry
from services.bus.beats import BeatTable
from services.worker.run import JobRun

MAX_TOLD = 32
PATIENCE_S = 1.5 * BEAT_INTERVAL_S


def alibi(tenant: str, job: str, claim: str) -> str:
    """Names one run of a job. A claim is given out once, but for a broker that crashed."""
    return f"{tenant}.{job}.{claim}"


def acquit(runs: Iterable[JobRun]) -> None:
    """For a worker that leaves: what these runs do not finish is no fault of their jobs."""
    for run in runs:
        if run.lone_attempt and run.on_event is not None:  # no event yet, which would say as much
            run.writer.put(Retry(attempt=run.lone_attempt - 1))
            run.lone_attempt = 0


class Alibis:
    """Those of `worker`, this process, are told in its beats; those of others are heard in theirs."""

    def __init__(self, worker: str, beats: BeatTable) -> None:
        self._worker = worker
        self._beats = beats
        self._told: deque[str] = deque(maxlen=MAX_TOLD)

    @property
    def told(self) -> list[str]:
        return list(self._told)

    async def num_lone_runs(self, run: JobRun) -> int:
        """The runs alone that speak against the job of `run`."""
        history = run.history
        if not history.num_lone_runs:
            return 0
        name = alibi(run.tenant, run.job, history.lone_claim)
        return history.num_lone_runs - await self.has(name, history.lone_worker)

    def note(self, run: JobRun, error: KvrelayError) -> None:
        """For a run alone that the bus has ended, also if it made events: a broker that crashes may lose them.

        Not if our steps stand still: then that cost the claim, and the job may have stopped them.
        """
        progress = run.delivery.progress
        hangs = progress is not None and progress.stands_still()
        if run.lone_attempt and isinstance(error, (ClaimLost, BusUnavailable)) and not hangs:
            self.give(alibi(run.tenant, run.job, run.claim))

    def give(self, name: str) -> None:
        self._told.append(name)

    async def has(self, name: str, worker: str) -> bool:
        """Whether `worker` says so. Who is alive is heard within a beat; who is silent has no alibi."""
        if worker == self._worker:
            return name in self._told
        before = self._beats.get(worker)
        if before is not None and name in before.alibis:
            return True
        await self._beats.wait_for(lambda table: table.get(worker) is not before, PATIENCE_S)
        after = self._beats.get(worker)
        return after is not None and name in after.alibis
