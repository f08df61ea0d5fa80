"""The writer of a job's events: what a worker puts is published in order, batched, one message in flight a job.

`put` costs some microseconds and never waits: the step that made a token goes on while the broker stores it. What
becomes of a message that was refused, lost, or cut off by a reconnect is decided by reading the last stored one
(`judge`): the chain of DESIGN section 4. `hub` carries the messages of all writers of a process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from nats.aio.msg import Msg

from schemas.errors import ClaimLost, Internal
from schemas.events import Event
from schemas.subjects import (
    CLAIM_HEADER,
    EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER,
    WORKER_HEADER,
    reply_subject,
)
from services.bus.backlog import Backlog, ChainMessage
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.history import StoredEvents
from services.bus.hub import ReplyHub, Verdict
from services.bus.jetstream import WRONG_LAST_SEQUENCE, pub_ack_decoder
from services.bus.message import header_bytes, status

MAX_WAITING_TOKENS = 256
SEQUENCE_DIGITS = 20


class ReplyWriter:
    """Writes behind sequence `last` of the reply subject, under one delivery's claim. Used on the event loop only.

    `on_lost` is called once, when somebody else has ended the job (`ended`) or has taken it over (`lost`). Closed by
    its end, by `close` (after a hand-off), or by being lost; until then it holds its place in the hub. With `held`
    (is the claim ours?) it sends nothing once that is false: a worker that was paused publishes nothing when it wakes.
    """

    def __init__(
        self,
        bus: Bus,
        tenant: str,
        job: str,
        last: int,
        claim: str,
        trace: Mapping[str, str] | None = None,
        on_lost: Callable[[], None] | None = None,
        held: Callable[[], bool] | None = None,
    ) -> None:
        self.tenant = tenant
        self.job = job
        self.last = last
        self.ended = False
        self.lost = False
        self.published = False
        self.sent_s = 0.0
        self.failures = 0
        self.recovering = False
        self._bus = bus
        self._hub = bus.part(ReplyHub)
        self._subject = reply_subject(tenant, job)
        self._claim = claim
        self._headers = {
            CLAIM_HEADER: claim,
            WORKER_HEADER: bus.name,
            EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: "0",
            **(trace or {}),
        }
        self._on_lost = on_lost
        self._held = held
        self._waiting = Backlog(bus.max_payload - header_bytes(self._headers) - SEQUENCE_DIGITS)
        self._again: deque[ChainMessage] = deque()
        self._in_flight: ChainMessage | None = None
        self._reply = ""
        self._kept: list[ChainMessage] = []
        self._first = last
        self._end_put = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._hub.add(self)

    # The worker's side

    def put(self, *events: Event) -> None:
        """Queues events for the next message. Raises `TooLarge` for an event that fits into no message.

        Ignored once the job is lost or was ended by somebody else.
        """
        if self.lost or (self.ended and not self._end_put):
            return
        try:
            for event in events:
                if self._end_put:
                    raise Internal(f"job {self.job}: an event after its end")
                self._end_put = self._waiting.add(event)
        finally:
            if self._waiting and self._idle.is_set():
                self._idle.clear()
                self._hub.ready(self)

    @property
    def congested(self) -> bool:
        """True while so many tokens wait for the broker that the sequence should pause."""
        in_flight = self._in_flight.tokens if self._in_flight else 0
        return self._waiting.num_tokens + in_flight >= MAX_WAITING_TOKENS

    @property
    def ending(self) -> bool:
        """True once the job's end was put: nothing may follow."""
        return self._end_put

    @property
    def closed(self) -> bool:
        """True if nothing more will be written."""
        return self.ended or self.lost

    async def drained(self) -> int:
        """Waits until everything put is stored; returns the last sequence. Raises `ClaimLost` when lost.

        Returns too when somebody else ended the job (`ended`): then what was put behind the end is void.
        """
        await self._idle.wait()
        if self.lost:
            raise ClaimLost(f"job {self.job}: another worker has it")
        return self.last

    def close(self) -> None:
        """Nothing more will be put (after a hand-off). What was written is kept a little longer, as after an end."""
        self._on_lost = None
        self._hub.retire(self)

    # The hub's side

    async def send(self) -> None:
        """Publishes what is in flight, or makes the next message of all that waits. Raises `BusUnavailable`."""
        if self.closed or self.recovering or self._reply:
            return
        if self._in_flight is None:
            self._in_flight = self._again.popleft() if self._again else self._waiting.take()
        if self._in_flight is None:
            return
        if self._fenced(self._in_flight):
            self.abandon()
            return
        self._headers[EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER] = str(self.last)
        self._reply = self._bus.expect(self._on_ack)
        self.sent_s = elapsed_s()
        await self._bus.publish(self._subject, self._in_flight.payload, self._headers, self._reply)

    def _fenced(self, message: ChainMessage) -> bool:
        """True for an event that was never stored, once the claim is gone. What a broker lost is sent again anyway."""
        return not message.sequence and self._held is not None and not self._held()

    def unsend(self) -> None:
        """Stops listening for the ack of what is in flight; `judge` will find out."""
        if self._reply:
            self._bus.forget(self._reply)
            self._reply = ""

    @property
    def in_flight(self) -> bool:
        return bool(self._reply)

    @property
    def unfinished(self) -> bool:
        return not self._idle.is_set()

    def judge(self, stored: StoredEvents | None) -> Verdict:
        """Compares the last stored message with what this writer knows, and takes over what follows from it."""
        sequence = stored.sequence if stored else 0
        if stored is not None and sequence > self.last:
            if self._is_mine(stored):
                self._confirmed(sequence)
                return Verdict.CLOSED if self.closed else Verdict.SEND
            self._close(ended=stored.ended)
            return Verdict.CLOSED
        if sequence == self.last:
            if stored is not None and self._kept and stored.payload != self._kept[-1].payload:
                self._close(ended=stored.ended)  # a sequence that a crashed broker gave out twice
                return Verdict.CLOSED
            return Verdict.SEND
        return self._rewind(sequence)

    def abandon(self) -> None:
        """Sends nothing more: the next delivery starts from what is stored."""
        self._close(ended=False)

    def _rewind(self, sequence: int) -> Verdict:
        """The broker lost messages after `sequence`: send ours again, if they are ours."""
        behind = [message for message in self._kept if message.sequence > sequence]
        before = (
            self._kept[len(self._kept) - len(behind) - 1].sequence if len(behind) < len(self._kept) else self._first
        )
        if before != sequence:
            return Verdict.WAIT
        if self._in_flight is not None:
            self._again.appendleft(self._in_flight)
            self._in_flight = None
        self._again.extendleft(reversed(behind))
        del self._kept[len(self._kept) - len(behind) :]
        self.last = sequence
        self.ended = False
        self._idle.clear()
        return Verdict.SEND

    def _is_mine(self, stored: StoredEvents) -> bool:
        """True for the message in flight, whose ack was lost. The payload decides: a claim may be given out twice."""
        sent = self._in_flight
        return sent is not None and stored.claim == self._claim and stored.payload == sent.payload

    def _on_ack(self, message: Msg | None) -> None:
        self.unsend()
        if message is None:
            return  # the connection broke: the hub judges every writer after the reconnect
        if status(message):
            self._hub.recover(self)  # nobody listens: the stream is being moved or restarted
            return
        ack = pub_ack_decoder.decode(message.data)
        if ack.error is None:
            self._confirmed(ack.seq)
            if self.unfinished:
                self._hub.ready(self)
        else:
            self._hub.recover(self, at_once=ack.error.err_code == WRONG_LAST_SEQUENCE)

    def _confirmed(self, sequence: int) -> None:
        sent = self._in_flight
        assert sent is not None
        self._in_flight = None
        self.failures = 0
        self.published = True
        self.last = sent.sequence = sequence
        self._kept.append(sent)
        if sent.ends:
            self.ended = True
            self._hub.retire(self)
        if not self._waiting and not self._again:
            self._idle.set()

    def _close(self, *, ended: bool) -> None:
        self.ended = ended
        self.lost = not ended
        self._waiting.clear()
        self._again.clear()
        self._kept.clear()
        self._in_flight = None
        self.unsend()
        self._idle.set()
        self._hub.remove(self)
        if self._on_lost is not None:
            self._on_lost()
