"""Asking a worker to leave, over NATS: no shell on its host is needed."""

import contextlib
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.drain import DrainReply, drain_reply_decoder
from schemas.errors import BusUnavailable, NoWorker
from schemas.subjects import drain_subject
from schemas.wire import encode, translate
from services.bus.connection import Bus, NoResponder


async def ask_to_drain(bus: Bus, process: str) -> DrainReply:
    """Tells a worker to take no more jobs and to leave. Asking twice is harmless.

    Raises `NoWorker` if there is no such process, `BusUnavailable` if it does not answer.
    """
    try:
        return translate(drain_reply_decoder, (await bus.request(drain_subject(process))).data)
    except NoResponder as error:
        raise NoWorker(f"no worker {process} is running") from error


class DrainListener:
    """A worker's ear: calls `on_drain` for each request and answers with what that returns."""

    def __init__(self, bus: Bus, process: str, on_drain: Callable[[], DrainReply]) -> None:
        self._bus = bus
        self._process = process
        self._on_drain = on_drain
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(drain_subject(self._process), self._on_message)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    async def _on_message(self, message: Msg) -> None:
        reply = self._on_drain()
        with contextlib.suppress(BusUnavailable):
            if message.reply:
                await self._bus.publish(message.reply, encode(reply))
