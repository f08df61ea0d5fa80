"""Queue messages that were given up: kept on `kvrelay.dead.<tenant>.<job>` with the reason, until somebody looks.

Each is one message of its stream, named by its sequence there: one job may have several.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.aio.msg import Msg

from schemas.errors import BusUnavailable
from schemas.subjects import (
    CODE_HEADER,
    DEAD_STREAM,
    DELIVERIES_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    SUBJECT_HEADER,
    TRUNCATED_HEADER,
    dead_subject,
    job_of_subject,
)
from services.bus.connection import Bus
from services.bus.delivery import Receipt
from services.bus.jetstream import API, STREAM_NOT_FOUND, Refused, call
from services.bus.message import status
from services.bus.streams import NS

ANY = "*"

_READ_TIMEOUT_S = 5.0
_BATCH_MESSAGES = 256
_INACTIVE_S = 30.0  # the broker removes a reader's consumer so long after it has gone
_SIZE_HEADER = "Nats-Msg-Size"


@dataclass(frozen=True)
class DeadLetter:
    """All but the payload. `num_delivered` is 0 where nobody wrote it down."""

    sequence: int
    tenant: str
    job: str
    died_at: float  # unix seconds by the broker
    stored_bytes: int
    headers: Mapping[str, str]

    @property
    def code(self) -> str:
        return self.headers.get(CODE_HEADER, "")

    @property
    def reason(self) -> str:
        return self.headers.get(REASON_HEADER, "")

    @property
    def origin(self) -> str:
        """`<sequence>-<stream creation>` of the queue message."""
        return self.headers.get(ORIGIN_HEADER, "")

    @property
    def subject(self) -> str:
        """Of the queue message."""
        return self.headers.get(SUBJECT_HEADER, "")

    @property
    def num_delivered(self) -> int:
        return _number(self.headers.get(DELIVERIES_HEADER))

    @property
    def payload_bytes(self) -> int:
        """Of the whole message, also where only its beginning was kept."""
        return _number(self.headers.get(TRUNCATED_HEADER)) or self.stored_bytes

    @property
    def is_truncated(self) -> bool:
        return TRUNCATED_HEADER in self.headers


async def dead_letters(bus: Bus, tenant: str = ANY, job: str = ANY) -> AsyncIterator[DeadLetter]:
    """Those that are there now, oldest first; payloads are not transferred. Close it (`aclose`).

    None where no worker has ever run. Raises `BusUnavailable`.
    """
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox, arrived.put)
    config = {
        "filter_subject": dead_subject(tenant, job),
        "ack_policy": "none",
        "headers_only": True,
        "inactive_threshold": int(_INACTIVE_S * NS),
        "mem_storage": True,
        "num_replicas": 1,
    }
    consumer = ""
    try:
        answer = await _consumer(bus, config)
        if answer is None:
            return
        consumer, waiting = answer["name"], answer["num_pending"]
        while waiting > 0:
            batch = min(waiting, _BATCH_MESSAGES)
            ask = msgspec.json.encode({"batch": batch, "no_wait": True})
            await bus.publish(f"{API}CONSUMER.MSG.NEXT.{DEAD_STREAM}.{consumer}", ask, reply=inbox)
            for _ in range(batch):
                message = await _next(arrived)
                if status(message):  # others were dropped meanwhile
                    return
                yield _letter(message)
            waiting -= batch
    finally:
        await bus.unsubscribe(subscription)
        with contextlib.suppress(BusUnavailable, Refused):
            if consumer:
                await call(bus, f"CONSUMER.DELETE.{DEAD_STREAM}.{consumer}")


async def payload_of(bus: Bus, letter: DeadLetter) -> bytes | None:
    """None if it was removed meanwhile. Raises `BusUnavailable`."""
    message = await bus.request(f"{API}DIRECT.GET.{DEAD_STREAM}", msgspec.json.encode({"seq": letter.sequence}))
    return None if status(message) else message.data


async def remove(bus: Bus, letter: DeadLetter) -> bool:
    """False if it was gone already. Raises `BusUnavailable`."""
    try:
        await call(bus, f"STREAM.MSG.DELETE.{DEAD_STREAM}", {"seq": letter.sequence})
    except Refused:  # by one of several codes
        if await payload_of(bus, letter) is None:
            return False
        raise
    return True


async def _consumer(bus: Bus, config: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return await call(bus, f"CONSUMER.CREATE.{DEAD_STREAM}", {"stream_name": DEAD_STREAM, "config": config})
    except Refused as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        return None


async def _next(arrived: "asyncio.Queue[Msg]") -> Msg:
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await arrived.get()
    except TimeoutError as error:
        raise BusUnavailable(f"{DEAD_STREAM} did not answer in {_READ_TIMEOUT_S} s") from error


def _letter(message: Msg) -> DeadLetter:
    headers = dict(message.headers or {})
    receipt = Receipt.parse(message.reply)
    tenant, job = job_of_subject(message.subject)
    size = _number(headers.pop(_SIZE_HEADER, None))
    return DeadLetter(receipt.stream_sequence, tenant, job, receipt.published_at, size, headers)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
