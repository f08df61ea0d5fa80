"""One delivery of a work-queue message: its claim, and the only place where messages are settled.

The rules are DESIGN section 4, "a delivery". A claim is renewed by progress acks that the broker confirms; its age
counts from before the last confirmed one, by this process's own clock. Older than ack_wait, somebody else may have
the message: then nothing is settled, because an ack, nak or progress of ours would act on that delivery.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from schemas.errors import BusUnavailable, Internal, InvalidRequest, KvrelayError, Settle
from schemas.subjects import DEFAULT_TENANT, MSG_ID_HEADER, Lane, Stage, check_job_id, claim, derived_job_id
from services.bus.burial import GivenUp, bury
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.progress import Progress
from services.bus.streams import NS, Source

log = logging.getLogger("kvrelay.bus")

RENEWALS_PER_WAIT = 3
REDELIVER_DELAY_S = 1.0

ACK = b"+ACK"
PROGRESS = b"+WPI"
TERM = b"+TERM"
NAK = b"-NAK"


@dataclass(frozen=True)
class Receipt:
    """What the broker says of a delivery, in its reply subject `$JS.ACK.<...>`."""

    num_delivered: int
    stream_sequence: int
    consumer_sequence: int
    published_at: float  # unix seconds by the broker

    @classmethod
    def parse(cls, reply: str) -> "Receipt":
        """Both spellings: with and without the domain and account that a cluster adds."""
        parts = reply.split(".")
        first = 4 if len(parts) == 9 else 6
        delivered, stream, consumer, nanoseconds = (int(part) for part in parts[first : first + 4])
        return cls(delivered, stream, consumer, nanoseconds / NS)


class Delivery:
    """Made by `WorkQueue`; its claim is renewed from the first moment until `settle`, `abandon`, or being lost.

    A worker sets `progress` (its step counter), `on_lost` (called when the claim is gone: stop the job), and `job`,
    (tenant, id), as soon as it has read them.
    """

    def __init__(self, bus: Bus, source: Source, message: Msg, created_ms: int, ack_wait_s: float) -> None:
        self.data = message.data
        self.subject = message.subject
        self.headers: dict[str, str] = message.headers or {}
        self.source = source
        self.stage: Stage = source.stage
        self.lane: Lane = source.lane
        self.receipt = Receipt.parse(message.reply)
        self.sequence = self.receipt.stream_sequence
        self.num_delivered = self.receipt.num_delivered
        self.stream_created_ms = created_ms
        self.origin = derived_job_id(self.sequence, created_ms)
        self.published_at = self.receipt.published_at
        self.progress: Progress | None = None
        self.on_lost: Callable[[], None] | None = None
        self._bus = bus
        self._reply = message.reply
        self._ack_wait_s = ack_wait_s
        self._held_since_s = elapsed_s()
        self._lost = False
        self._over = False
        self.job: tuple[str, str] | None = None
        self._renew_now = asyncio.Event()
        self._forget = bus.on_connection(up=self._renew_now.set, first=True)
        self._renewal = asyncio.create_task(self._renew(), name=f"claim {self.origin}")

    def __repr__(self) -> str:
        return f"<delivery {self.num_delivered} of {self.stage} {self.origin}>"

    def age_s(self) -> float:
        """Seconds since the message was published, by the broker's clock."""
        return self._bus.now() - self.published_at

    def claim(self, hop: int = 0) -> str:
        """The value of `Kvrelay-Claim` on every event that this delivery writes."""
        return claim(self.stage, hop, self.num_delivered)

    @property
    def held(self) -> bool:
        """True while nobody else can have the message."""
        return not self._lost and not self._over and self._age_of_claim_s() <= self._ack_wait_s

    async def settle(self, how: Settle, delay_s: float = 0.0, error: KvrelayError | None = None) -> bool:
        """Ends the delivery as `how` says. True once the broker has confirmed it.

        False when the claim is not ours any more, or the broker stays silent until it is not: whoever gets the
        message next finds what was done. `delay_s` is for REDELIVER, `error` for DEAD_LETTER. Twice is once.
        """
        if self._over:
            return False
        self._renewal.cancel()  # a renewal behind a nak would hold the message up
        try:
            while how is not Settle.DROP and self.held:
                try:
                    if how is Settle.DEAD_LETTER:
                        await self._bury(error or Internal("dead-lettered without a reason"))
                    await self._bus.request(self._reply, _answer(how, delay_s), timeout_s=self._ack_wait_s)
                    return True
                except BusUnavailable:
                    await asyncio.sleep(self._ack_wait_s / 10)
            if how is not Settle.DROP:
                log.warning("%r: the claim is gone, left alone instead of %s", self, how.value)
            return False
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stops renewing without settling: the message comes back to somebody after ack_wait."""
        self._over = True
        self._forget()
        self._renewal.cancel()

    async def _bury(self, error: KvrelayError) -> None:
        tenant, job = self._names()
        message = GivenUp(self.data, self.subject, self.origin, self.num_delivered)
        await bury(self._bus, tenant, job, message, error)

    def _names(self) -> tuple[str, str]:
        """(tenant, job) for the dead letter's subject: as the worker found out, else without reading the payload."""
        if self.job is not None:
            return self.job
        parts = self.headers.get(MSG_ID_HEADER, "").split(".")
        if self.stage is Stage.PREFILL:
            tenant = self.subject.split(".")[2]
            named = len(parts) == 2 and parts[0] == tenant
            with contextlib.suppress(InvalidRequest):
                return tenant, check_job_id(parts[1]) if named else self.origin
            return tenant, self.origin
        return (parts[0], parts[1]) if len(parts) == 4 else (DEFAULT_TENANT, self.origin)

    def _age_of_claim_s(self) -> float:
        return elapsed_s() - self._held_since_s

    async def _renew(self) -> None:
        pause_s = self._ack_wait_s / RENEWALS_PER_WAIT
        while True:
            self._renew_now.clear()
            if self._age_of_claim_s() > self._ack_wait_s:
                return self._lose("ack_wait is over")
            if self.progress is not None and self.progress.stands_still():
                log.error("%r: its worker stands still, no longer renewed", self)
                await asyncio.sleep(max(0.0, self._ack_wait_s - self._age_of_claim_s()))
                return self._lose("its worker stands still")
            asked_s = elapsed_s()
            try:
                await self._bus.request(self._reply, PROGRESS, timeout_s=pause_s)
            except BusUnavailable:
                pass
            else:
                # A reply that took us past ack_wait may have renewed the next delivery's claim instead of ours.
                if self._age_of_claim_s() > self._ack_wait_s:
                    return self._lose("ack_wait was over before the renewal")
                self._held_since_s = asked_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, asked_s + pause_s - elapsed_s())):
                    await self._renew_now.wait()

    def _lose(self, why: str) -> None:
        self._lost = True
        self._forget()
        log.warning("%r: claim lost: %s", self, why)
        if self.on_lost is not None:
            self.on_lost()


Handler = Callable[[Delivery], Awaitable[Settle | None]]


async def run(delivery: Delivery, handler: Handler, redeliver_delay_s: float = REDELIVER_DELAY_S) -> Settle:
    """Runs `handler` on a delivery and settles it: ACK when it returns None, else as it, or its error, says.

    The one place where errors become the fate of a message. Writing the job's end is the handler's business. When
    it is cancelled or fails in an unknown way, the message is abandoned and comes back after ack_wait.
    """
    error: KvrelayError | None = None
    try:
        how = await handler(delivery) or Settle.ACK
    except KvrelayError as raised:
        error, how = raised, raised.settle
    except BaseException:
        delivery.abandon()
        raise
    await delivery.settle(how, redeliver_delay_s if how is Settle.REDELIVER else 0.0, error)
    return how


def _answer(how: Settle, delay_s: float) -> bytes:
    if how is Settle.ACK:
        return ACK
    if how is Settle.DEAD_LETTER:
        return TERM
    if how is Settle.HAND_BACK:
        return NAK
    return NAK + b" " + msgspec.json.encode({"delay": int(delay_s * NS)})
