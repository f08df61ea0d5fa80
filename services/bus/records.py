"""Messages of a stream as records: each subject has a latest one, replaced only by who has seen it."""

import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER
from services.bus.connection import Bus
from services.bus.direct_get import BATCH_BYTES, BATCH_MESSAGES, SEQUENCE_HEADER, TooMany, read_batch
from services.bus.jetstream import NO_MESSAGE, WRONG_LAST_SEQUENCE, Refused, call, publish_stored
from services.bus.message import Headers

READ_TIMEOUT_S = 10.0
SUBJECT_HEADER = "Nats-Subject"


class Record(NamedTuple):
    subject: str
    sequence: int
    payload: bytes
    headers: Headers


async def put(bus: Bus, subject: str, payload: bytes, last: int, headers: Headers | None = None) -> int | None:
    """Stores behind the record with sequence `last` of the subject (0: as the first). Its sequence.

    None if another one is there. Raises `QueueFull`, `TooLarge`, or `BusUnavailable` (then it may be stored).
    """
    expected = {EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: str(last), **(headers or {})}
    try:
        return (await publish_stored(bus, subject, payload, expected)).seq
    except Refused as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            return None
        raise


async def get(bus: Bus, stream: str, subject: str) -> Record | None:
    """The latest record of a subject, by the stream's leader. Raises `BusUnavailable`."""
    try:
        answer = await call(bus, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}, READ_TIMEOUT_S)
    except Refused as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise
    message = answer["message"]
    return Record(subject, message["seq"], base64.b64decode(message.get("data", "")), {})


async def latest(bus: Bus, stream: str, subjects_filter: str) -> list[Record]:
    """The latest record of each subject that a filter matches."""
    try:
        return await _latest(bus, stream, [subjects_filter])
    except TooMany:
        named = await subjects(bus, stream, subjects_filter)
    asked = (named[first : first + BATCH_MESSAGES] for first in range(0, len(named), BATCH_MESSAGES))
    return [record for some in asked for record in await _latest(bus, stream, some)]


async def _latest(bus: Bus, stream: str, filters: list[str]) -> list[Record]:
    """Raises `TooMany`."""
    found: list[Record] = []
    ask: dict[str, Any] = {"multi_last": filters, "batch": BATCH_MESSAGES}
    while True:
        after = found[-1].sequence if found else 0
        batch = await read_batch(bus, stream, {**ask, "seq": after + 1}, READ_TIMEOUT_S)
        found += map(_record, batch.messages)
        if not batch.more or not batch.messages:
            return found
        ask["up_to_seq"] = batch.up_to


async def read_some(bus: Bus, stream: str, subjects: str, after: int = 0) -> tuple[list[Record], bool]:
    """The next records (some MB) that a filter matches with a sequence above `after`, and whether there are more."""
    ask = {"seq": after + 1, "next_by_subj": subjects, "batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES}
    batch = await read_batch(bus, stream, ask, READ_TIMEOUT_S)
    return [_record(message) for message in batch.messages], batch.more


async def subjects(bus: Bus, stream: str, subjects_filter: str) -> list[str]:
    """Those that a filter matches and that have a record. Raises `BusUnavailable`."""
    found: dict[str, int] = {}
    while True:
        body = {"subjects_filter": subjects_filter, "offset": len(found)}
        answer = await call(bus, f"STREAM.INFO.{stream}", body, READ_TIMEOUT_S)
        found |= answer["state"].get("subjects") or {}
        # Where others come or go meanwhile, pages do not fit together: the next look finds what this one missed.
        if len(found) >= answer.get("total", 0) or len(found) == body["offset"]:
            return list(found)


@contextlib.asynccontextmanager
async def listening(bus: Bus, subjects: str, on_change: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_change` when a record that the filter matches is written; it may be called for nothing, or not."""

    async def on_message(message: Msg) -> None:
        on_change()

    subscription = await bus.subscribe(subjects, on_message)
    try:
        yield
    finally:
        await bus.unsubscribe(subscription)


async def erase(bus: Bus, stream: str, subjects: str) -> int:
    """Removes all records that a filter matches; how many there were."""
    answer = await call(bus, f"STREAM.PURGE.{stream}", {"filter": subjects}, READ_TIMEOUT_S)
    return int(answer["purged"])


def _record(message: Msg) -> Record:
    headers = message.headers or {}
    return Record(headers[SUBJECT_HEADER], int(headers[SEQUENCE_HEADER]), message.data, headers)
