"""Who may run in this worker: any number of jobs together, or one suspect alone.

A suspect is a job whose last delivery died without a new event. It runs alone until its next event, so that a
job which brings its worker down takes no other with it and is the only one to be blamed.
"""

import asyncio
from collections.abc import Callable


def _nothing() -> None:
    return None


class Admission:
    def __init__(self) -> None:
        self._running: set[object] = set()
        self._suspects: list[object] = []
        self._changed = asyncio.Event()

    async def enter(self, job: object, *, suspect: bool, on_wait: Callable[[], None] = _nothing) -> None:
        """Returns when `job` may run. A suspect waits for the jobs that run, and all later ones wait for it.

        `on_wait` is called first if it cannot at once: to let go of what those that run may need.
        """
        if suspect:
            self._suspects.append(job)
        if not self._may_run(job):
            on_wait()
        try:
            await self._until(lambda: self._may_run(job))
        except asyncio.CancelledError:
            self.leave(job)
            raise
        self._running.add(job)

    def clear(self, job: object) -> None:
        """`job` made an event: it is no suspect any more."""
        if job in self._suspects:
            self._suspects.remove(job)
            self._changed.set()

    def leave(self, job: object) -> None:
        self._running.discard(job)
        self.clear(job)
        self._changed.set()

    async def wait_open(self) -> None:
        """Until no suspect runs or waits."""
        await self._until(lambda: not self._suspects)

    def _may_run(self, job: object) -> bool:
        if self._suspects:
            return self._suspects[0] is job and not self._running
        return True

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed = self._changed if not self._changed.is_set() else asyncio.Event()
            await self._changed.wait()
