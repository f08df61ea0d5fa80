"""Follows a job's events for the gateway: the fastest way, with the stream as its witness.

A core subscription hears each message while it is being stored (0.13 ms), also one that the stream refuses: so every
event must be the next in order, and an end is believed only after it was read from the stream. What is missing (lost
messages, a reconnect, a reader too slow for the bounded buffer) is read from the stream.

A stream of tokens is nearly all the work of a gateway. So a reader may take what is next in order straight from where
it is heard (`Taker`); the iteration sleeps meanwhile, and does what is left.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from nats.aio.subscription import Subscription

from schemas.errors import BusUnavailable, KvrelayError
from schemas.events import Event, decode_events, is_end
from schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, reply_subject
from services.bus.connection import Bus
from services.bus.history import read_some
from services.bus.order import EventOrder, Gap

BUFFER_BYTES = 1_048_576
LOOK_S = 5.0  # silent for so long: look into the stream, the last message may have been lost
MAX_LOOK_S = 40.0
# A core message is heard shortly before it can be read.
PATIENCE_S = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_EXPECTED = f"\r\n{EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER}: ".encode()


class Taker(Protocol):
    """Takes events where they are heard, in their place in the iteration, while there `has_room`. Never the end."""

    @property
    def has_room(self) -> bool: ...
    def take(self, events: list[Event]) -> None: ...


class Heard(NamedTuple):
    """A message as it was on the wire."""

    payload: bytes
    headers: bytes

    @property
    def before(self) -> int:
        """The sequence of the message before it, as its writer knew it."""
        start = self.headers.find(_EXPECTED)
        digits = self.headers[start + len(_EXPECTED) :].partition(b"\r\n")[0] if start >= 0 else b""
        return int(digits) if digits.isdigit() else 0


async def watch(
    bus: Bus, tenant: str, job: str, buffer_bytes: int = BUFFER_BYTES, taker: Taker | None = None
) -> AsyncIterator[Event]:
    """All events of a job, from the first to its end, each once, waiting for those to come.

    Reads no faster than it is iterated; what `taker` takes is not yielded. Raises `Gap` when the stream itself has one.
    Close it (`aclose`) to stop.
    """
    witness = _Witness(bus, tenant, job, taker)
    feed = _Feed(bus, reply_subject(tenant, job), buffer_bytes, witness)
    await feed.open()
    try:
        async for event in witness.read():
            yield event
        while not witness.order.ended:
            message = await feed.next()
            if message is None:
                if feed.reconnected():
                    witness.after = 0  # a crashed broker may have given out sequences again
                async for event in witness.read():
                    yield event
            else:
                async for event in witness.compare(message):
                    yield event
    finally:
        await feed.close()


class _Witness:
    """What has been shown of a job, and where to read on. Everything up to sequence `after` was shown.

    `is_exact`: nothing behind it was, so that what comes next must follow it. Of a message that is heard, only the
    one before it has a known sequence.
    """

    def __init__(self, bus: Bus, tenant: str, job: str, taker: Taker | None) -> None:
        self.order = EventOrder()
        self.after = 0
        self.is_exact = True
        self._taker = taker
        self._bus = bus
        self._tenant = tenant
        self._job = job

    async def read(self) -> AsyncIterator[Event]:
        """The new events in the stream. Waits until the broker is there."""
        more = True
        while more and not self.order.ended:
            try:
                stored, more = await read_some(self._bus, self._tenant, self._job, self.after)
            except BusUnavailable:
                await self._bus.wait_connected()
                await asyncio.sleep(PATIENCE_S[-1])
                continue
            for message in stored:
                for event in message.events:
                    if self.order.accept(event):
                        yield event
                self.after, self.is_exact = message.sequence, True

    def take(self, message: Heard) -> bool:
        """Gives the events of a heard message to the taker. False if there is anything to look into first."""
        if self._taker is None or not self._taker.has_room:
            return False
        try:
            events, before = decode_events(message.payload), message.before
            if not events or is_end(events[-1]) or self._misses(before):
                return False
            fresh = [event for event in events if self.order.accept(event)]
        except KvrelayError:
            return False
        self._note(before)
        self._taker.take(fresh)
        return True

    async def compare(self, message: Heard) -> AsyncIterator[Event]:
        """The new events in a heard message, after those that were missed before it."""
        events = decode_events(message.payload)
        for pause_s in PATIENCE_S:
            if not is_end(events[-1]) and not self._misses(message.before):
                try:
                    fresh = [event for event in events if self.order.accept(event)]
                except Gap:
                    pass
                else:
                    self._note(message.before)
                    for event in fresh:
                        yield event
                    return
            await asyncio.sleep(pause_s)
            async for event in self.read():
                yield event
            if self.order.ended:
                return

    def _misses(self, before: int) -> bool:
        """Whether something was stored that was never heard: what was published just before the subscription was made,
        and could not be read yet just after it."""
        return self.is_exact and before > self.after

    def _note(self, before: int) -> None:
        self.after, self.is_exact = max(self.after, before), False


class _Feed:
    """A core subscription with a bounded buffer; when it overflows, everything in it is left to the stream.

    While `next` waits, each message goes to the witness first.
    """

    def __init__(self, bus: Bus, subject: str, buffer_bytes: int, witness: _Witness) -> None:
        self._bus = bus
        self._subject = subject
        self._buffer_bytes = buffer_bytes
        self._witness = witness
        self._messages: deque[Heard] = deque()
        self._num_bytes = 0
        self._missed = False
        self._reconnected = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._heard_s = 0.0
        self._look_s = LOOK_S
        self._timer: asyncio.TimerHandle | None = None
        self._subscription: Subscription | None = None
        self._forget = bus.on_connection(up=self._on_up)

    async def open(self) -> None:
        self._subscription = await self._bus.listen(self._subject, self._on_raw)

    async def close(self) -> None:
        self._forget()
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    async def next(self) -> Heard | None:
        """The next message that was not taken; None when the stream should be read instead."""
        if not self._messages and not self._missed:
            self._heard_s = self._loop.time()
            self._waiting = self._loop.create_future()
            self._look_when_silent()
            try:
                await self._waiting
            finally:
                self._waiting = None
                if self._timer is not None:
                    self._timer.cancel()
        if self._missed or not self._messages:
            self._missed = False
            return None
        message = self._messages.popleft()
        self._num_bytes -= len(message.payload)
        return message

    def reconnected(self) -> bool:
        """True once after each reconnect."""
        was, self._reconnected = self._reconnected, False
        return was

    def _on_raw(self, payload: bytes, headers: bytes) -> None:
        message = Heard(payload, headers)
        self._heard_s, self._look_s = self._loop.time(), LOOK_S
        is_idle = self._waiting is not None and not self._waiting.done()
        if is_idle and self._witness.take(message):
            return
        self._num_bytes += len(payload)
        if self._num_bytes > self._buffer_bytes:
            self._leave_to_stream()
        else:
            self._messages.append(message)
        self._wake()

    def _look_when_silent(self) -> None:
        """One timer for many messages: they move what it waits for, and not the timer."""
        left_s = self._heard_s + self._look_s - self._loop.time()
        if left_s > 0.0:
            self._timer = self._loop.call_later(left_s, self._look_when_silent)
        else:
            self._look_s = min(2 * self._look_s, MAX_LOOK_S)
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _leave_to_stream(self) -> None:
        self._messages.clear()
        self._num_bytes = 0
        self._missed = True

    def _on_up(self) -> None:
        self._reconnected = True
        self._leave_to_stream()
        self._wake()
