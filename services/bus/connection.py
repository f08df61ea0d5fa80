"""One process's connection to NATS, and the fence where nats-py's errors are translated.

A `Bus` reconnects for ever. Nothing is sent while it is down: a request fails at once with `BusUnavailable`, and
what was not sent yet is forgotten, because the rules of the chain and of a claim decide anew after a reconnect.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import BusUnavailable, Forbidden, Internal, SetupError, TooLarge
from services.bus.access import Asked, options
from services.bus.client import ReconnectingClient
from services.bus.clock import BrokerClock
from services.bus.inbox import Inbox, OnReply
from services.bus.message import Headers, header_bytes, status
from services.bus.skimmer import OnRaw
from services.settings import Bus as BusSettings

log = logging.getLogger("kvrelay.bus")

RECONNECT_WAIT_S = 0.1
PING_INTERVAL_S = 3  # two unanswered ones: a half-open connection is noticed within 9 s
NO_BUFFERING = -1

OnMessage = Callable[[Msg], Awaitable[None]]
T = TypeVar("T", bound="Part")


class NoResponder(BusUnavailable):
    """Nobody listens on the subject: there is no such stream or consumer (or none right now)."""


class Part(Protocol):
    """Something that exists once a connection, made by `Bus.part`."""

    async def close(self) -> None: ...


class Bus:
    """Made by `await Bus.connect(url)`; closed by whoever made it, or by `async with`."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.clock = BrokerClock()
        self._client = ReconnectingClient()
        self._connected = asyncio.Event()
        self._closing = False
        self._down: list[Callable[[], None]] = []
        self._up: list[Callable[[], None]] = []
        self._parts: dict[type[Any], Part] = {}
        self._inbox = Inbox(self._client.new_inbox())
        self._asked = Asked()
        self._unreachable_logged = False

    @classmethod
    async def connect(
        cls, url: str, name: str = "kvrelay", settings: BusSettings | None = None, timeout_s: float = 5.0
    ) -> "Bus":
        """Connects to one server or a comma-separated list. Raises `SetupError` if none lets us in in time."""
        bus = cls(settings or BusSettings(), name)
        try:
            async with asyncio.timeout(timeout_s):
                await bus._connect([part.strip() for part in url.split(",")])
        except (OSError, nats_errors.Error, TimeoutError, ValueError) as error:
            bus._closing = True
            with contextlib.suppress(OSError, nats_errors.Error):
                await bus._client.close()
            shown = re.sub(r"//[^@/]*@", "//***@", url)
            raise SetupError(f"no NATS server answers at {shown}: {bus._client.last_error or error}") from error
        return bus

    async def _connect(self, servers: list[str]) -> None:
        await self._client.connect(
            servers=servers,
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # seconds, fractions work
            ping_interval=PING_INTERVAL_S,
            pending_size=NO_BUFFERING,
            **options(self.settings, self._client),
        )
        await self._client.subscribe(self._inbox.subject, cb=self._inbox.deliver, pending_bytes_limit=0)
        self._connected.set()

    async def close(self) -> None:
        """Closes the parts, sends what is waiting, and ends the connection. Twice is once."""
        if self._closing:
            return
        self._closing = True
        for part in reversed(list(self._parts.values())):
            await part.close()
        with contextlib.suppress(nats_errors.Error, OSError):
            if self.connected:
                await self._client.flush(timeout=2)
        with contextlib.suppress(nats_errors.Error, OSError):
            await self._client.close()

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # State

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def clustered(self) -> bool:
        return self._client.clustered

    @property
    def num_reconnects(self) -> int:
        return self._client.stats["reconnects"]

    @property
    def max_payload(self) -> int:
        """The broker's bound on header + payload of one message, in bytes."""
        return self._client.max_payload

    def now(self) -> float:
        """Unix seconds by the broker's clock."""
        return self.clock.now()

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        """Raises `BusUnavailable` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError as error:
            raise BusUnavailable(f"no connection to NATS for {timeout_s} s") from error

    def on_connection(
        self, up: Callable[[], None] | None = None, down: Callable[[], None] | None = None, *, first: bool = False
    ) -> Callable[[], None]:
        """Calls `up` after every reconnect and `down` when the connection breaks; returns how to stop that.

        `first` is for claims, which must be renewed before anything else is sent.
        """
        for listener, listeners in ((up, self._up), (down, self._down)):
            if listener is not None:
                listeners.insert(0 if first else len(listeners), listener)

        def forget() -> None:
            for listener, listeners in ((up, self._up), (down, self._down)):
                if listener in listeners:
                    listeners.remove(listener)

        return forget

    def part(self, kind: type[T]) -> T:
        """The one instance of `kind` on this connection; closed with it."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = kind(self)  # type: ignore[call-arg]
        assert isinstance(found, kind)
        return found

    # Sending and receiving

    async def publish(
        self, subject: str, payload: bytes = b"", headers: Headers | None = None, reply: str = ""
    ) -> None:
        """A core publish: nothing says whether it arrived. Raises `TooLarge` or `BusUnavailable`."""
        self.check_size(payload, headers)
        try:
            await self._client.publish(subject, payload, reply=reply, headers=headers)  # type: ignore[arg-type]
        except nats_errors.BadSubjectError as error:
            raise Internal(f"not a subject: {subject!r}") from error
        except nats_errors.OutboundBufferLimitError as error:  # what nats-py says instead of waiting, see NO_BUFFERING
            raise BusUnavailable("the connection to NATS is down") from error
        except (nats_errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS is out of reach: {error}") from error

    async def request(
        self, subject: str, payload: bytes = b"", headers: Headers | None = None, timeout_s: float = 5.0
    ) -> Msg:
        """One reply. Raises `NoResponder`, `TooLarge`, `Forbidden`, or `BusUnavailable` (then it may have arrived)."""
        answer: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()

        def settle(message: Msg | None) -> None:
            if not answer.done():
                answer.set_result(message)

        def refuse(error: Forbidden) -> None:
            if not answer.done():
                answer.set_exception(error)

        reply = self.expect(settle)
        try:
            async with asyncio.timeout(timeout_s):
                with self._asked.waiting(subject, refuse):
                    await self.publish(subject, payload, headers, reply)
                    message = await answer
        except TimeoutError as error:
            raise BusUnavailable(f"NATS did not answer {subject} in {timeout_s} s") from error
        finally:
            self.forget(reply)
        if message is None:
            raise BusUnavailable("the connection to NATS broke")
        if status(message) == "503":
            raise NoResponder(f"nobody listens on {subject}")
        return message

    def expect(self, on_reply: OnReply) -> str:
        """A reply subject of this connection, see `Inbox.expect`."""
        return self._inbox.expect(on_reply)

    def forget(self, reply: str) -> None:
        self._inbox.forget(reply)

    async def subscribe(self, subject: str, on_message: OnMessage, *, max_pending: int = 0) -> Subscription:
        """A core subscription, kept across reconnects. `on_message` must be quick: its messages wait in memory."""
        try:
            return await self._client.subscribe(
                subject, cb=on_message, pending_msgs_limit=max_pending, pending_bytes_limit=0
            )
        except (nats_errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS is out of reach: {error}") from error

    async def listen(self, subject: str, on_raw: OnRaw) -> Subscription:
        """The same for what comes thousands of times a second: no queue and no task lies between the socket and
        `on_raw(payload, headers on the wire)`, which must raise nothing."""
        try:
            return await self._client.listen(subject, on_raw)
        except (nats_errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS is out of reach: {error}") from error

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def unsubscribe(self, subscription: Subscription, *, drain: bool = False) -> None:
        """Ends a subscription; with `drain`, after its callback has seen what was already on the way."""
        try:
            if drain and self.connected:
                await subscription.drain()  # type: ignore[no-untyped-call]
            else:
                await subscription.unsubscribe()
        except (nats_errors.Error, OSError):
            self._client.forget_subscription(subscription)

    def check_size(self, payload: bytes, headers: Headers | None = None) -> None:
        """nats-py does not count headers, and the server cuts the connection for a byte too many."""
        size = len(payload) + header_bytes(headers)
        if size > self.max_payload:
            raise TooLarge(
                f"the message has {size} bytes with its headers, the limit (max_payload) is {self.max_payload}"
            )

    # Callbacks of nats-py

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats_errors.SlowConsumerError):
            log.warning("messages on %s were dropped: the reader is too slow", error.subject)
        elif forbidden := self._asked.violation(error):
            log.error("%s: %s", self.name, forbidden)
        elif not self._unreachable_logged and not self._closing:
            self._unreachable_logged = True
            log.warning("%s: NATS: %s", self.name, error or type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self._client.discard_pending()
        if not self._closing:
            log.warning("%s: disconnected from NATS", self.name)
        self._inbox.broke()
        for listener in list(self._down):
            listener()

    async def _on_reconnected(self) -> None:
        self._unreachable_logged = False
        self._connected.set()
        log.warning("%s: connected to NATS again", self.name)
        for listener in list(self._up):
            listener()

    async def _on_closed(self) -> None:
        if not self._closing:
            log.error("%s: the connection to NATS was closed for good", self.name)
