"""Batched direct reads of a stream: some messages in one answer, from whichever server has them.

https://docs.nats.io/nats-concepts/jetstream/streams, "direct get"; a replica may lag behind its leader.
"""

import asyncio
from typing import Any, NamedTuple

import msgspec
from nats.aio.msg import Msg

from schemas.errors import BusUnavailable, Internal
from services.bus.connection import Bus
from services.bus.jetstream import API
from services.bus.message import status

BATCH_MESSAGES = 512
BATCH_BYTES = 4_000_000

SEQUENCE_HEADER = "Nats-Sequence"
_PENDING_HEADER = "Nats-Num-Pending"
_UP_TO_HEADER = "Nats-UpTo-Sequence"


class TooMany(Internal):
    """More subjects match than the server looks up at once: 1,024, whatever is asked for of them."""


class Batch(NamedTuple):
    """`more`: messages are left that match. `up_to`: the sequence that a read of several batches is as of."""

    messages: list[Msg]
    more: bool
    up_to: int


async def read_batch(bus: Bus, stream: str, ask: dict[str, Any], timeout_s: float) -> Batch:
    """`ask` as DIRECT.GET takes it. Raises `BusUnavailable`, `TooMany`, and `Internal` for what else is refused."""
    found: list[Msg] = []
    finished: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()

    def take(message: Msg | None) -> None:
        if finished.done():
            return
        # A stored message may have a status of its own, but only a stored one has a sequence.
        if message is None or (status(message) and SEQUENCE_HEADER not in (message.headers or {})):
            finished.set_result(message)
        else:
            found.append(message)

    reply = bus.expect(take)
    try:
        async with asyncio.timeout(timeout_s):
            await bus.publish(f"{API}DIRECT.GET.{stream}", msgspec.json.encode(ask), reply=reply)
            end = await finished
    except TimeoutError as error:
        raise BusUnavailable(f"{stream} did not answer in {timeout_s} s") from error
    finally:
        bus.forget(reply)
    if end is None or status(end) == "503":
        raise BusUnavailable(f"{stream} cannot be read right now")
    if status(end) == "413":
        raise TooMany(f"{stream} has too many subjects of {ask}")
    if status(end) not in ("204", "404"):
        raise Internal(f"{stream} refused a read: {end.headers}")
    headers = end.headers or {}
    return Batch(found, int(headers.get(_PENDING_HEADER, 0)) > 0, int(headers.get(_UP_TO_HEADER, 0)))
