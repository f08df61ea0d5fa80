"""Follows a job's events for the gateway: the fastest way, with the stream as its witness.

A core subscription hears each message while it is being stored (0.13 ms), also one that the stream refuses: so every
event must be the next in order, and an end is believed only after it was read from the stream. What is missing (lost
messages, a reconnect, a reader too slow for the bounded buffer) is read from the stream.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import BusUnavailable
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


async def watch(bus: Bus, tenant: str, job: str, buffer_bytes: int = BUFFER_BYTES) -> AsyncIterator[Event]:
    """All events of a job, from the first to its end, each once, waiting for those to come.

    Reads no faster than it is iterated. Raises `Gap` when the stream itself has one. Close it (`aclose`) to stop.
    """
    feed = _Feed(bus, reply_subject(tenant, job), buffer_bytes)
    await feed.open()
    try:
        witness = _Witness(bus, tenant, job)
        async for event in witness.read():
            yield event
        look_s = LOOK_S
        while not witness.order.ended:
            message = await feed.next(look_s)
            look_s = min(2 * look_s, MAX_LOOK_S) if message is None else LOOK_S
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
    """What has been shown of a job, and where to read on. Everything up to sequence `after` was shown."""

    def __init__(self, bus: Bus, tenant: str, job: str) -> None:
        self.order = EventOrder()
        self.after = 0
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
                self.after = message.sequence

    async def compare(self, message: Msg) -> AsyncIterator[Event]:
        """The new events in a heard message, after those that were missed before it."""
        events = decode_events(message.data)
        for pause_s in PATIENCE_S:
            if not is_end(events[-1]):
                try:
                    fresh = [event for event in events if self.order.accept(event)]
                except Gap:
                    pass
                else:
                    before = (message.headers or {}).get(EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, "0")
                    self.after = max(self.after, int(before))
                    for event in fresh:
                        yield event
                    return
            await asyncio.sleep(pause_s)
            async for event in self.read():
                yield event
            if self.order.ended:
                return


class _Feed:
    """A core subscription with a bounded buffer; when it overflows, everything in it is left to the stream."""

    def __init__(self, bus: Bus, subject: str, buffer_bytes: int) -> None:
        self._bus = bus
        self._subject = subject
        self._buffer_bytes = buffer_bytes
        self._messages: deque[Msg] = deque()
        self._num_bytes = 0
        self._missed = False
        self._reconnected = False
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._forget = bus.on_connection(up=self._on_up)

    async def open(self) -> None:
        self._subscription = await self._bus.subscribe(self._subject, self._on_message)

    async def close(self) -> None:
        self._forget()
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    async def next(self, timeout_s: float) -> Msg | None:
        """The next message heard; None when the stream should be read instead."""
        if not self._messages and not self._missed:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        if self._missed or not self._messages:
            self._missed = False
            return None
        message = self._messages.popleft()
        self._num_bytes -= len(message.data)
        return message

    def reconnected(self) -> bool:
        """True once after each reconnect."""
        was, self._reconnected = self._reconnected, False
        return was

    async def _on_message(self, message: Msg) -> None:
        self._num_bytes += len(message.data)
        if self._num_bytes > self._buffer_bytes:
            self._leave_to_stream()
        else:
            self._messages.append(message)
        self._changed.set()

    def _leave_to_stream(self) -> None:
        self._messages.clear()
        self._num_bytes = 0
        self._missed = True

    def _on_up(self) -> None:
        self._reconnected = True
        self._leave_to_stream()
        self._changed.set()
