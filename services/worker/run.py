"""One delivery of one job in this worker: its claim, its place in the chain, its deadline, what interrupts it.

Knows nothing of how the tokens are computed.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from schemas.errors import Cancelled, DeadlineExceeded, KvrelayError, Settle
from schemas.events import Error, Event
from schemas.job import MAX_TIMEOUT_S
from services.bus.delivery import Delivery
from services.bus.replies import ReplyWriter
from services.worker.history import History


class Superseded(KvrelayError):
    """Another worker has the job, or may have it: publish nothing, settle nothing."""

    settle = Settle.DROP


class JobRun:
    """Made on receipt; `work` runs the job's coroutine so that `interrupt` stops it wherever it waits."""

    def __init__(self, tenant: str, job: str, delivery: Delivery, history: History, writer: ReplyWriter) -> None:
        self.tenant = tenant
        self.job = job
        self.delivery = delivery
        self.history = history
        self.writer = writer
        self.owner: str | None = None  # the gateway whose death ends the job
        self.trace: dict[str, str] = {}
        self._timeout_s = MAX_TIMEOUT_S
        self._reason: KvrelayError | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.tenant, self.job

    def put(self, *events: Event) -> None:
        """Publishes on the job's reply subject, unless the claim has lapsed."""
        if self.delivery.held:
            self.writer.put(*events)
        else:
            self.interrupt(Superseded(f"the claim on {self.job} lapsed"))

    def interrupt(self, reason: KvrelayError) -> None:
        """Stops the job at its next await; the first reason counts."""
        if self._reason is None and self._task is not None and not self._task.done():
            self._reason = reason
            self._task.cancel()

    def set_deadline(self, timeout_s: float, ttft_timeout_s: float | None = None) -> None:
        """Seconds from the queue message's publication; past either the job ends with `deadline_exceeded`."""
        self._timeout_s = timeout_s
        if ttft_timeout_s is not None and ttft_timeout_s < timeout_s:
            self._expire_in(ttft_timeout_s - self.delivery.age_s(), "its first token")
        else:
            self.made_first_token()

    def made_first_token(self) -> None:
        """From now on only the job's end has a deadline."""
        self._expire_in(self.seconds_left(), "its end")

    def seconds_left(self) -> float:
        return self._timeout_s - self.delivery.age_s()

    def watch_owner(self, owner: str | None, on_disconnect: str) -> None:
        self.owner = owner if on_disconnect == "cancel" else None

    def owner_died(self) -> None:
        self.interrupt(Cancelled(f"the process that asked for this job, {self.owner}, is gone"))

    async def work(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs `coroutine`. Raises the reason if it was interrupted, else what it raises."""
        self._task = asyncio.create_task(coroutine)
        try:
            await self._task
        except asyncio.CancelledError:
            if self._reason is None:
                self._task.cancel()
                raise
            raise self._reason from None
        finally:
            self._clear_timer()

    async def end(self, error: KvrelayError) -> None:
        """Publishes the end that `error` describes and waits until it, or somebody else's end, is stored."""
        if not self.delivery.held:
            raise Superseded(f"the claim on {self.job} lapsed") from error
        self.writer.put(Error.of(error))
        await self.settled()

    async def settled(self) -> int:
        """Waits until everything that was put is stored; the sequence of the last message."""
        return await self.writer.drained()

    def _expire_in(self, seconds: float, what: str) -> None:
        self._clear_timer()
        error = DeadlineExceeded(f"the job did not reach {what} in time")
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self.interrupt, error)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
