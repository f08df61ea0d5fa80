"""Which lanes' jobs a worker takes now: batch jobs leave a part of it to those who wait for an answer."""

from collections.abc import Callable

from schemas.beat import left_to_batches
from schemas.subjects import Lane


class Lanes:
    """`has_budget`: whether one more job of a lane may be begun."""

    def __init__(self, max_sequences: int, has_budget: Callable[[Lane], bool]) -> None:
        self._max_batch_jobs = max(1, left_to_batches(max_sequences))
        self._has_budget = has_budget
        self._num_batch_jobs = 0
        self._refused: set[Lane] = set()

    def wants(self, lane: Lane) -> bool:
        """Batch jobs never where none of the other lane would be taken."""
        wanted = self._has_budget(Lane.INTERACTIVE)
        if wanted and lane is Lane.BATCH:
            wanted = self._num_batch_jobs < self._max_batch_jobs and self._has_budget(lane)
        if not wanted:
            self._refused.add(lane)
        return wanted

    def has_reopened(self) -> bool:
        """Whether a lane is wanted that was not; once."""
        reopened = {lane for lane in self._refused if self.wants(lane)}
        self._refused -= reopened
        return bool(reopened)

    def begun(self, lane: Lane) -> None:
        self._num_batch_jobs += lane is Lane.BATCH

    def ended(self, lane: Lane) -> None:
        self._num_batch_jobs -= lane is Lane.BATCH
