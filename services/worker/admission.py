"""Who may run in this worker: any number of jobs together, or one suspect alone.

A suspect is a job whose last delivery died without a new event. It runs alone until its next event, so that a
job which brings its worker down takes no other with it and is the only one to be blamed.
"""

import asyncio


class Admission:
    def __init__(self) -> None:
        self._running: set[object] = set()
        self._suspects: list[object] = []
        self._changed = asyncio.Condition()

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    async def enter(self, job: object, *, suspect: bool) -> None:
        """Returns when `job` may run. A suspect waits for the jobs that run, and all later ones wait for it."""
        async with self._changed:
            if suspect:
                self._suspects.append(job)
            try:
                await self._changed.wait_for(lambda: self._may_run(job))
            except asyncio.CancelledError:
                self._forget(job)
                raise
            self._running.add(job)

    async def clear(self, job: object) -> None:
        """`job` made an event: it is no suspect any more."""
        if job in self._suspects:
            async with self._changed:
                self._suspects.remove(job)
                self._changed.notify_all()

    async def leave(self, job: object) -> None:
        async with self._changed:
            self._forget(job)

    async def wait_open(self) -> None:
        """Until no suspect runs or waits."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._suspects)

    def _may_run(self, job: object) -> bool:
        if self._suspects:
            return self._suspects[0] is job and not self._running
        return True

    def _forget(self, job: object) -> None:
        self._running.discard(job)
        if job in self._suspects:
            self._suspects.remove(job)
        self._changed.notify_all()
