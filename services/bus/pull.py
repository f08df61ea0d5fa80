"""Asks one consumer for one message at a time, over an inbox of its own.

nats-py's `fetch` is not used: cancelled, it swallows the next job until ack_wait is over.
"""

import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from services.bus.clock import elapsed_s
from services.bus.connection import Bus
from services.bus.jetstream import API
from services.bus.message import status
from services.bus.streams import NS, Source

log = logging.getLogger("kvrelay.bus")

EXPIRES_S = 60.0
HEARTBEAT_S = 10.0
SILENT_AFTER_S = 2.5 * HEARTBEAT_S  # the consumer has moved and forgot us
PROBE_TIMEOUT_S = 2.0

_WAIT = msgspec.json.encode({"batch": 1, "expires": int(EXPIRES_S * NS), "idle_heartbeat": int(HEARTBEAT_S * NS)})
_NO_WAIT = msgspec.json.encode({"batch": 1, "no_wait": True})


class Pull:
    """At most one request is out. `on_message` gets the jobs, `on_change` is called when the request is answered."""

    def __init__(
        self, bus: Bus, source: Source, on_message: Callable[["Pull", Msg], None], on_change: Callable[[], None]
    ) -> None:
        self.source = source
        self.asked = False
        self.broken = True  # until its consumer was made sure of
        self.ack_wait_s = bus.settings.ack_wait_s
        self.created_ms = 0
        self._bus = bus
        self._on_message = on_message
        self._on_change = on_change
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._deadline_s = 0.0
        self._subject = f"{API}CONSUMER.MSG.NEXT.{source.stream}.{source.consumer}"

    async def ask(self, *, wait: bool) -> None:
        """Asks for one message: waiting for it, or just whether there is one. Raises `BusUnavailable`."""
        if self._subscription is None:
            self._inbox = self._bus.new_inbox()
            self._subscription = await self._bus.subscribe(self._inbox, functools.partial(self._on_reply, self._inbox))
        self.asked = True
        self._deadline_s = elapsed_s() + (SILENT_AFTER_S if wait else PROBE_TIMEOUT_S)
        await self._bus.publish(self._subject, _WAIT if wait else _NO_WAIT, reply=self._inbox)

    def withdraw(self) -> Coroutine[Any, Any, None]:
        """Takes the request back: the broker sees that nobody listens. What is on its way still arrives until then.

        The next `ask` is independent of this one from the moment of the call.
        """
        subscription, self._subscription = self._subscription, None
        self._inbox = ""
        self.asked = False
        return self._drain(subscription)

    async def _drain(self, subscription: Subscription | None) -> None:
        if subscription is not None:
            await self._bus.unsubscribe(subscription, drain=True)

    @property
    def silent(self) -> bool:
        """True if the broker owes an answer or a heartbeat."""
        return self.asked and elapsed_s() > self._deadline_s

    async def _on_reply(self, inbox: str, message: Msg) -> None:
        code = status(message)
        if code == "100":
            self._deadline_s = elapsed_s() + SILENT_AFTER_S
            return
        if inbox == self._inbox:  # else the answer to a request that was taken back
            self.asked = False
        if not code:
            self._on_message(self, message)
        elif code in ("409", "503"):  # deleted, moved, or the server goes down
            log.info("%s %s: %s", self.source.stream, self.source.consumer, message.headers)
            self.broken = True
        self._on_change()
