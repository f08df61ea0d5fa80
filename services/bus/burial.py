"""Keeps a queue message that is given up, for the operator (`services.bus.dead_letters` reads them)."""

from typing import NamedTuple

from schemas.errors import KvrelayError
from schemas.subjects import (
    CODE_HEADER,
    DELIVERIES_HEADER,
    MSG_ID_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    SUBJECT_HEADER,
    TRUNCATED_HEADER,
    dead_subject,
)
from services.bus.connection import Bus
from services.bus.jetstream import publish_stored
from services.bus.message import header_bytes

MAX_REASON_CHARS = 1_000


class GivenUp(NamedTuple):
    """The queue message, and how often it was delivered."""

    payload: bytes
    subject: str
    origin: str
    num_delivered: int


async def bury(bus: Bus, tenant: str, job: str, message: GivenUp, error: KvrelayError) -> None:
    """Keeps a message that is given up, with the reason and where it came from. Raises `BusUnavailable`.

    One delivery may do this twice; the id keeps the first for some minutes. Of a payload that leaves no room for
    these headers, the beginning is kept.
    """
    headers = {
        MSG_ID_HEADER: f"{tenant}.{job}.dead.{message.origin}",
        CODE_HEADER: error.code,
        REASON_HEADER: " ".join(error.message.split())[:MAX_REASON_CHARS],
        ORIGIN_HEADER: message.origin,
        SUBJECT_HEADER: message.subject,
        DELIVERIES_HEADER: str(message.num_delivered),
    }
    payload = message.payload
    if len(payload) > bus.max_payload - header_bytes(headers):
        headers[TRUNCATED_HEADER] = str(len(payload))
        payload = payload[: bus.max_payload - header_bytes(headers)]
    await publish_stored(bus, dead_subject(tenant, job), payload, headers)
