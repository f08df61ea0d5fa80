"""Carries the messages of all reply writers of a process: one sender, one reply inbox, one look after a reconnect."""

import asyncio
import enum
import logging
from collections import deque
from typing import Protocol

from schemas.errors import BusUnavailable, TooLarge
from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.history import StoredEvents, last_message

log = logging.getLogger("kvrelay.bus")

ACK_TIMEOUT_S = 2.0
KEEP_S = 2.0  # after its end a job's events are kept: a crashed broker may have lost the last of them
RETRY_S = 0.02
MAX_RETRY_S = 1.0
REWIND_WAIT_S = 3.0  # for another writer to send again what the broker lost


class Verdict(enum.Enum):
    """What the last stored message says about a writer's own."""

    SEND = "send"  # what is in flight was not stored: send it (again)
    WAIT = "wait"  # the broker lost another writer's events; whoever wrote them sends them again
    CLOSED = "closed"  # nothing more to write: ended, or another worker has the job


class Writer(Protocol):
    """What the hub needs of a `ReplyWriter`. `failures` and `recovering` are the hub's own notes on it."""

    tenant: str
    job: str
    sent_s: float
    failures: int
    recovering: bool

    @property
    def closed(self) -> bool: ...
    @property
    def in_flight(self) -> bool: ...
    @property
    def unfinished(self) -> bool: ...

    async def send(self) -> None: ...
    def unsend(self) -> None: ...
    def judge(self, stored: StoredEvents | None) -> Verdict: ...
    def abandon(self) -> None: ...


class ReplyHub:
    """The part of a `Bus` that sends for its `ReplyWriter`s and finds out what became of their messages."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._writers: set[Writer] = set()
        self._added = asyncio.Event()
        self._retired: dict[Writer, asyncio.TimerHandle] = {}
        self._ready: deque[Writer] = deque()
        self._wake = asyncio.Event()
        self._recoveries: set[asyncio.Task[None]] = set()
        self._forget = bus.on_connection(up=self._on_up)
        self._sender = asyncio.create_task(self._send(), name="reply sender")
        self._sweeper = asyncio.create_task(self._sweep(), name="reply timeouts")

    @property
    def num_writers(self) -> int:
        return len(self._writers)

    def add(self, writer: Writer) -> None:
        self._writers.add(writer)
        self._added.set()

    def ready(self, writer: Writer) -> None:
        self._ready.append(writer)
        self._wake.set()

    def retire(self, writer: Writer) -> None:
        """Keeps a writer that has nothing more to say for `KEEP_S`, in case its events must be sent again."""
        if writer in self._writers and writer not in self._retired:
            self._retired[writer] = asyncio.get_running_loop().call_later(KEEP_S, self._expire, writer)

    def remove(self, writer: Writer) -> None:
        self._writers.discard(writer)
        timer = self._retired.pop(writer, None)
        if timer is not None:
            timer.cancel()

    def recover(self, writer: Writer, *, at_once: bool = False) -> None:
        """Reads the last stored message and lets the writer judge: `at_once`, or after a growing delay."""
        writer.unsend()
        if writer.recovering or (writer.closed and writer not in self._retired):
            return
        writer.recovering = True
        task = asyncio.create_task(self._recover(writer, at_once), name=f"recover {writer.job}")
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def close(self) -> None:
        self._forget()
        for timer in self._retired.values():
            timer.cancel()
        tasks = [self._sender, self._sweeper, *self._recoveries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expire(self, writer: Writer) -> None:
        self._retired.pop(writer, None)
        if writer.unfinished and not writer.closed:  # closed before it was drained
            self.retire(writer)
        else:
            self.remove(writer)

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ready:
                writer = self._ready.popleft()
                try:
                    await writer.send()
                except BusUnavailable:
                    writer.unsend()  # down: `_on_up` goes on
                    if self._bus.connected:
                        self.recover(writer)
                except TooLarge as error:
                    log.error("job %s: %s", writer.job, error)
                    writer.abandon()

    async def _recover(self, writer: Writer, at_once: bool) -> None:
        waiting_since = elapsed_s()
        try:
            while True:
                if not at_once:
                    await asyncio.sleep(min(RETRY_S * 2**writer.failures, MAX_RETRY_S))
                writer.failures = min(writer.failures + 1, 16)
                at_once = False
                await self._bus.wait_connected()
                try:
                    stored = await last_message(self._bus, writer.tenant, writer.job)
                except BusUnavailable:
                    continue
                verdict = writer.judge(stored)
                if verdict is not Verdict.WAIT:
                    return
                if elapsed_s() - waiting_since > REWIND_WAIT_S:
                    writer.abandon()
                    return
        finally:
            writer.recovering = False
            if writer.unfinished and not writer.closed:
                self.ready(writer)

    async def _sweep(self) -> None:
        """Looks for acks that did not come."""
        while True:
            if not self._writers:
                self._added.clear()
                await self._added.wait()
            await asyncio.sleep(ACK_TIMEOUT_S / 2)
            now = elapsed_s()
            if self._bus.connected:
                for writer in [w for w in self._writers if w.in_flight and now - w.sent_s > ACK_TIMEOUT_S]:
                    self.recover(writer, at_once=True)

    def _on_up(self) -> None:
        for writer in list(self._writers):
            self.recover(writer, at_once=True)
