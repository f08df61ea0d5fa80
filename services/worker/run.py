"""One delivery of one job in this worker: its claim, its place in the chain, its deadline, what interrupts it.

Knows nothing of how the tokens are computed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from schemas.errors import Cancelled, ClaimLost, DeadlineExceeded, IdConflict, KvrelayError
from schemas.events import Error, Event
from schemas.handoff import Handoff
from schemas.job import MAX_TIMEOUT_S
from schemas.subjects import Stage
from services import telemetry
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.history import read_all
from services.bus.publish import publish_handoff
from services.bus.replies import ReplyWriter
from services.worker.address import Address
from services.worker.history import History


class JobRun:
    """Made on receipt; `work` runs the job's coroutine so that `interrupt` stops it wherever it waits."""

    def __init__(self, bus: Bus, address: Address, delivery: Delivery, history: History) -> None:
        self._bus = bus
        self.tenant = address.tenant
        self.job = address.job
        self.stage = delivery.stage
        self.delivery = delivery
        self.history = history
        self.claim = delivery.claim(address.hop)
        self.owner: str | None = None  # the gateway whose death ends the job
        self.is_preparing = True  # has not joined the batch yet
        self.on_event: Callable[[], None] | None = None  # called once, with the next event
        self.on_refused: Callable[[], None] | None = None  # called when the next stage's queue takes nothing
        self.is_refused = False
        self.lone_attempt = 0  # of a run that began alone
        delivery.on_lost = self._on_claim_lost
        delivery.job = (address.tenant, address.job)
        self.writer = ReplyWriter(
            bus,
            address.tenant,
            address.job,
            last=history.last,
            claim=self.claim,
            trace=telemetry.inject(),
            on_lost=self._on_lost,
            held=lambda: self.delivery.held,
        )
        self._timeout_s: float = MAX_TIMEOUT_S
        self._ttft_timeout_s: float | None = None
        self._reason: KvrelayError | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_foreign(self) -> bool:
        """True if the reply subject belongs to another queue message, which has the same id."""
        return self._belongs_elsewhere(self.history)

    @property
    def begun_by(self) -> str | None:
        """The build that began the job: its tokens, so the job ends there."""
        return self.history.start.build if self.history.start is not None else None

    def put(self, *events: Event) -> None:
        """Publishes on the job's reply subject, unless the claim has lapsed."""
        if self.delivery.held:
            self.writer.put(*events)
            if self.on_event is not None:
                on_event, self.on_event = self.on_event, None
                on_event()
        else:
            self._on_claim_lost()

    def interrupt(self, reason: KvrelayError) -> None:
        """Stops the job at its next await; the first reason counts."""
        if self._reason is None and self._task is not None and not self._task.done():
            self._reason = reason
            self._task.cancel()

    def set_deadline(self, timeout_s: float, ttft_timeout_s: float | None = None) -> None:
        """Seconds from the queue message's publication; past either the job ends with `deadline_exceeded`."""
        self._timeout_s, self._ttft_timeout_s = timeout_s, ttft_timeout_s
        if ttft_timeout_s is not None and ttft_timeout_s < timeout_s:
            self._expire_in(ttft_timeout_s - self.delivery.age_s(), "its first token")
        else:
            self._expire_in(timeout_s - self.delivery.age_s(), "its end")

    def made_first_token(self) -> None:
        """From now on only the job's end has a deadline."""
        if self._ttft_timeout_s is not None:
            self.set_deadline(self._timeout_s)

    def time_left(self) -> dict[str, float | None]:
        """What of its deadlines a hand-off takes along."""
        age_s, ttft_s = self.delivery.age_s(), self._ttft_timeout_s
        return {"timeout_left_s": self._timeout_s - age_s, "ttft_left_s": None if ttft_s is None else ttft_s - age_s}

    def watch_owner(self, owner: str | None, on_disconnect: str) -> None:
        self.owner = owner if on_disconnect == "cancel" else None

    def owned_by(self, owner: str) -> None:
        """Somebody else waits for the job now."""
        self.owner = owner

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

    def close(self) -> None:
        """Nothing more will be published."""
        self._clear_timer()
        self.delivery.on_lost = None
        self.writer.close()

    def _on_claim_lost(self) -> None:
        self.interrupt(ClaimLost(f"the claim on {self.job} lapsed"))

    def _on_lost(self) -> None:
        if self.writer.ended:
            self.interrupt(Cancelled(f"somebody else ended {self.job}"))
        else:
            self.interrupt(ClaimLost(f"another worker has {self.job}"))

    async def end(self, error: KvrelayError) -> None:
        """Publishes the end that `error` describes, and waits until it or somebody else's end is stored.

        Raises `ClaimLost` when the end is not this delivery's to write, and `IdConflict` when it would end the job
        of another message.
        """
        if self.history.end is not None:
            return
        if not self.delivery.held:
            raise ClaimLost(f"the claim on {self.job} lapsed") from error
        if self.is_foreign:
            raise self._conflict(error) from error
        if not self.writer.ending:  # else it had ended by itself when the error came
            self.writer.put(Error.of(error, self.delivery.origin if self.stage is Stage.PREFILL else None))
        await self.settled()
        if self.stage is Stage.PREFILL and self.history.start is None:
            # Of two messages with one id the first to write has it, and the other is not lost with its end.
            stored = History.of(await read_all(self._bus, self.tenant, self.job))
            if self._belongs_elsewhere(stored):
                raise self._conflict(error) from error

    async def publish(self, handoff: Handoff, stage: Stage) -> None:
        """Puts the job on the queue of its next stage, for as long as the claim is ours to do so.

        Raises `ClaimLost` when it is not.
        """
        if not self.delivery.held:
            raise ClaimLost(f"the claim on {self.job} lapsed")
        with telemetry.span("handoff", stage=stage, hop=handoff.hop):
            try:
                await publish_handoff(
                    self._bus,
                    handoff,
                    self.delivery.source.model,
                    self.delivery.lane,
                    stage,
                    telemetry.inject(),
                    held=self._goes_on,
                )
            finally:
                self.is_refused = False

    def _goes_on(self) -> bool:
        """Asked each time the queue of the next stage refuses the job."""
        self.is_refused = True
        if self.on_refused is not None:
            self.on_refused()
        return self.delivery.held

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

    def _belongs_elsewhere(self, history: History) -> bool:
        return self.stage is Stage.PREFILL and history.origin not in (None, self.delivery.origin)

    def _conflict(self, error: KvrelayError) -> IdConflict:
        return IdConflict(f"the id {self.job} already names another job; this one: {error.message}")
