"""Ends jobs that this gateway accepted and that will not end by themselves: overdue ones, and those of a dead build."""

import asyncio

from schemas.beat import BUILD_SILENT_AFTER_S
from schemas.errors import BuildGone, KvrelayError, NoWorker
from services.gateway.exchange import Exchange
from services.gateway.open_job import OpenJob
from services.gateway.readiness import Readiness

INTERVAL_S = 0.25

Needs = tuple[str, str, bool]
"""Model, build ("" for any) and whether the job has a token: who can end it."""


class Reaper:
    def __init__(self, exchange: Exchange, readiness: Readiness, silent_after_s: float = BUILD_SILENT_AFTER_S) -> None:
        self._exchange = exchange
        self._readiness = readiness
        self._silent_after_s = silent_after_s
        self._silent_since_s: dict[Needs, float] = {}  # what no workers are there for

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.reap(asyncio.get_running_loop().time())
            if not self._exchange.jobs:
                self._exchange.job_opened.clear()
                await self._exchange.job_opened.wait()

    def reap(self, now_s: float) -> None:
        """One look at all open jobs; `now_s` is the event loop's clock."""
        self._note_silence(now_s)
        for job in list(self._exchange.jobs.values()):
            error = None if job.is_ending else job.overdue(now_s) or self._abandoned(job, now_s)
            if error is not None:
                self._exchange.end(job, error)

    def _note_silence(self, now_s: float) -> None:
        """Who is heard again, or has no jobs, is forgotten."""
        wanted = {_needs(job) for job in self._exchange.jobs.values()}
        silent = {needs for needs in wanted if not self._readiness.can_end(*needs)}
        self._silent_since_s = {needs: self._silent_since_s.get(needs, now_s) for needs in silent}

    def _abandoned(self, job: OpenJob, now_s: float) -> KvrelayError | None:
        since_s = self._silent_since_s.get(_needs(job))
        if since_s is None or now_s - since_s < self._silent_after_s:
            return None
        if job.build:
            return BuildGone(f"the workers of build {job.build} are gone, and with them this request")
        return NoWorker(f"the workers of {job.model} are gone: try again later")


def _needs(job: OpenJob) -> Needs:
    return job.model, job.build, job.has_token
