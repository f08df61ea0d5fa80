"""How a worker leaves: it takes no more jobs, and those that it has end or go to other workers, within its grace.

Prompts are short, so prefill finishes those that it has. Decode hands its jobs back at once where another worker of
its build takes them; the last one of its build finishes what is queued first, because nobody else can.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from services.worker.grace import FINISH_SHARE, HAND_BACK_SHARE, Grace
from services.worker.peers import Peers

CHECK_S = 0.1
NOTICE_S = 0.2  # whoever was told to go at the same time has said so by then

log = logging.getLogger(__name__)


class Drain:
    """Made when the worker is told to go; run once. `jobs` are the tasks of those that run, kept up by the worker."""

    def __init__(self, grace_s: float, peers: Peers, jobs: set[asyncio.Task[None]]) -> None:
        self._grace = Grace(grace_s)
        self._peers = peers
        self._jobs = jobs

    async def run(
        self,
        is_queue_empty: Callable[[], Awaitable[bool]],
        stop_taking: Callable[[], Awaitable[None]],
        hand_back: Callable[[], None],
    ) -> None:
        """Jobs are taken until `stop_taking`; `hand_back` makes those that run leave."""
        if self._peers.is_last_stage:
            await self._finish_queue(is_queue_empty)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace.left_s(FINISH_SHARE)):
                await stop_taking()  # first, or what is handed back would come here again
        if not self._peers.is_last_stage:
            await self._wait_for_jobs(FINISH_SHARE)
        hand_back()
        await self._wait_for_jobs(HAND_BACK_SHARE)
        num_left = len(self._jobs)
        for job in self._jobs:
            job.cancel()
        await self._wait_for_jobs(1.0)
        log.info("drained in %.1f s, %d jobs left to come back by themselves", self._grace.passed_s, num_left)

    async def _finish_queue(self, is_queue_empty: Callable[[], Awaitable[bool]]) -> None:
        """Returns once nothing of this build is queued or runs, or another worker takes over, or it is time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace.left_s(FINISH_SHARE)):
                await asyncio.sleep(NOTICE_S)
                while not self._peers.take_over():
                    nothing_comes = not self._jobs and self._peers.feed_no_more(self._grace.passed_s)
                    if nothing_comes and await is_queue_empty():
                        return
                    await asyncio.sleep(CHECK_S)

    async def _wait_for_jobs(self, share: float) -> None:
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=self._grace.left_s(share))
