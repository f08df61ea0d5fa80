"""Follows a job's events as any client may: a named ephemeral consumer, filtered on the one subject.

It replays from the first event, hears a heartbeat every second, and is made anew behind the last event seen when
the broker was away or fell silent. It knows nothing that only workers know.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import BusUnavailable, DeadlineExceeded
from schemas.events import Event, decode_events
from schemas.subjects import REPLIES_STREAM, reply_subject
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.delivery import Receipt
from services.bus.jetstream import Refused, call
from services.bus.message import status
from services.bus.order import EventOrder
from services.bus.streams import NS

HEARTBEAT_S = 1.0
SILENT_AFTER_S = 3.0
INACTIVE_S = 5.0  # the broker removes the consumer so long after its reader has gone
RETRY_S = 0.2


async def follow(bus: Bus, tenant: str, job: str, silence_s: float | None = None) -> AsyncIterator[Event]:
    """All events of a job, from the first to its end, each once, waiting for those to come.

    Raises `Gap` when events are missing (they expired, say), and `DeadlineExceeded` when none comes for `silence_s`.
    """
    consumer = _Consumer(bus, reply_subject(tenant, job))
    try:
        async for event in _in_order(consumer, silence_s):
            yield event
    finally:
        await consumer.close()


@contextlib.asynccontextmanager
async def following(
    bus: Bus, tenant: str, job: str, silence_s: float | None = None
) -> AsyncIterator[AsyncIterator[Event]]:
    """`follow` for who is there before the job: at the entry the consumer exists, so no event waits for that.

    Waits until the broker and the stream are there.
    """
    consumer = _Consumer(bus, reply_subject(tenant, job))
    try:
        await consumer.open()
        yield _in_order(consumer, silence_s)
    finally:
        await consumer.close()


async def _in_order(consumer: "_Consumer", silence_s: float | None) -> AsyncIterator[Event]:
    order = EventOrder()
    while not order.ended:
        for event in decode_events(await consumer.next(silence_s)):
            if order.accept(event):
                yield event


class _Consumer:
    """A push consumer on one subject that is replaced whenever a message may have been missed."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._subscription: Subscription | None = None
        self._messages: deque[Msg] = deque()
        self._changed = asyncio.Event()
        self._sequence = 0  # of the last message taken, in the stream
        self._taken = 0  # and by this consumer
        self._heard_s = 0.0
        self._forget = bus.on_connection(up=self._on_up)

    async def open(self) -> None:
        await self._renew()

    async def next(self, silence_s: float | None) -> bytes:
        """The next message's payload. Raises `DeadlineExceeded` after `silence_s`."""
        try:
            async with asyncio.timeout(silence_s):
                while True:
                    if self._subscription is None or elapsed_s() - self._heard_s > SILENT_AFTER_S:
                        await self._renew()
                    payload = await self._take()
                    if payload is not None:
                        return payload
        except TimeoutError as error:
            raise DeadlineExceeded(f"no event on {self._subject} for {silence_s} s") from error

    async def close(self) -> None:
        self._forget()
        await self._drop()

    async def _take(self) -> bytes | None:
        """The next message in order; None after a heartbeat, or when the consumer must be looked at."""
        if not self._messages:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            return None
        message = self._messages.popleft()
        if status(message):
            await self._control(message)
            return None
        receipt = Receipt.parse(message.reply)
        if receipt.consumer_sequence != self._taken + 1:
            await self._drop()
            return None
        self._taken, self._sequence = receipt.consumer_sequence, receipt.stream_sequence
        return message.data

    async def _control(self, message: Msg) -> None:
        headers = message.headers or {}
        answer = message.reply or headers.get("Nats-Consumer-Stalled", "")
        if answer:  # flow control: what came before has been taken
            with contextlib.suppress(BusUnavailable):
                await self._bus.publish(answer)
        if status(message) != "100" or int(headers.get("Nats-Last-Consumer", self._taken)) != self._taken:
            await self._drop()

    async def _renew(self) -> None:
        """Makes a consumer behind the last message taken. Tries for ever."""
        while True:
            await self._drop()
            await self._bus.wait_connected()
            try:
                inbox = self._bus.new_inbox()
                self._subscription = await self._bus.subscribe(inbox, self._on_message)
                await self._create(inbox)
                return
            except (BusUnavailable, Refused):
                await asyncio.sleep(RETRY_S)

    async def _create(self, inbox: str) -> None:
        name = inbox.rpartition(".")[2]
        start = {"deliver_policy": "all"}
        if self._sequence:
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._sequence + 1}  # type: ignore[dict-item]
        config = {
            "name": name,
            "deliver_subject": inbox,
            "filter_subject": self._subject,
            "ack_policy": "none",
            "idle_heartbeat": int(HEARTBEAT_S * NS),
            "flow_control": True,
            "inactive_threshold": int(INACTIVE_S * NS),
            "mem_storage": True,
            "num_replicas": 1,
            **start,
        }
        body = {"stream_name": REPLIES_STREAM, "action": "create", "config": config}
        # The subject in the API's subject is what a tenant's permissions are written on.
        await call(self._bus, f"CONSUMER.CREATE.{REPLIES_STREAM}.{name}.{self._subject}", body)
        self._heard_s = elapsed_s()

    async def _drop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._bus.unsubscribe(subscription)
        self._messages.clear()
        self._taken = 0

    async def _on_message(self, message: Msg) -> None:
        self._heard_s = elapsed_s()
        self._messages.append(message)
        self._changed.set()

    def _on_up(self) -> None:
        self._heard_s = 0.0
        self._changed.set()
